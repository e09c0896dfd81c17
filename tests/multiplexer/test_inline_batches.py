"""A small batch in a thread that others have, too: it waits for replies alone; whatever else follows is a thread's."""

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import grpc
import pyarrow as pa
import pytest
from greenlet import greenlet

from appliance.core.problems import Kind, Problem
from appliance.core.routing import Replica, Target
from appliance.drivers.memory import Reserve
from appliance.multiplexer.admission_queue import BulkWaiter
from appliance.multiplexer.arrow import ArrowHandlers, InlineBook
from appliance.multiplexer.batch import BatchRunner
from appliance.multiplexer.batch_run import BatchJob, TextFailure
from appliance.multiplexer.cooperation import Scheduler, WouldBlock
from appliance.multiplexer.inline_batches import in_thread
from appliance.multiplexer.joined_call import PartOfCall
from appliance.multiplexer.metering import Metering
from appliance.multiplexer.suspicion import Suspicion
from appliance.wire.calls import CallFailed, Code, Status
from testing.arrows import dense_request
from testing.one_replica import OneReplica

TEXTS = [b"one", b"two", b"three"]
BAD = CallFailed(Status(Code.INVALID_ARGUMENT, "bad text"), answered=True)
DIED = CallFailed(Status(Code.UNAVAILABLE, "gone"), answered=False)


class Replies(OneReplica):
    """Each request is answered in the thread that asks, or its call ends as ``fails`` says of it, once. is_idle: a
    connection need not be made. missing: why there is no replica."""

    def __init__(self, capacity: int = 64) -> None:
        super().__init__(capacity)
        self.is_cut = self.takes_packed = False
        self.is_idle = True
        self.missing: Problem | None = None
        self.fails: dict[bytes, CallFailed] = {}
        self.threads: list[threading.Thread] = []  # that have asked
        self.its_suspicion = super().suspicion(self.replica)

    def ready(self, target: Target, look: bool = True) -> list[OneReplica]:
        if self.missing:
            raise self.missing
        return [self]

    def suspicion(self, replica: Replica) -> Suspicion:
        return self.its_suspicion

    def ended_by_itself(self, replica: Replica) -> bool:
        return True

    @contextmanager
    def connection(self, backend: Any, may_wait: bool = True) -> Iterator["Replies"]:
        if not (may_wait or self.is_idle):
            raise WouldBlock
        yield self

    def replies(self, messages: Sequence[bytes], check: Callable[[], float], wait: Any) -> Iterator[bytes]:
        self.threads.append(threading.current_thread())
        for message in messages:
            if wait:  # as for bytes that are there already
                ours, its = socket.socketpair()
                with ours, its:
                    its.send(b"x")
                    wait(ours, select.POLLIN, check())
            check()
            if failure := self.fails.pop(message, None):
                raise failure
            yield message


@pytest.fixture
def replica() -> Replies:
    return Replies()


class Asked:
    """A batch of some texts in a scheduler, and what came of it."""

    def __init__(self, replica: Replies, texts: Sequence[bytes] = TEXTS, **job: Any) -> None:
        self.answers: list[tuple[int, bytes]] = []
        self.failures: dict[int, TextFailure] | None = None
        self.scheduler = Scheduler()
        self.left = False
        self.runner = BatchRunner(replica, 0, 1)  # type: ignore[arg-type]
        settings: dict[str, Any] = {"deadline": None, "keep_failures": False, "on_answer": self.accept, **job}
        self.job = BatchJob(
            Target("one"),
            "Embed",
            "/",
            texts,
            [1] * len(texts),
            scheduler=self.scheduler,
            caller_left=self.is_left,
            **settings,
        )

    def is_left(self) -> bool:
        return self.left

    def accept(self, text: int, reply: bytes) -> None:
        self.answers.append((text, reply))

    def run(self) -> None:
        self.failures = self.runner.run(self.job)

    def in_scheduler(self, *others: Callable[[], None]) -> "Asked":
        self.scheduler.run([self.run, *others])
        return self


def nothing_held(replica: Replies) -> bool:
    lanes = replica.its_queue.lanes
    held = (lanes.bulk, lanes.interactive, replica.outstanding, list(replica.its_queue.bulk_waiters))
    free = replica.leases.acquire(replica.replica, exclusive=True)
    if free:
        replica.leases.release(replica.replica, exclusive=True)
    return held == (0, 0, 0, []) and free


def all_answered(asked: Asked) -> bool:
    return sorted(asked.answers) == list(enumerate(asked.job.requests))


def test_it_is_answered_without_another_thread_beside_others(replica: Replies) -> None:
    asked = Asked(replica)
    order: list[int] = []
    asked.in_scheduler(lambda: order.append(len(asked.answers)))
    assert (all_answered(asked), asked.failures) == (True, {})
    assert order == [0], "the other one ran while this one waited for its first reply"
    assert set(replica.threads) == {threading.current_thread()}
    assert nothing_held(replica)


def test_a_batch_of_several_slices_is_answered_one_after_the_other() -> None:
    replica = Replies(capacity=4)
    asked = Asked(replica, [b"%d" % number for number in range(16)]).in_scheduler()
    assert all_answered(asked)
    assert len(replica.threads) > 1
    assert set(replica.threads) == {threading.current_thread()}
    assert nothing_held(replica)


@pytest.mark.parametrize("kind", [Kind.UNAVAILABLE, Kind.NOT_FOUND])
def test_where_no_replica_is_ready_or_known_it_begins_anew(replica: Replies, kind: Kind) -> None:
    replica.missing = Problem(kind, "MISSING", "There is none")
    with pytest.raises(WouldBlock):
        Asked(replica).in_scheduler()


def test_where_others_have_the_permits_it_begins_anew_and_waits_for_none(replica: Replies) -> None:
    queue = replica.its_queue
    while queue.try_acquire_bulk(BulkWaiter(lambda: None), 1):
        pass
    queue.bulk_waiters.clear()
    had = queue.lanes.bulk
    with pytest.raises(WouldBlock):
        Asked(replica).in_scheduler()
    assert (queue.lanes.bulk, list(queue.bulk_waiters), replica.threads) == (had, [], [])


def test_single_texts_together_are_told_that_there_is_no_room(replica: Replies) -> None:
    while replica.its_queue.try_acquire_singles(1):
        pass
    had = replica.its_queue.lanes.interactive
    with pytest.raises(Problem, match="has no room for single texts together"):
        Asked(replica, is_combined=True).in_scheduler()
    assert (replica.its_queue.lanes.interactive, replica.threads) == (had, [])


def test_beside_a_call_that_has_the_replica_for_itself_it_begins_anew(replica: Replies) -> None:
    assert replica.leases.acquire(replica.replica, exclusive=True)
    with pytest.raises(WouldBlock):
        Asked(replica).in_scheduler()
    replica.leases.release(replica.replica, exclusive=True)
    assert nothing_held(replica)


def test_without_an_idle_connection_it_begins_anew_and_counts_no_answers(replica: Replies) -> None:
    replica.is_idle = False
    with pytest.raises(WouldBlock):
        Asked(replica).in_scheduler()
    assert (nothing_held(replica), replica.threads) == (True, [])
    assert replica.its_queue.lanes.answered_texts == 0


@pytest.mark.parametrize("keep", [False, True])
def test_a_bad_text_has_failed_and_the_others_are_answered_where_failures_are_kept(
    replica: Replies, keep: bool
) -> None:
    replica.fails = {b"two": BAD}
    asked = Asked(replica, keep_failures=keep).in_scheduler()
    assert asked.failures == {1: TextFailure(grpc.StatusCode.INVALID_ARGUMENT, "bad text")}
    assert [text for text, _ in asked.answers] == ([0, 2] if keep else [0])
    assert set(replica.threads) == {threading.current_thread()}
    assert nothing_held(replica)


def test_after_a_death_it_goes_on_in_a_thread_and_asks_nothing_twice(replica: Replies) -> None:
    """Its run knows what is answered, and that the others are to be asked carefully."""
    replica.fails = {b"two": DIED}
    asked = Asked(replica).in_scheduler()
    assert (asked.answers, asked.failures) == ([(0, b"one"), (1, b"two"), (2, b"three")], {})
    first, second = replica.threads
    assert first is threading.current_thread()
    assert second is not first
    assert nothing_held(replica)


@pytest.mark.parametrize("bad", [b"0", b"5", b"15"])
def test_after_a_death_in_one_of_several_slices_every_text_is_answered_once(bad: bytes) -> None:
    replica = Replies(capacity=24)
    replica.fails = {bad: DIED}
    asked = Asked(replica, [b"%d" % number for number in range(16)], deadline=time.monotonic() + 30).in_scheduler()
    assert (all_answered(asked), asked.failures) == (True, {})
    assert len(set(replica.threads)) == 2
    assert nothing_held(replica)


def test_what_ends_a_run_in_a_thread_ends_the_call(replica: Replies) -> None:
    replica.fails = {b"one": DIED}
    answers: list[int] = []

    def refuse(text: int, reply: bytes) -> None:
        raise Problem(Kind.EXHAUSTED, "TOO_LARGE", "The reply would be too large")

    with pytest.raises(Problem, match="too large"):
        Asked(replica, on_answer=refuse).in_scheduler()
    assert (answers, nothing_held(replica)) == ([], True)


@pytest.mark.parametrize("fails", [{}, {b"one": DIED}], ids=["in its own thread", "in another one"])
def test_an_answer_for_which_memory_is_to_be_waited_for_begins_the_call_anew(
    replica: Replies, fails: dict[bytes, CallFailed]
) -> None:
    replica.fails = fails

    def block(text: int, reply: bytes) -> None:
        raise WouldBlock

    with pytest.raises(WouldBlock):
        Asked(replica, on_answer=block).in_scheduler()
    assert nothing_held(replica)


def test_a_caller_who_leaves_ends_it(replica: Replies) -> None:
    asked = Asked(replica)

    def leave() -> None:
        asked.left = True

    with pytest.raises(Problem, match="The caller is gone"):
        asked.in_scheduler(leave)
    assert (asked.answers, nothing_held(replica)) == ([], True)


def test_a_deadline_ends_it(replica: Replies) -> None:
    with pytest.raises(Problem, match="The deadline passed"):
        Asked(replica, deadline=0.0).in_scheduler()
    assert nothing_held(replica)


def test_while_a_thread_works_others_of_the_scheduler_run() -> None:
    scheduler, seen = Scheduler(), threading.Event()
    found: list[bool] = []
    scheduler.run([lambda: found.append(in_thread(lambda: seen.wait(30), scheduler)), seen.set])
    assert found == [True]


def test_what_a_thread_raises_is_raised_where_it_is_waited_for() -> None:
    scheduler = Scheduler()

    def fail() -> None:
        raise ValueError("so")

    with pytest.raises(ValueError, match="so"):
        scheduler.run([lambda: in_thread(fail, scheduler)])
    assert greenlet.getcurrent().parent is None


class Touched(Exception):
    """A batch went on to its replicas."""


def handled(raw: bytes) -> None:
    """Raises: Touched, WouldBlock."""

    def touched(*_: object) -> Any:
        raise Touched

    cache: Any = SimpleNamespace(plan=touched, refuse_unexpected=touched)
    runner: Any = SimpleNamespace(pool=SimpleNamespace(generations=lambda target: ()))
    directory: Any = SimpleNamespace(table=SimpleNamespace(all=()))
    meters: Any = SimpleNamespace(calls=Series, texts=Series, durations=Series, overheads=Series)
    metering = Metering(meters, directory)
    handlers = ArrowHandlers(runner, metering, 2**24, nullcontext, Reserve(2**30), cache)
    context = PartOfCall(Caller(), Scheduler())
    for name in ("is_active", "add_callback", "time_remaining", "code"):
        setattr(context, name, getattr(context.context, name))
    handlers.inline()["EmbedArrow"](raw, context)


class Series:
    """Of a metric."""

    @staticmethod
    def labels(*_: object) -> Any:
        return SimpleNamespace(inc=lambda *_: None, observe=lambda _: None)


class Caller:
    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return ()

    def is_active(self) -> bool:
        return True

    def add_callback(self, act: Callable[[], None]) -> bool:
        return True

    def time_remaining(self) -> float | None:
        return None

    def code(self) -> None:
        return None


@pytest.mark.parametrize(
    ("texts", "is_small"),
    [
        (["text"], True),
        ([f"{number}" for number in range(16)], True),
        ([f"{number}" for number in range(17)], False),
        (["x" * 20_000], False),
        ([None] * 17, False),
    ],
)
def test_which_batches_are_small(texts: list[str | None], is_small: bool) -> None:
    with pytest.raises(Touched if is_small else WouldBlock):
        handled(dense_request("one", texts).SerializeToString())


def test_what_expands_to_much_is_not_read_there() -> None:
    """A text of 3 MB, in a message of some hundred bytes."""
    request = dense_request("one", ["x"])
    sink = pa.BufferOutputStream()
    batch = pa.record_batch([pa.array(["x" * 3_000_000])], ["texts"])
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)
    request.arrow_ipc = sink.getvalue().to_pybytes()
    assert len(request.arrow_ipc) < 16_000
    with pytest.raises(WouldBlock):
        handled(request.SerializeToString())


def test_where_memory_would_be_waited_for_the_call_begins_anew() -> None:
    reserve = Reserve(2**20)
    with reserve.reservation() as others, reserve.reservation() as own:
        others.grow(2**20 - 1000)
        InlineBook(own)(500)
        with pytest.raises(WouldBlock):
            InlineBook(own)(600)
