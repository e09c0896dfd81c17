"""A Redis server of the test's own, on a port and a unix socket, out of Debian's redis-tools."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

START_SECS = 20.0


class RedisServer:
    """Started when made; it keeps nothing on disk. options: as on its command line, such as maxmemory="8mb"."""

    def __init__(self, **options: str) -> None:
        # redis-check-rdb is the same program: it does what its own name says.
        found = shutil.which("redis-server") or shutil.which("valkey-server") or shutil.which("redis-check-rdb")
        assert found, "a Redis server is needed: run scripts/debian.sh redis-check-rdb redis-tools, as make test does"
        self.program = found
        self.folder = Path(tempfile.mkdtemp(prefix="redis-", dir="/tmp"))  # a socket's path is short
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.socket = self.folder / "socket"
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def url(self, password: str = "") -> str:
        return f"redis://{f':{password}@' if password else ''}127.0.0.1:{self.port}/0"

    @property
    def socket_url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        options = {"port": str(self.port), "unixsocket": str(self.socket), "dir": str(self.folder)}
        options |= {"bind": "127.0.0.1", "save": "", "appendonly": "no", **self.options}
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(["redis-server", *words], executable=self.program, stdout=log, stderr=log)
        until = time.monotonic() + START_SECS
        while not self.answers():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < until, "the Redis server does not answer"
            time.sleep(0.02)

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return bool(connection.recv(100))
        except OSError:
            return False

    def send(self, number: signal.Signals) -> None:
        assert self.process
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def __enter__(self) -> "RedisServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
