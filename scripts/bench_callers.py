"""Callers in a closed loop, for scripts/bench.py: each asks, waits for the answer and asks again.

python scripts/bench_callers.py PORT CALLERS SECONDS [--pause SECS]

They come one after the other in the first second. A refused caller comes back after its retry-after-ms, or with
``--pause`` after these seconds. Prints one JSON object: seconds, answered, refused, unnamed (refusals without
retry-after-ms), p50 and p99 (milliseconds to a refusal, null without any). All callers are coroutines of one thread: as
many threads would take turns with each other, and with the multiplexer, on few cores.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

import grpc
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub
from testing.texts import mixed_texts

CHANNELS = 4
ARRIVAL_SECS = 1.0
REQUEST = mux.EmbedRequest(
    target=mux.Target(instance_name="one"), request=tei.EmbedRequest(inputs=mixed_texts(4)[3], truncate=True)
)


class Callers:
    def __init__(self, ended: float, pause: float | None) -> None:
        self.ended, self.pause = ended, pause
        self.answered = self.unnamed = 0
        self.refused: list[float] = []

    async def call(self, stub: TeiMultiplexerStub, late: float) -> None:
        await asyncio.sleep(late)
        while time.monotonic() < self.ended:
            began = time.perf_counter()
            try:
                await stub.Embed(REQUEST, timeout=60)
                self.answered += 1
                wait = self.pause or 0
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                self.refused.append(time.perf_counter() - began)
                after = dict(error.trailing_metadata()).get("retry-after-ms")
                self.unnamed += after is None
                wait = self.pause or int(after or 100) / 1000
            await asyncio.sleep(wait)


async def main(port: int, callers: int, seconds: float, pause: float | None) -> None:
    # grpc shares one connection between channels of the same options
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("bench.number", at)]) for at in range(CHANNELS)]
    stubs = [TeiMultiplexerStub(channel) for channel in channels]
    work = Callers(time.monotonic() + seconds, pause)
    await asyncio.gather(
        *(work.call(stubs[number % CHANNELS], ARRIVAL_SECS * number / callers) for number in range(callers))
    )
    p50, p99 = np.percentile(work.refused, [50, 99]) * 1000 if work.refused else (None, None)
    counts = {"answered": work.answered, "refused": len(work.refused), "unnamed": work.unnamed}
    print(json.dumps({"seconds": seconds, **counts, "p50": p50, "p99": p99}))
    for channel in channels:
        await channel.close()


parser = argparse.ArgumentParser()
parser.add_argument("port", type=int)
parser.add_argument("callers", type=int)
parser.add_argument("seconds", type=float)
parser.add_argument("--pause", type=float)
given = parser.parse_args()
asyncio.run(main(given.port, given.callers, given.seconds, given.pause))
