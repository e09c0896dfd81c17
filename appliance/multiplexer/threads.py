"""Work for threads of which the system may refuse to start one more."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from appliance.core.problems import Kind, Problem

Result = TypeVar("Result")


class WorkerThreads:
    """At most so many, which end when nothing refers to them. name: with which theirs begin."""

    def __init__(self, most: int, name: str) -> None:
        self.new_pool = partial(ThreadPoolExecutor, most, thread_name_prefix=name)
        self.pool = self.new_pool()

    def begin(self, work: Callable[[], Result], ended: Callable[[], object] = lambda: None) -> Future[Result]:
        """ended: called when the work is done, or is not begun. Raises: Problem exhausted; then nobody does it."""
        run: Future[Result] = Future()
        run.add_done_callback(lambda _: ended())
        try:
            self.pool.submit(carry_out, run, work)
        except RuntimeError as error:
            # That pool keeps the work, and once one of its threads has looked at it, counts one too many (3.11).
            self.pool = self.new_pool()
            if run.cancel():
                words = f"The multiplexer cannot start a thread ({error}): raise its limit of processes, or try again"
                raise Problem(Kind.EXHAUSTED, "QUEUE_FULL", words) from error
        return run


def carry_out(run: Future[Result], work: Callable[[], Result]) -> None:
    if not run.set_running_or_notify_cancel():
        return
    try:
        run.set_result(work())
    except BaseException as error:
        run.set_exception(error)
