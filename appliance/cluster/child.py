"""The TEI or engine process of one replica: it ends with its parent, and its parent with it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

KEPT_LINES = 20
SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)


class Child:
    """Started by a thread that lives as long as the process: what the kernel sends at the parent's death is bound to
    the thread that started it. Its lines go to our standard output.

    on_end: called by that thread with the exit status, unless `stop` was called before.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], on_end: Callable[[int], None]) -> None:
        self.argv = argv
        self.environment = {**os.environ, **environment}
        self.on_end = on_end
        self.lines = deque[str](maxlen=KEPT_LINES)
        self.process: subprocess.Popen[str] | None = None
        self.stopping = False
        self.started, self.ended = threading.Event(), threading.Event()
        threading.Thread(target=self.run, name="child", daemon=True).start()
        self.started.wait()

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    def run(self) -> None:
        try:
            # `fated` becomes the program itself.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "appliance.cluster.child", str(os.getpid()), *self.argv],
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        finally:
            self.started.set()
        with self.process as process:
            for line in process.stdout or ():
                self.lines.append(line.rstrip())
                print(line, end="", flush=True)
        status = process.returncode
        self.ended.set()
        if not self.stopping:
            self.on_end(status)

    def stop(self, secs: float) -> None:
        """Let its calls end, no longer than ``secs``."""
        self.stopping = True
        if self.process and not self.ended.is_set():
            self.process.terminate()
            if not self.ended.wait(secs):
                self.process.kill()


def fated(parent: int, argv: Sequence[str]) -> None:
    """Become a program that the kernel kills when its parent dies, however that dies."""
    ctypes.CDLL(None, use_errno=True).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it has died before
        os._exit(1)
    os.execvp(argv[0], list(argv))


if __name__ == "__main__":
    fated(int(sys.argv[1]), sys.argv[2:])
