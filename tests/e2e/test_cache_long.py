"""A million look-ups on every way while replicas die, files are damaged and multiplexers are killed: none differs.

What comes from the cache alone has the very bits of an earlier answer to the same request; what was computed again,
after the store had lost it, is as near to that as two batches of the engine are. What is asked is drawn anew each
time: text, prompt, side of truncation, normalisation, dimensions, way. Calls may fail while everything dies; a call
that succeeds is right.
"""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
import requests

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.arrows import dense_request, vectors
from testing.cached import CachedAppliance, entries_of
from testing.running import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(1800)]
LOOKUPS = int(os.environ.get("CACHE_LOOKUPS", "1000000"))
THREADS, TEXTS, ROWS = 4, 1000, 500
TROUBLE_SECS = 10.0
INFO = mux.InfoRequest(target=mux.Target(instance_name="dense"))


class Asked(NamedTuple):
    """All of a request that is in its key."""

    instance: str
    text: int
    normalize: bool
    dimensions: int | None
    left: bool
    prompt: str | None

    def inner(self) -> tei.EmbedRequest:
        return tei.EmbedRequest(inputs=text_of(self.text), truncate=True, **self.options())

    def options(self) -> dict[str, Any]:
        return {
            "normalize": self.normalize,
            "dimensions": self.dimensions,
            "truncation_direction": int(self.left),
            "prompt_name": self.prompt,
        }


def text_of(number: int) -> str:
    return f"text {number} " + "word " * (number % 40)


class Book:
    """The answers to each request that were seen. unseen: from the cache alone, and not among them: computed for a call
    that then failed, of which there are as many at most as the failed calls had rows."""

    def __init__(self) -> None:
        self.seen: dict[Asked, set[bytes]] = {}
        self.lookups = self.failures = self.failed_rows = 0
        self.wrong: list[Asked] = []
        self.unseen: list[Asked] = []
        self.lock = threading.Lock()

    def note(self, asked: list[Asked], found: list[bytes], said: str) -> None:
        """said: about the cache."""
        assert len(asked) == len(found)
        cached = said == "hit" or said.endswith("misses=0")
        with self.lock:
            self.lookups += len(found)
            for one, each in zip(asked, found, strict=True):
                seen = self.seen.setdefault(one, set())
                if seen and each not in seen:
                    if cached:
                        self.unseen.append(one)
                    if not near(each, next(iter(seen))):
                        self.wrong.append(one)
                seen.add(each)

    def note_failure(self, rows: int) -> None:
        with self.lock:
            self.failures += 1
            self.failed_rows += rows


def near(one: bytes, other: bytes) -> bool:
    first, second = (np.frombuffer(each, np.float32) for each in (one, other))
    return len(first) == len(second) and bool(np.allclose(first, second, rtol=1e-4, atol=1e-5))


class Caller(threading.Thread):
    """Asks on one way after the other until enough was looked up."""

    def __init__(self, box: CachedAppliance, book: Book, seed: int) -> None:
        super().__init__(daemon=True)
        self.box, self.book = box, book
        self.choice = random.Random(seed)
        self.stub = box.stub()

    def drawn(self) -> Asked:
        choice = self.choice
        name = choice.choice(("dense", "prompted"))
        return Asked(
            instance=name,
            text=int(TEXTS * choice.random() ** 3),
            normalize=choice.random() < 0.7,
            dimensions=choice.choice((None, None, 8)),
            left=choice.random() < 0.2,
            prompt=choice.choice((None, "query", "passage")) if name == "prompted" else None,
        )

    def run(self) -> None:
        ways = {self.single: 1, self.stream: 30, self.batch: ROWS, self.http: 50}
        while self.book.lookups < LOOKUPS:
            way = self.choice.choices(list(ways), (1, 1, 3, 1))[0]
            try:
                way(ways[way])
            except (grpc.RpcError, requests.RequestException):
                self.book.note_failure(ways[way])
                time.sleep(0.05)

    def alike(self, count: int) -> list[Asked]:
        first = self.drawn()
        return [first._replace(text=int(TEXTS * self.choice.random() ** 3)) for _ in range(count)]

    def single(self, _: int) -> None:
        asked = self.drawn()
        request = mux.EmbedRequest(target=mux.Target(instance_name=asked.instance), request=asked.inner())
        reply, call = self.stub.Embed.with_call(request, timeout=60)
        said = dict(call.initial_metadata())["x-tei-cache"]
        self.book.note([asked], [np.array(reply.embeddings, np.float32).tobytes()], said)

    def stream(self, rows: int) -> None:
        asked = self.alike(rows)
        target = mux.Target(instance_name=asked[0].instance)
        requests_ = (mux.EmbedRequest(target=target, request=one.inner()) for one in asked)
        replies = self.stub.EmbedStream(requests_, timeout=60)
        found = [np.array(reply.embeddings, np.float32).tobytes() for reply in replies]
        self.book.note(asked, found, dict(replies.trailing_metadata()).get("x-tei-cache", ""))

    def batch(self, rows: int) -> None:
        asked = self.alike(rows)
        request = dense_request(asked[0].instance, [text_of(one.text) for one in asked], **asked[0].options())
        reply, call = self.stub.EmbedArrow.with_call(request, timeout=60)
        found = [each.tobytes() for each in vectors(reply) if each is not None]
        self.book.note(asked, found, dict(call.initial_metadata())["x-tei-cache"])

    def http(self, rows: int) -> None:
        asked = [one._replace(dimensions=None) for one in self.alike(rows)]
        body: dict[str, Any] = {"inputs": [text_of(one.text) for one in asked], "normalize": asked[0].normalize}
        body |= {"truncate": True, "truncation_direction": "left" if asked[0].left else "right"}
        body |= {"prompt_name": asked[0].prompt} if asked[0].prompt else {}
        answer = self.box.http("/embed", body, x_tei_instance=asked[0].instance)
        if answer.status_code != 200:
            self.book.note_failure(rows)
            return
        found = [np.array(row, np.float32).tobytes() for row in answer.json()]
        self.book.note(asked, found, answer.headers["x-tei-cache"])


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CachedAppliance]:
    running = CachedAppliance(tmp_path_factory.mktemp("million"))
    with running:
        running.add("dense", replicas=2)
        folder = running.model("prompted")
        prompts = {"prompts": {"query": "ask about: ", "passage": "tell of: "}}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
        running.create("prompted", model_id=str(folder))
        running.wait_ready("prompted")
        eventually(lambda: running.fingerprint("prompted"))
        yield running


def kill_replica(box: CachedAppliance) -> None:
    for process in box.processes_of("dense", 1):
        process.kill()


def kill_multiplexer(box: CachedAppliance) -> None:
    for process in box.left_over():
        if "appliance.multiplexer" in process.cmdline():
            process.send_signal(signal.SIGKILL)


def damage(box: CachedAppliance) -> None:
    for path in entries_of(box)[-1:]:
        with path.open("r+b") as file:
            for _ in range(50):
                file.seek(random.randrange(max(1, path.stat().st_size)))
                file.write(os.urandom(8))


def forget(box: CachedAppliance) -> None:
    box.delete("/cache?instance=dense")


def delete_files(box: CachedAppliance) -> None:
    for path in entries_of(box):
        path.unlink(missing_ok=True)


def test_a_million_lookups_have_no_difference(box: CachedAppliance) -> None:
    book = Book()
    callers = [Caller(box, book, seed) for seed in range(THREADS)]
    began = time.monotonic()
    for caller in callers:
        caller.start()
    troubles = [kill_replica, kill_multiplexer, damage, forget, delete_files]
    count = 0
    while any(caller.is_alive() for caller in callers):
        time.sleep(TROUBLE_SECS)
        troubles[count % len(troubles)](box)
        count += 1
    for caller in callers:
        caller.join()
    cache = box.get("/cache").json()
    print(
        f"{book.lookups} look-ups in {time.monotonic() - began:.0f} s, {len(book.seen)} requests, {count} troubles, "
        f"{book.failures} calls failed, {len(book.unseen)} rows unseen, {cache['hits']} hits, {cache['misses']} misses"
    )
    assert book.lookups >= LOOKUPS
    assert book.wrong == []
    assert len(book.unseen) <= book.failed_rows
    assert cache["hits"] > LOOKUPS / 4


def test_200_kills_in_the_middle_of_writes_leave_no_wrong_row(box: CachedAppliance, tmp_path: Path) -> None:
    expected: dict[str, bytes] = {}
    for turn in range(200):
        texts = [f"kill {turn % 20} {number}" for number in range(100)]
        stub = box.stub()
        ended = threading.Thread(target=kill_multiplexer, args=(box,))
        try:
            call = stub.EmbedArrow.future(dense_request("dense", list(texts)), timeout=30)
            time.sleep(random.uniform(0, 0.15))
            ended.start()
            found = vectors(call.result())
        except grpc.RpcError:
            found = []
        finally:
            ended.join()
        for text, vector in zip(texts, found, strict=bool(found)):
            assert vector is not None
            assert near(expected.setdefault(text, vector.tobytes()), vector.tobytes())
        eventually(lambda: box.stub().Info(INFO, timeout=2))
    assert len(expected) >= 1000
