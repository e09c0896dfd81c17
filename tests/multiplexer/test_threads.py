"""Work for which the system starts no thread: it is refused, or another does it, and nothing stays taken."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
from appliance.multiplexer.threads import begin

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
    with ThreadPoolExecutor(4) as threads:
        with no_more_threads(), pytest.raises(Problem, match="cannot start a thread"):
            begin(threads, lambda: done.append("refused"), lambda: done.append("ended"))
        assert done == ["ended"]
        begin(threads, lambda: done.append("work")).result(10)
    assert done == ["ended", "work"]


def test_a_thread_that_there_is_does_it() -> None:
    with ThreadPoolExecutor(4) as threads:
        release = threading.Event()
        first = threads.submit(release.wait, 10)
        with no_more_threads():
            with pytest.raises(Problem):
                begin(threads, lambda: "refused")
            release.set()
            first.result(10)
            while not threads._idle_semaphore._value:  # the thread has put aside what was refused
                threading.Event().wait(0.01)
            assert begin(threads, lambda: "work").result(10) == "work"


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
    with ThreadPoolExecutor(4) as threads, no_more_threads():
        effects = PoolEffects(job, pool, lambda backend: threads, 0)
        for _ in range(8):  # twice what there are permits for
            with pytest.raises(Problem, match="cannot start a thread"):
                effects.start(Slice(tuple(range(TEXTS))), backend)
    assert backend.outstanding == 0
    assert leases.acquire(replica, True), "it may be had alone"
