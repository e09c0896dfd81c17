"""`make soak`: an hour of mixed load on one engine, and whether its memory stays flat.

    python scripts/soak.py [minutes]

Short and long texts, single calls one after the other and many at once, streams, refusals and cancelled calls, over and
over. Every minute the resident memory is printed; at the end its slope after the first ten minutes (a sixth of the
time, in a shorter run).
"""

import sys
import tempfile
import time
from pathlib import Path

import grpc
import numpy as np
import psutil

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from appliance.wire.tei.v1 import tei_pb2 as tei  # noqa: E402
from testing.engines import Engine  # noqa: E402
from testing.running import MINILM  # noqa: E402
from testing.texts import mixed_texts  # noqa: E402


def one_round(engine: Engine, number: int) -> int:
    """Some seconds of load; returns how many texts were answered."""
    stub = engine.stub("Embed")
    texts = mixed_texts(60, seed=number)
    answered = sum(1 for _ in stub.EmbedStream(tei.EmbedRequest(inputs=text, truncate=True) for text in texts))
    singles = [tei.EmbedRequest(inputs=text, truncate=True) for text in texts[:20]]
    answered += sum(1 for request in singles if stub.Embed(request).embeddings)
    at_once = [stub.Embed.future(request) for request in singles]
    answered += sum(1 for call in at_once if call.result().embeddings)
    for wrong in (tei.EmbedRequest(inputs=""), tei.EmbedRequest(inputs="word " * 3000)):
        try:
            stub.Embed(wrong)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
    cancelled = stub.EmbedStream(tei.EmbedRequest(inputs=text, truncate=True) for text in texts)
    next(cancelled)
    cancelled.cancel()
    return answered


def main(minutes: float) -> None:
    with tempfile.TemporaryDirectory() as room, Engine(Path(room), MINILM) as engine:
        process = psutil.Process(engine.process.pid)
        began, printed, answered, number = time.monotonic(), 0, 0, 0
        samples: list[tuple[float, float]] = []
        while (passed := (time.monotonic() - began) / 60) < minutes:
            answered += one_round(engine, number)
            number += 1
            samples.append((passed, process.memory_info().rss / 1e6))
            if passed >= printed:
                print(f"{passed:5.1f} min  {samples[-1][1]:6.1f} MB  {answered} texts", flush=True)
                printed += 1
        later = [sample for sample in samples if sample[0] > minutes / 6]
        slope = np.polyfit([at for at, _ in later], [size for _, size in later], 1)[0] * 60
        print(f"slope after the first {minutes / 6:.0f} minutes: {slope:+.2f} MB an hour")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60)
