"""Copies what comes into the log files to standard output, each line with the name of its process before it.

For `log_to = "both"` and "stdout": so `docker logs` and the journal show why a model died. A program of its own beside
supervisord, which would need a pipe and an event for each line. Run by its path, without site-packages: it takes 5 MB.
"""

import os
import signal
import sys
import time

TICK_SECS = 0.5
MOST_BYTES = 1 << 20  # of one file at once
LONGEST_LINE = 1 << 16  # what has no end by then is printed as it is


def label(path: str) -> bytes:
    return os.path.basename(path).removesuffix(".log").encode()


class LogFile:
    """One log that is followed, across rotation: what the renamed file still had is read before the new one."""

    def __init__(self, path: str, from_its_end: bool) -> None:
        self.path = path
        self.name = label(path)
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.begun = b""
        if from_its_end:
            os.lseek(self.descriptor, 0, os.SEEK_END)

    def lines(self) -> list[bytes]:
        """The whole lines that are new."""
        if os.lseek(self.descriptor, 0, os.SEEK_CUR) > os.fstat(self.descriptor).st_size:
            os.lseek(self.descriptor, 0, os.SEEK_SET)  # it was emptied
        *lines, self.begun = (self.begun + os.read(self.descriptor, MOST_BYTES)).split(b"\n")
        if len(self.begun) > LONGEST_LINE:
            lines, self.begun = [*lines, self.begun], b""
        return [self.name + b" | " + line + b"\n" for line in lines]

    def was_replaced(self) -> bool:
        """By another file of this name, or by none; what it had has been read by then."""
        ours = os.fstat(self.descriptor)
        try:
            named = os.stat(self.path)
        except FileNotFoundError:
            return True
        return (named.st_dev, named.st_ino) != (ours.st_dev, ours.st_ino)


class Logs:
    """All logs of a folder. Those that exist at the beginning are followed from their ends."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.files: dict[str, LogFile] = {}
        self.find(from_their_ends=True)

    def find(self, from_their_ends: bool = False) -> None:
        for entry in os.scandir(self.folder):
            if entry.name.endswith(".log") and entry.path not in self.files and entry.is_file(follow_symlinks=False):
                try:
                    self.files[entry.path] = LogFile(entry.path, from_their_ends)
                except FileNotFoundError:
                    pass  # it was rotated or removed just now

    def copy(self) -> None:
        """Print what is new."""
        replaced = [path for path, file in self.files.items() if file.was_replaced()]
        for file in self.files.values():
            while lines := file.lines():
                write(b"".join(lines))
        begun = {}
        for path in replaced:
            file = self.files.pop(path)
            begun[path] = file.begun
            os.close(file.descriptor)
        self.find()
        for path in begun.keys() & self.files.keys():  # a line that began before goes on in the new file
            self.files[path].begun = begun.pop(path)
        write(b"".join(label(path) + b" | " + line + b"\n" for path, line in begun.items() if line))


def write(text: bytes) -> None:
    try:
        while text:
            text = text[os.write(sys.stdout.fileno(), text) :]
    except OSError:  # nobody reads any more
        sys.exit(0)


def main() -> None:
    """Argument: the folder. Ends with SIGTERM, or with whoever started it, and prints what came until then."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    for number in (signal.SIGINT, signal.SIGHUP):  # of the terminal: the last lines are still to come
        signal.signal(number, signal.SIG_IGN)
    parent, logs = os.getppid(), Logs(sys.argv[1])
    while not ended and os.getppid() == parent:
        logs.copy()
        time.sleep(TICK_SECS)
    for _ in range(2):  # the first finds the files that are new
        logs.copy()
    write(b"".join(file.name + b" | " + file.begun + b"\n" for file in logs.files.values() if file.begun))


if __name__ == "__main__":
    main()
