"""The end of a program, requested with SIGTERM or SIGINT."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

TICK_SECS = 0.2
TIDY_SECS = 10.0


class ShutdownSignals:
    """Handles the two signals from its construction on."""

    def __init__(self) -> None:
        self.received = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle)

    def handle(self, *_: object) -> None:
        # A plain flag and no threading.Event: the handler interrupts the main thread, and if that is inside the Event's
        # own wait, setting the Event would wait for its lock for ever.
        self.received = True

    def wait(self, tick: Callable[[], None], tidy: Callable[[], None]) -> None:
        """Wait for a signal; call ``tick`` every fifth of a second meanwhile, and ``tidy`` every ten seconds.

        The kernel may deliver the signal to a thread of grpc. Python (3.11) then runs the handler when the main thread
        wakes up the next time, so the main thread may not wait without a time limit.
        """
        tidied_at = time.monotonic()
        while not self.received:
            time.sleep(TICK_SECS)
            tick()
            if time.monotonic() - tidied_at > TIDY_SECS:
                tidy()
                tidied_at = time.monotonic()
