"""Work for which the system starts no thread: it is refused, or another does it, and nothing stays taken."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from appliance.core.batching import Slice
from appliance.core.problems import Problem
from appliance.core.routing import Replica, Target
from appliance.core.settings import QueueSettings
from appliance.drivers.tei import Backend
from appliance.multiplexer.admission_queue import AdmissionQueue
from appliance.multiplexer.batch_effects import PoolEffects
from appliance.multiplexer.batch_run import BatchJob
from appliance.multiplexer.leases import ReplicaLeases
from appliance.multiplexer.threads import WorkerThreads

TEXTS = 16


@contextmanager
def no_more_threads() -> Iterator[None]:
    def start(self: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield


def test_what_no_thread_does_is_refused_and_never_done() -> None:
    done: list[str] = []
    threads = WorkerThreads(4, "test")
    with no_more_threads(), pytest.raises(Problem, match="cannot start a thread"):
        threads.begin(lambda: done.append("refused"), lambda: done.append("ended"))
    assert done == ["ended"]
    threads.begin(lambda: done.append("work")).result(10)
    assert done == ["ended", "work"]


def test_what_was_refused_takes_no_thread_from_others() -> None:
    """The library's pool counts a thread that looks at it twice, and begins no more of them."""
    threads, met = WorkerThreads(8, "test"), threading.Barrier(4)
    threads.begin(lambda: None).result(10)
    release = threading.Event()
    first = threads.begin(lambda: release.wait(10))
    with no_more_threads():
        for _ in range(3):
            with pytest.raises(Problem):
                threads.begin(lambda: None)
    release.set()
    first.result(10)
    together = [threads.begin(lambda: met.wait(10)) for _ in range(4)]
    assert sorted(each.result(10) for each in together) == [0, 1, 2, 3]


def test_a_slice_that_is_not_begun_gives_back_what_it_took() -> None:
    replica = Replica("a", 0, "127.0.0.1:1", "m", 1, 64)
    backend = Backend(replica, lambda: True, lambda: None, lambda address, timeout: lambda: None)
    queue, leases = AdmissionQueue("a", QueueSettings()), ReplicaLeases()
    queue.resize(64)
    pool = cast(Any, SimpleNamespace(leases=leases, queue=lambda backend: queue))
    job = BatchJob(
        Target(instance_name="a"), "Embed", "/tei.v1.Embed/EmbedStream", [b""] * TEXTS, [1] * TEXTS,
        lambda *_: None, cast(Any, None), lambda: False, False,
    )  # fmt: skip
    threads = WorkerThreads(4, "test")
    with no_more_threads():
        effects = PoolEffects(job, pool, lambda backend: threads, 0)
        for _ in range(8):  # twice what there are permits for
            with pytest.raises(Problem, match="cannot start a thread"):
                effects.start(Slice(tuple(range(TEXTS))), backend)
    assert backend.outstanding == 0
    assert leases.acquire(replica, True), "it may be had alone"
