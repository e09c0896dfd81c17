"""`make bench PARTS=http`: single texts over HTTP, one a request, from few and from many callers at once.

Each caller has a connection, asks, waits and asks again; every text is another one, and the cache is off. Beside the
gateway: the same number of callers at the engine's own gRPC port, and, where BENCH_HTTP_OTHER names the URL of another
server's OpenAI route, that one. The model is tiny, so that the way costs more than the work. The ways take turns.
"""

import json
import os
import selectors
import socket
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import grpc

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei.v1.tei_pb2_grpc import EmbedStub
from testing.running import RunningAppliance

CALLERS = (1, 4, 16, 64)
SECONDS, TURNS = 3.0, 3
OTHER = os.environ.get("BENCH_HTTP_OTHER")
MODEL = os.environ.get("BENCH_HTTP_MODEL", "tiny")  # as the other server calls it


class HttpLoad(NamedTuple):
    per_sec: float
    p50_ms: float


def http(room: Path) -> list[tuple[str, ...]]:
    with RunningAppliance(room, seeds="") as running:
        running.create("tiny")
        running.wait_ready("tiny")
        port = int(running.instance("tiny")["port"])
        url = f"http://127.0.0.1:{running.http_port}/v1/embeddings"
        ways: dict[str, Callable[[int], HttpLoad]] = {
            "engine, gRPC": lambda callers: direct(port, callers),
            "gateway": lambda callers: posted(url, "tiny", callers),
        }
        if OTHER:
            ways["other"] = lambda callers: posted(OTHER, MODEL, callers)
        lines: list[tuple[str, ...]] = [("callers", "way", "calls/s", "p50 ms", *(f"/ {name}" for name in ways))]
        for callers in CALLERS:
            found: dict[str, list[HttpLoad]] = {name: [] for name in ways}
            for turn in range(TURNS + 1):  # the first warms all up
                for name, measure in ways.items():
                    load = measure(callers)
                    found[name] += [load] if turn else []
            lines += [line(callers, name, found) for name in ways]
    return lines


def line(callers: int, name: str, found: dict[str, list[HttpLoad]]) -> tuple[str, ...]:
    own = found[name]
    ratios = (
        statistics.median(one.per_sec / two.per_sec for one, two in zip(own, other, strict=True))
        for other in found.values()
    )
    per_sec, p50 = (statistics.median(getattr(load, field) for load in own) for field in HttpLoad._fields)
    return (str(callers), name, f"{per_sec:.0f}", f"{p50:.2f}", *(f"{ratio:.2f}" for ratio in ratios))


def summed(seconds: list[float]) -> HttpLoad:
    return HttpLoad(len(seconds) / SECONDS, statistics.median(seconds) * 1000)


def posted(url: str, model: str, callers: int) -> HttpLoad:
    """All callers in one thread: as many threads would take turns with each other."""
    where = urlsplit(url)
    selector, took, count = selectors.DefaultSelector(), [], 0

    def request() -> bytes:
        nonlocal count
        count += 1
        body = json.dumps({"input": f"text {count}", "model": model})
        head = f"POST {where.path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        return f"{head}\r\n\r\n{body}".encode()

    began: dict[socket.socket, float] = {}
    received: dict[socket.socket, bytes] = {}
    for _ in range(callers):
        connection = socket.create_connection((where.hostname, where.port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(connection, selectors.EVENT_READ, connection)
        began[connection], received[connection] = time.perf_counter(), b""
        connection.sendall(request())
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        for key, _ in selector.select(1):
            connection = key.data
            received[connection] += connection.recv(65536)
            if is_whole(received[connection]):
                now = time.perf_counter()
                took.append(now - began[connection])
                began[connection], received[connection] = now, b""
                connection.sendall(request())
    for connection in began:
        connection.close()
    return summed(took)


def is_whole(reply: bytes) -> bool:
    """Whether all of a reply is there. Raises: RuntimeError for one that is none, or no success."""
    head, found, body = reply.partition(b"\r\n\r\n")
    if not reply or (found and b" 200 " not in head.split(b"\r\n", 1)[0]):
        raise RuntimeError(reply[:300].decode(errors="replace") or "The connection was closed")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(found) and (len(body) >= int(lengths[0].split(b":")[1]) if lengths else body.endswith(b"0\r\n\r\n"))


def direct(port: int, callers: int) -> HttpLoad:
    took: list[float] = []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        embed = EmbedStub(channel).Embed
        until = time.perf_counter() + SECONDS

        def call(caller: int) -> None:
            count = 0
            while (began := time.perf_counter()) < until:
                count += 1
                embed(tei.EmbedRequest(inputs=f"text {caller} {count}", truncate=True))
                took.append(time.perf_counter() - began)

        threads = [threading.Thread(target=call, args=(caller,)) for caller in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return summed(took)
