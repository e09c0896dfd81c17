"""Callers in every way that there is: each failure, each wrong vector and the longest wait is kept."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import requests

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.arrows import dense_request, vectors
from testing.background import Background
from testing.machines import Machine

DEADLINE_SECS = 60.0
MOST_STALL_SECS = 15.0


def arrow(front: Machine, name: str) -> Any:
    return front.stub().EmbedArrow(dense_request(name, ["river"] * 20), timeout=DEADLINE_SECS)


def request(name: str) -> mux.EmbedRequest:
    inner = tei.EmbedRequest(inputs="river", truncate=True, normalize=True)
    return mux.EmbedRequest(target=mux.Target(instance_name=name), request=inner)


def ways(front: Machine, name: str) -> dict[str, Callable[[], list[Any]]]:
    """Each gives vectors of the same text."""
    stub, session = front.stub(), requests.Session()
    url = f"http://{front.host}:{front.http_port}/v1/embeddings"

    def http() -> list[Any]:
        reply = session.post(url, json={"model": name, "input": ["river"] * 5}, timeout=DEADLINE_SECS)
        assert reply.status_code == 200, reply.text[:200]
        return [each["embedding"] for each in reply.json()["data"]]

    def stream() -> list[Any]:
        replies = list(stub.EmbedStream(iter([request(name)] * 20), timeout=DEADLINE_SECS))
        assert len(replies) == 20
        return [each.embeddings for each in replies]

    return {
        "unary": lambda: [stub.Embed(request(name), timeout=DEADLINE_SECS).embeddings],
        "stream": stream,
        "arrow": lambda: vectors(stub.EmbedArrow(dense_request(name, ["river"] * 50), timeout=DEADLINE_SECS)),
        "http": http,
    }


class Callers(Background):
    """One thread for each way, with every failure, wrong vector and the longest wait."""

    def __init__(self, front: Machine, name: str) -> None:
        super().__init__()
        self.right = np.array(front.stub().Embed(request(name), timeout=DEADLINE_SECS).embeddings)
        self.answered: dict[str, int] = {}
        self.failed: list[str] = []
        self.longest = 0.0
        self.threads = [threading.Thread(target=self.call, args=each) for each in ways(front, name).items()]

    def call(self, way: str, ask: Callable[[], list[Any]]) -> None:
        while self.paused():
            began = time.monotonic()
            try:
                found = ask()
                assert all(np.allclose(each, self.right, atol=1e-4) for each in found), "a wrong vector"
                self.answered[way] = self.answered.get(way, 0) + 1
            except Exception as error:
                self.failed.append(f"{way}: {error!r}"[:300])
            self.longest = max(self.longest, time.monotonic() - began)


def assert_nothing_is_noticed(front: Machine, name: str, what: str, fault: Callable[[], None]) -> None:
    """Callers ask before, during and after a fault, which returns when all is well again. A line of it is printed."""
    with Callers(front, name) as callers:
        time.sleep(2)
        began = time.monotonic()
        fault()
        took = time.monotonic() - began
        time.sleep(4)
    print(
        f"\n{what}: {callers.answered}, {len(callers.failed)} failed, longest {callers.longest:.1f} s, "
        f"all well again after {took:.0f} s"
    )
    assert callers.failed == []
    assert len(callers.answered) == 4
    assert callers.longest < MOST_STALL_SECS
