"""The end of a program, requested with SIGTERM or SIGINT."""

from __future__ import annotations

import select
import signal
import socket
import time
from collections.abc import Callable

TICK_SECS = 0.2
LONGEST_TICK_SECS = 1.0
TIDY_SECS = 10.0
READ_BYTES = 4096


class ShutdownSignals:
    """Handles the two signals from its construction on."""

    def __init__(self) -> None:
        self.received = False
        # The kernel may deliver a signal to a thread of grpc, and Python (3.11) runs the handler when the main thread
        # wakes up the next time. A byte comes here whichever thread it is.
        self.woken, self.waker = socket.socketpair()
        for end in (self.woken, self.waker):
            end.setblocking(False)
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle)

    def handle(self, *_: object) -> None:
        # A plain flag and no threading.Event: the handler interrupts the main thread, and if that is inside the Event's
        # own wait, setting the Event would wait for its lock for ever.
        self.received = True

    def wait(self, tick: Callable[[], bool], tidy: Callable[[], None]) -> None:
        """Wait for a signal; call ``tidy`` every ten seconds meanwhile, and ``tick`` every fifth of a second.

        While ``tick`` says that there was nothing to do, it is called less and less often, down to once a second: to
        wake up takes some 0.1 ms, and there may be a hundred of these programs.
        """
        tidied_at, pause = time.monotonic(), TICK_SECS
        while not self.received:
            if select.select([self.woken], [], [], pause)[0]:
                self.woken.recv(READ_BYTES)
            pause = TICK_SECS if tick() else min(LONGEST_TICK_SECS, pause * 2)
            if time.monotonic() - tidied_at > TIDY_SECS:
                tidy()
                tidied_at = time.monotonic()
