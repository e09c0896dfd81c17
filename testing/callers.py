"""Callers in all ways, and what became of each of their calls."""

import random
import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import grpc
import numpy as np
import psutil
import requests

from appliance.wire.envelope import CODE_KEY
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub
from testing.arrows import dense_request, vectors
from testing.background import PAUSE_SECS, Background
from testing.calling import ARROW_ROWS, PATIENT_SECS, new_text, request
from testing.running import RunningAppliance

STREAM_TEXTS = 3
BROKEN = re.compile(
    "socket closed|connection reset|broken pipe|goaway|stream removed|recvmsg|rst_stream", re.IGNORECASE
)


class Failure(NamedTuple):
    """kind: a gRPC code, an HTTP status, or the name of an exception. code: the appliance's own, where there is one."""

    kind: str
    code: str
    words: str

    @property
    def is_broken_connection(self) -> bool:
        """Whether the caller's own connection broke, and nobody answered."""
        return self.kind == "UNAVAILABLE" and not self.code and bool(BROKEN.search(self.words))


class Call(NamedTuple):
    way: str
    instance: str
    began: float
    ended: float
    failure: Failure | None

    @property
    def secs(self) -> float:
        return self.ended - self.began

    def overlaps(self, began: float, ended: float) -> bool:
        return self.began <= ended and began <= self.ended


class Callers(Background):
    """One thread for each way, with a connection of its own, and every call that they made.

    widths: of the vectors that are right. weights: how often each name is called, beside the others; None: equally.
    """

    def __init__(
        self,
        box: RunningAppliance,
        names: Sequence[str],
        widths: Collection[int],
        seed: int,
        weights: Sequence[float] | None = None,
        pause_secs: float = PAUSE_SECS,
    ) -> None:
        super().__init__(pause_secs)
        self.box, self.names, self.widths, self.weights = box, names, widths, weights
        self.calls: list[Call] = []
        ways = {"grpc": self.over_grpc, "arrow": self.over_arrow, "stream": self.over_a_stream, "http": self.over_http}
        self.session = requests.Session()
        self.channels = {way: self.channel() for way in ("grpc", "arrow", "stream")}
        chances = [random.Random(seed + number) for number in range(len(ways))]
        self.threads = [
            threading.Thread(target=self.call, args=(way, ask, chance))
            for (way, ask), chance in zip(ways.items(), chances, strict=True)
        ]

    def channel(self) -> grpc.Channel:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500)]
        return grpc.insecure_channel(f"127.0.0.1:{self.box.grpc_port}", options)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.session.close()
        for channel in self.channels.values():
            channel.close()

    def call(self, way: str, ask: Callable[[str], int], chance: random.Random) -> None:
        while self.paused():
            (name,), began, failure = chance.choices(self.names, self.weights), time.monotonic(), None
            try:
                width = ask(name)
                if width not in self.widths:
                    failure = Failure("WIDTH", "", f"a vector of {width} numbers")
            except grpc.RpcError as error:
                code = dict(error.trailing_metadata() or ()).get(CODE_KEY, "")
                failure = Failure(error.code().name, code, error.details())
            except requests.HTTPError as error:
                failure = Failure(str(error.response.status_code), "", error.response.text)
            except Exception as error:
                failure = Failure(type(error).__name__, "", str(error))
            self.calls.append(Call(way, name, began, time.monotonic(), failure))
            if failure:
                self.ended.wait(0.1)

    def over_grpc(self, name: str) -> int:
        """It waits for a connection, as far as its deadline allows: a process that was killed listens again soon."""
        stub = TeiMultiplexerStub(self.channels["grpc"])
        return len(stub.Embed(request(name, new_text()), timeout=PATIENT_SECS, wait_for_ready=True).embeddings)

    def over_arrow(self, name: str) -> int:
        asked = dense_request(name, [new_text() for _ in range(ARROW_ROWS)])
        stub = TeiMultiplexerStub(self.channels["arrow"])
        found = vectors(stub.EmbedArrow(asked, timeout=PATIENT_SECS, wait_for_ready=True))
        assert len(found) == ARROW_ROWS
        return int(np.array(found).shape[1])

    def over_a_stream(self, name: str) -> int:
        stub = TeiMultiplexerStub(self.channels["stream"])
        asked = iter([request(name, new_text()) for _ in range(STREAM_TEXTS)])
        replies = list(stub.EmbedStream(asked, timeout=PATIENT_SECS, wait_for_ready=True))
        assert len(replies) == STREAM_TEXTS
        return len(replies[-1].embeddings)

    def over_http(self, name: str) -> int:
        url = f"http://127.0.0.1:{self.box.http_port}/v1/embeddings"
        reply = self.session.post(url, json={"model": name, "input": new_text()}, timeout=PATIENT_SECS)
        reply.raise_for_status()
        return len(reply.json()["data"][0]["embedding"])


def kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass
