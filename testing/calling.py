"""The ways in which callers ask an appliance for embeddings; each returns the width of the vectors that it got."""

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import requests

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.arrows import dense_request, vectors
from testing.background import PAUSE_SECS
from testing.running import RunningAppliance

PATIENT_SECS = 60.0  # the deadline of each call
ARROW_ROWS, LONG_ROWS = 40, 400
NUMBERS = itertools.count()


def request(name: str, text: str = "hello") -> mux.EmbedRequest:
    inner = tei.EmbedRequest(inputs=text, truncate=True, normalize=True)
    return mux.EmbedRequest(target=mux.Target(instance_name=name), request=inner)


def new_text() -> str:
    """One that is in no cache."""
    return f"text {next(NUMBERS)}"


def embed(box: RunningAppliance, name: str, text: str = "hello", timeout: float = PATIENT_SECS) -> Any:
    return box.stub().Embed(request(name, text), timeout=timeout)


def over_grpc(box: RunningAppliance, name: str) -> int:
    return len(embed(box, name, new_text()).embeddings)


def over_arrow(box: RunningAppliance, name: str) -> int:
    reply = box.stub().EmbedArrow(dense_request(name, [new_text() for _ in range(ARROW_ROWS)]), timeout=PATIENT_SECS)
    found = vectors(reply)
    assert len(found) == ARROW_ROWS
    return len(found[0]) if found[0] is not None else 0


def over_a_stream(box: RunningAppliance, name: str) -> int:
    replies = list(
        box.stub().EmbedStream(iter([request(name, new_text()), request(name, new_text())]), timeout=PATIENT_SECS)
    )
    assert len(replies) == 2
    return len(replies[0].embeddings)


def over_http(box: RunningAppliance, name: str) -> int:
    url = f"http://127.0.0.1:{box.http_port}/v1/embeddings"
    reply = requests.post(url, json={"model": name, "input": new_text()}, timeout=PATIENT_SECS)
    assert reply.status_code == 200, reply.text
    return len(reply.json()["data"][0]["embedding"])


def list_over_http(box: RunningAppliance, name: str) -> int:
    """A list is a stream of batches that belong together."""
    url = f"http://127.0.0.1:{box.http_port}/v1/embeddings"
    asked = {"model": name, "input": [new_text() for _ in range(ARROW_ROWS)]}
    reply = requests.post(url, json=asked, timeout=PATIENT_SECS)
    assert reply.status_code == 200, reply.text
    (width,) = {len(each["embedding"]) for each in reply.json()["data"]}
    return width


def tokens_over_http(box: RunningAppliance, name: str) -> int:
    url = f"http://127.0.0.1:{box.http_port}/instances/{name}/embed_all"
    reply = requests.post(url, json={"inputs": [new_text() for _ in range(ARROW_ROWS)]}, timeout=PATIENT_SECS)
    assert reply.status_code == 200, reply.text
    (width,) = {len(vector) for tokens in reply.json() for vector in tokens}
    return width


WAYS = [over_grpc, over_arrow, over_a_stream, over_http, list_over_http, tokens_over_http]


def long_batch(box: RunningAppliance, name: str) -> int:
    """All of whose rows have one width: NumPy takes no others."""
    request = dense_request(name, [f"{new_text()} {'word ' * (row % 30)}" for row in range(LONG_ROWS)])
    found = np.array(vectors(box.stub().EmbedArrow(request, timeout=PATIENT_SECS)))
    assert found.shape[0] == LONG_ROWS
    return found.shape[1]


@contextmanager
def calling_all_the_time(box: RunningAppliance, name: str) -> Iterator[list[int]]:
    """Callers in all ways; the widths that they got. At the end: none of their calls has failed."""
    ended, problems, widths = threading.Event(), list[Exception](), list[int]()

    def call(way: Any) -> None:
        while not ended.wait(PAUSE_SECS):
            try:
                widths.append(way(box, name))
            except (AssertionError, grpc.RpcError) as problem:
                problems.append(problem)

    callers = (*WAYS, long_batch, long_batch)
    with ThreadPoolExecutor(len(callers)) as threads:
        for way in callers:
            threads.submit(call, way)
        try:
            yield widths
        finally:
            ended.set()
    assert not problems, [str(problem) for problem in problems]
