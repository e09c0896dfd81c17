"""The end of a program, requested with SIGTERM or SIGINT."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress

TICK_SECS, LONGEST_TICK_SECS = 0.2, 1.0
TIDY_SECS = 10.0


class ShutdownSignals:
    """Handles the two signals from its construction on. For the main thread."""

    def __init__(self) -> None:
        self.received = False
        # The kernel may deliver a signal to a thread of grpc. Python (3.11) then runs the handler when the main thread
        # wakes up the next time: the byte that comes here wakes it.
        self.woken, self.waker = socket.socketpair()
        self.waker.setblocking(False)
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle)

    def handle(self, *_: object) -> None:
        # A plain flag and no threading.Event: the handler interrupts the main thread, and if that is inside the Event's
        # own wait, setting the Event would wait for its lock for ever.
        self.received = True

    def wait(self, tick: Callable[[], bool], tidy: Callable[[], None]) -> None:
        """Wait for a signal. Meanwhile call ``tick`` every fifth of a second, and less often, down to once a second,
        while it says that it had nothing to do; ``tidy`` every ten seconds.

        A process that wakes up to find nothing costs some 60 us, and there may be a hundred engines on a machine.
        """
        pause, tidied_at = TICK_SECS, time.monotonic()
        while not self.received:
            self.woken.settimeout(pause)
            with suppress(TimeoutError):
                self.woken.recv(64)
            pause = TICK_SECS if tick() else min(2 * pause, LONGEST_TICK_SECS)
            if time.monotonic() - tidied_at > TIDY_SECS:
                tidy()
                tidied_at = time.monotonic()
