"""A batch costs in proportion to its texts, is held up by no other instance, and is gone when it has ended: its memory
is freed then, however it ends, and not when Python next looks for cycles."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from appliance.core.problems import Kind, Problem
from appliance.core.routing import Replica, Target
from appliance.multiplexer.admission_queue import AdmissionQueue
from appliance.multiplexer.batch import THREADS, BatchRunner
from appliance.multiplexer.batch_run import BatchJob, TextFailure
from appliance.multiplexer.leases import ReplicaLeases
from appliance.multiplexer.suspicion import Suspicion, launch_of
from testing.one_replica import OneReplica


def accept(text: int, reply: bytes) -> None:
    pass


def refuse(text: int, reply: bytes) -> None:
    raise Problem(Kind.EXHAUSTED, "TOO_LARGE", "The reply would be too large")


BAD = {1: TextFailure(grpc.StatusCode.INVALID_ARGUMENT, "bad text")}


@pytest.mark.parametrize(
    ("last", "on_answer", "ends"), [(b"good", accept, {}), (b"good", refuse, None), (b"bad", accept, BAD)]
)
def test_a_job_is_gone_as_soon_as_it_has_ended(
    last: bytes, on_answer: Any, ends: dict[int, TextFailure] | None
) -> None:
    runner = BatchRunner(OneReplica(), 0, 1)  # type: ignore[arg-type]

    def call() -> weakref.ref[BatchJob]:
        job = BatchJob(
            Target("one"), "Embed", "/", [b"good", last], [1, 1], on_answer, None, lambda: False, keep_failures=False
        )
        if ends is None:
            with pytest.raises(Problem) as caught:
                runner.run(job)
            del caught
        else:
            assert runner.run(job) == ends
        return weakref.ref(job)

    gc.disable()
    try:
        job = call()
        (threads,) = runner.threads.values()
        threads.pool.shutdown()  # the slice's thread has let go, too
        assert job() is None
    finally:
        gc.enable()


def job_of(texts: int, name: str = "one") -> BatchJob:
    return BatchJob(
        Target(name), "Embed", "/", [b"good"] * texts, [1] * texts, accept, None, lambda: False, keep_failures=False
    )


def test_a_batch_costs_in_proportion_to_its_texts_where_one_at_a_time_fits() -> None:
    """All slices were looked at for each answer: 8,000 texts cost 64 times as much as 1,000."""
    looks = []
    for texts in (1000, 8000):
        replica = OneReplica(capacity=4)
        assert BatchRunner(replica, 0, 1).run(job_of(texts)) == {}  # type: ignore[arg-type]
        looks.append(replica.looks)
    assert looks[1] < 10 * looks[0]


class TwoInstances:
    """As `ReplicaPool`: the instance `hung` answers nothing before the test ends, `well` everything at once."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.asked = threading.Semaphore(0)
        self.backends = {"hung": Hung(self), "well": OneReplica()}
        self.connections = SimpleNamespace(drop_idle=lambda replica: None)
        self.arrivals = SimpleNamespace(
            until_ready=lambda target, choose, limits: choose(True), using=lambda target: nullcontext()
        )
        self.leases = ReplicaLeases()

    def ready(self, target: Target, look: bool = True) -> list[OneReplica]:
        return [self.backends[str(target.instance_name)]]

    def generations(self, target: Target) -> tuple[tuple[str, int], ...]:
        return ()

    def queue(self, backend: OneReplica) -> AdmissionQueue:
        return backend.its_queue

    def flaw(self, backend: OneReplica, method: str, request: bytes, reply: bytes) -> str | None:
        return None

    def suspicion(self, replica: Replica) -> Suspicion:
        return Suspicion(launch_of(replica), lambda conviction: None)

    def connection(self, backend: OneReplica, may_wait: bool = True) -> Any:
        return backend.connection(backend)


class Hung(OneReplica):
    def __init__(self, pool: TwoInstances) -> None:
        super().__init__(capacity=100_000)
        self.pool = pool

    def replies(self, messages: Sequence[bytes], check: Callable[[], float], wait: Any) -> Iterator[bytes]:
        self.pool.asked.release()
        self.pool.ended.wait(30)
        yield from messages


def test_an_instance_that_hangs_keeps_no_thread_from_another() -> None:
    """Two slices of each of 150 jobs hang: more than there were threads for all instances together."""
    pool = TwoInstances()
    runner = BatchRunner(pool, 0, 1)  # type: ignore[arg-type]
    callers = [threading.Thread(target=runner.run, args=(job_of(32, "hung"),), daemon=True) for _ in range(150)]
    for caller in callers:
        caller.start()
    try:
        for _ in range(THREADS):
            assert pool.asked.acquire(timeout=10)
        well = threading.Thread(target=runner.run, args=(job_of(32, "well"),), daemon=True)
        well.start()
        well.join(timeout=10)
        assert not well.is_alive()
    finally:
        pool.ended.set()
    for caller in callers:
        caller.join(timeout=10)
        assert not caller.is_alive()
