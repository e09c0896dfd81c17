"""TCP ports of this machine: which are in use, and whether a program listens."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import ExitStack


def busy(ports: Iterable[int], host: str) -> frozenset[int]:
    """Those of ``ports`` that cannot be bound on ``host``. Takes some microseconds for each."""
    return frozenset(port for port in ports if not bindable(host, port))


def bindable(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Without this a connection in TIME_WAIT counts as a listener for a minute.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def refused_address(host: str) -> str:
    """Why no port can be bound on ``host``, whichever it is; empty where one can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def unused(host: str, count: int) -> list[int]:
    """Free ports from the kernel's own range, which instances never get. Another program may bind them first."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as probes:  # open together, so that no port comes twice
        made = [probes.enter_context(socket.create_server((host, 0), family=family)) for _ in range(count)]
        return [probe.getsockname()[1] for probe in made]


def answers(host: str, port: int, timeout: float = 0.2) -> bool:
    """Whether a program listens. TEI and the engine open their port only when the model is warm."""
    try:
        socket.create_connection((host, port), timeout).close()
    except OSError:
        return False
    return True
