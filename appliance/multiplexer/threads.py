"""Work for the threads of a pool, of which the system may refuse to start one more."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from appliance.core.problems import Kind, Problem

Result = TypeVar("Result")


def begin(
    threads: ThreadPoolExecutor, work: Callable[[], Result], ended: Callable[[], object] = lambda: None
) -> Future[Result]:
    """As the pool's own `submit`, which keeps work for which it can start no thread: another one would do it later.

    ended: called when the work is done, or is not begun. Raises: Problem exhausted; then nobody does it.
    """
    run: Future[Result] = Future()
    run.add_done_callback(lambda _: ended())
    try:
        threads.submit(carry_out, run, work)
    except RuntimeError as error:
        if run.cancel():  # no other thread has taken it
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
