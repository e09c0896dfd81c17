"""What a batch held is freed when it ends, however it ends, and not when Python next looks for cycles."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.core.problems import Kind, Problem
from appliance.core.routing import Replica, Target
from appliance.core.settings import QueueSettings
from appliance.drivers.http2 import CallFailed
from appliance.multiplexer.batch import Batches, Job, RowFailed
from appliance.multiplexer.gate import Gate


class OneReplica:
    """As `Fleet`, `Backend` and `Connection` at once: answers each request with itself, a bad one with a refusal."""

    def __init__(self) -> None:
        self.replica = Replica("one", 0, "127.0.0.1:1", "org/one", 1, 64)
        self.outstanding = 0
        self.its_gate = Gate("one", QueueSettings())
        self.its_gate.resize(64)
        self.lines = SimpleNamespace(drop=lambda address: None)

    def ready(self, target: Target) -> list["OneReplica"]:
        return [self]

    def gate(self, backend: Any) -> Gate:
        return self.its_gate

    def take(self, texts: int) -> None:
        self.outstanding += texts

    @contextmanager
    def line(self, backend: Any) -> Iterator["OneReplica"]:
        yield self

    def begin(self, path: str, messages: Sequence[bytes], metadata: Any, one_at_a_time: bool) -> Sequence[bytes]:
        return messages

    def replies(self, messages: Sequence[bytes], check: Callable[[], None]) -> Iterator[bytes]:
        for message in messages:
            if message == b"bad":
                raise CallFailed(3, "bad text", [], answered=True)
            yield message


def accept(row: int, reply: bytes) -> None:
    pass


def refuse(row: int, reply: bytes) -> None:
    raise Problem(Kind.EXHAUSTED, "TOO_LARGE", "The reply would be too large")


@pytest.mark.parametrize(
    ("last", "take", "ends"), [(b"good", accept, None), (b"good", refuse, Problem), (b"bad", accept, RowFailed)]
)
def test_a_job_is_gone_as_soon_as_it_has_ended(last: bytes, take: Any, ends: type[Exception] | None) -> None:
    batches = Batches(OneReplica(), 0, 1)  # type: ignore[arg-type]

    def call() -> weakref.ref[Job]:
        job = Job(Target("one"), "/", [b"good", last], [1, 1], take, None, lambda: False, keep_errors=False)
        if ends is None:
            assert batches.run(job) == {}
        else:
            with pytest.raises(ends) as caught:
                batches.run(job)
            del caught
        return weakref.ref(job)

    gc.disable()
    try:
        found = call()
        batches.threads.shutdown()  # the slice's thread has let go, too
        assert found() is None
    finally:
        gc.enable()
