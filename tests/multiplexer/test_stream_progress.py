"""Stalled streams end, also the first one after a while without any."""

import threading

from appliance.multiplexer.stream_progress import StreamProgress, Watchdog
from testing.running import eventually


def test_a_stalled_stream_is_ended_whenever_it_comes() -> None:
    watchdog = Watchdog(limit_secs=0.01)
    for _ in range(3):
        eventually(lambda: not watchdog.is_needed.is_set(), 5)  # it waits without looking at anything
        cancelled = threading.Event()
        progress = StreamProgress(cancelled.set, on_lag=lambda: None)
        progress.count_sent()
        with watchdog.watching(progress):
            assert cancelled.wait(5)
        assert progress.stalled


def test_whose_caller_does_not_read_is_told_again_and_again() -> None:
    watchdog, told = Watchdog(limit_secs=0), list[float]()
    progress = StreamProgress(cancel=lambda: None, on_lag=lambda: told.append(progress.lag_secs))
    with watchdog.watching(progress):
        progress.lag_secs = 1.5
        eventually(lambda: len(told) > 2, 5)
    assert not progress.stalled
