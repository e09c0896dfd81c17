"""`GET /events/stream`: what happens arrives, nothing is missed on the way back, and no reader costs a thread."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import psutil
import pytest
import requests

from appliance.drivers.eventstream import MOST_READERS
from testing.running import RunningAppliance, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.processes]
READERS = 50


class Stream:
    def __init__(self, node: RunningAppliance, headers: dict[str, str], query: dict[str, Any]) -> None:
        self.answer = requests.get(f"{node.url}/events/stream", headers=headers, params=query, stream=True, timeout=30)
        self.lines = self.answer.iter_lines(chunk_size=1, decode_unicode=True)

    def next(self) -> tuple[int, dict[str, Any]]:
        """The number and the data of the next event."""
        number = -1
        for line in self.lines:
            field, _, value = line.partition(": ")
            if field == "id":
                number = int(value)
            if field == "data":
                return number, json.loads(value)
        raise AssertionError("the stream has ended")

    def until(self, word: str, instance: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while not found or (found[-1]["event"], found[-1]["instance"]) != (word, instance):
            number, event = self.next()
            assert number == event["seq"]
            found.append(event)
        return found


@contextmanager
def streaming(node: RunningAppliance, headers: dict[str, str] | None = None, **query: Any) -> Iterator[Stream]:
    stream = Stream(node, headers or {}, query)
    with closing(stream.answer):
        yield stream


def sleeper(node: RunningAppliance, name: str) -> None:
    """An instance that starts no process."""
    node.create(name, start="on_demand")


def test_what_happens_arrives_and_what_was_missed_follows(appliance: RunningAppliance) -> None:
    with streaming(appliance) as stream:
        assert stream.answer.headers["Content-Type"] == "text/event-stream"
        sleeper(appliance, "streamed")
        began = time.monotonic()
        seen = stream.until("created", "streamed")[-1]
        assert time.monotonic() - began < 5
    appliance.delete("/instances/streamed")
    with streaming(appliance, {"Last-Event-ID": str(seen["seq"])}) as stream:
        missed = stream.until("deleted", "streamed")
    told = appliance.get("/events", since=seen["seq"]).json()
    assert missed == told[: len(missed)]
    with streaming(appliance, since=seen["seq"]) as stream:
        assert stream.next()[1] == missed[0]
    with streaming(appliance, since=10**9) as stream:
        assert stream.next()[0] == 1, "of a journal that was begun anew nothing is missed"


@pytest.mark.parametrize(
    ("headers", "query", "words"),
    [
        ({"Last-Event-ID": "many"}, {}, "Last-Event-ID must be the seq of an event"),
        ({}, {"since": "many"}, "since must be a whole number"),
        ({}, {"form": "1"}, "Unknown query parameter"),
    ],
)
def test_nonsense_is_refused_and_no_stream(
    appliance: RunningAppliance, headers: dict[str, str], query: dict[str, str], words: str
) -> None:
    refused = requests.get(f"{appliance.url}/events/stream", headers=headers, params=query, timeout=10)
    assert refused.status_code == 422
    assert words in refused.json()["error"]


def test_a_head_is_a_head_and_an_old_client_gets_no_chunks(appliance: RunningAppliance) -> None:
    head = requests.head(f"{appliance.url}/events/stream", timeout=10)
    assert (head.status_code, head.headers["Content-Type"], head.text) == (200, "text/event-stream", "")
    host, port = appliance.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as old:
        old.sendall(b"GET /events/stream?since=0 HTTP/1.0\r\n\r\n")
        heard = b""
        while b"\ndata: " not in heard:
            heard += old.recv(4096)
    answered, _, body = heard.partition(b"\r\n\r\n")
    assert b"chunked" not in answered
    assert body.startswith(b"retry: ")


def control_processes(node: RunningAppliance) -> list[psutil.Process]:
    found = [process for process in node.left_over() if "appliance.control" in " ".join(process.cmdline())]
    return [process for process in found if process.children() == []]


def test_readers_hold_no_thread_and_leave_nothing_behind(appliance: RunningAppliance) -> None:
    workers = control_processes(appliance)
    assert len(workers) == 2
    with streaming(appliance):
        for _ in range(64):
            appliance.get("/ready")  # both have their threads by now
        threads = sum(process.num_threads() for process in workers)
        files = sum(process.num_fds() for process in workers)
        with ExitStack() as stack:
            streams = [stack.enter_context(streaming(appliance)) for _ in range(READERS)]
            assert sum(process.num_threads() for process in workers) <= threads + len(workers)
            assert all(appliance.get("/ready").ok for _ in range(10))
            sleeper(appliance, "heard")
            for stream in streams:
                stream.until("created", "heard")
        eventually(lambda: sum(process.num_fds() for process in workers) <= files + 4)
    appliance.delete("/instances/heard")


def test_more_readers_than_there_may_be_are_refused_in_words(appliance: RunningAppliance) -> None:
    with ExitStack() as stack:
        for _ in range(2 * MOST_READERS + 1):
            answer = stack.enter_context(streaming(appliance)).answer
            if answer.status_code != 200:
                break
        assert answer.status_code == 503  # the body of a stream has no end
        assert answer.json()["code"] == "TOO_MANY_STREAMS"
        assert appliance.get("/ready").ok

    def is_taken() -> bool:
        with streaming(appliance) as stream:
            return stream.answer.status_code == 200

    eventually(is_taken)


def test_a_revoked_key_ends_the_stream(own_appliance: RunningAppliance) -> None:
    node = own_appliance
    admin = {"Authorization": f"Bearer {node.post('/keys', {'name': 'boss', 'role': 'admin'}).json()['key']}"}
    made = requests.post(f"{node.url}/keys", json={"name": "eye", "role": "read"}, headers=admin, timeout=10).json()
    eye = {"Authorization": f"Bearer {made['key']}"}
    # Of both workers, whichever answers.
    assert [requests.get(f"{node.url}/gpus", timeout=10).status_code for _ in range(10)] == [401] * 10
    assert [requests.get(f"{node.url}/gpus", headers=eye, timeout=10).status_code for _ in range(10)] == [200] * 10
    assert requests.get(f"{node.url}/events/stream", timeout=10).status_code == 401
    with streaming(node, eye, since=0) as stream:
        stream.next()
        requests.delete(f"{node.url}/keys/eye", headers=admin, timeout=10)
        began = time.monotonic()
        list(stream.lines)
        assert time.monotonic() - began < 15
