"""What a replica is told of a call: another appliance has to know what the caller said of waiting and of the cache."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.core.problems import Problem
from appliance.core.routing import Target
from appliance.multiplexer.arrow import job_of
from appliance.multiplexer.attempts import Attempts
from appliance.multiplexer.batch import BatchRunner
from appliance.wire.calls import CallFailed, Code, Status
from appliance.wire.methods import METHODS
from testing.one_replica import OneReplica

EMBED = next(method for method in METHODS if method.name == "Embed")
NO_WAIT = ("x-tei-wait", "no")
SAID = {
    "nothing": ((), []),
    "no wait": ((NO_WAIT,), [NO_WAIT]),
    "bypass": ((("x-tei-cache", "bypass"),), [("x-tei-cache", "bypass")]),
    "refresh": ((("x-tei-cache", "refresh"), NO_WAIT), [("x-tei-cache", "refresh"), NO_WAIT]),
    "use": ((("x-tei-cache", "use"),), []),
    "whole": ((("x-tei-whole", "yes"),), [("x-tei-whole", "yes")]),
    "only": ((("x-tei-cache", "only"),), []),  # what is not here is not computed: it comes to no peer
}


class Caller:
    def __init__(self, *metadata: tuple[str, str]) -> None:
        self.metadata = metadata

    def invocation_metadata(self) -> Any:
        return self.metadata

    def add_callback(self, _: Any) -> bool:
        return True

    def is_active(self) -> bool:
        return True

    def time_remaining(self) -> float | None:
        return None


class Told(OneReplica):
    """Notes the metadata of each call."""

    def __init__(self, is_peer: bool) -> None:
        super().__init__()
        self.its_replica = replace(self.its_replica, is_peer=is_peer)
        self.metadata: list[Any] = []
        self.takes_packed = False
        self.connections: Any = SimpleNamespace(drop_idle=lambda _: None, release=lambda *_: None)

    def acquire_connection(self, backend: Any, may_wait: bool) -> "Told":
        return self

    def begin(
        self, path: str, messages: Sequence[bytes], metadata: Any, one_at_a_time: bool = False
    ) -> Sequence[bytes]:
        self.metadata.append(list(metadata))
        return messages

    def replies(self, messages: Sequence[bytes], check: Any, wait: Any = None) -> Iterator[bytes]:
        yield from messages


def single(told: Told, caller: Any) -> None:
    pool: Any = told
    Attempts(pool, pool, 0).exchange(EMBED, pool, b"", caller)


def batch(told: Told, caller: Any) -> None:
    answered = threading.Event()
    collector = SimpleNamespace(method="Embed", path="/", accept=lambda text, reply: answered.set())
    job = replace(job_of(collector, Target("one"), (), caller), requests=[b"a"], lengths=[1])
    pool: Any = told
    assert BatchRunner(pool, 0, 1).run(job) == {}
    assert answered.is_set()


class ReplacedThere(Told):
    """Its instance is replaced in the midst of a slice."""

    def replies(self, messages: Sequence[bytes], check: Any, wait: Any = None) -> Iterator[bytes]:
        trailers = (("x-tei-code", "REPLACED"),)
        raise CallFailed(Status(Code.ALREADY_EXISTS, "was replaced", trailers), answered=True, begun=True)


@pytest.mark.parametrize("is_peer", [True, False])
def test_a_batch_whose_peer_has_replaced_the_instance_is_no_failure_of_a_row(is_peer: bool) -> None:
    """The gateway asks for all of it again, which it knows by the code."""
    caller: Any = Caller(("x-tei-whole", "yes"))
    pool: Any = ReplacedThere(is_peer)
    collector = SimpleNamespace(method="Embed", path="/", accept=lambda text, reply: None)
    job = replace(job_of(collector, Target("one"), (), caller), requests=[b"a"], lengths=[1])
    if is_peer:
        with pytest.raises(Problem) as replaced:
            BatchRunner(pool, 0, 1).run(job)
        assert replaced.value.code == "REPLACED"
    else:
        assert [each.details for each in BatchRunner(pool, 0, 1).run(job).values()] == ["was replaced"]


@pytest.mark.parametrize("call", [single, batch])
@pytest.mark.parametrize(("said", "passed"), SAID.values(), ids=SAID.keys())
def test_a_peer_is_told_not_to_wait_and_to_compute_anew(
    call: Callable[[Told, Any], None], said: Any, passed: list[tuple[str, str]]
) -> None:
    """An instance of a peer that slept was woken for who would not wait, and a refresh came from the peer's cache."""
    peer, own = Told(is_peer=True), Told(is_peer=False)
    for told in (peer, own):
        call(told, Caller(*said))
    assert peer.metadata == [passed]
    assert own.metadata == [[]]
