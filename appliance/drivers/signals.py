"""The end of a program, asked for with SIGTERM or SIGINT."""

from __future__ import annotations

import signal
import threading

TICK_SECS = 0.2


class Ending:
    """Hears the signals from now on."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.asked.set())

    def wait(self) -> None:
        """Until the end is asked for.

        The kernel may hand the signal to a thread of grpc's. Python then only notes it, and its handler runs when the
        main thread next wakes up: in a wait without a timeout, never (3.11).
        """
        while not self.asked.wait(TICK_SECS):
            pass
