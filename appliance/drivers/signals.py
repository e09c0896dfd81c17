"""The end of a program, asked for with SIGTERM or SIGINT."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

TICK_SECS = 0.2
TIDY_SECS = 10.0


class Ending:
    """Hears the signals from now on."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.ask)

    def ask(self, *_: object) -> None:
        # A plain flag: the handler runs inside whatever the main thread is doing, and if that is just waiting for a
        # threading.Event, setting the Event would wait for its lock for ever.
        self.asked = True

    def wait(self, tidy: Callable[[], None]) -> None:
        """Until the end is asked for; ``tidy`` is called every ten seconds meanwhile.

        The kernel may hand the signal to a thread of grpc's. Python then only notes it, and its handler runs when the
        main thread next wakes up: in a wait without an end, never (3.11).
        """
        tidied = time.monotonic()
        while not self.asked:
            time.sleep(TICK_SECS)
            if time.monotonic() - tidied > TIDY_SECS:
                tidy()
                tidied = time.monotonic()
