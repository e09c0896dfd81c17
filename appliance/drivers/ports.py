"""TCP ports of this machine: which are taken, and whether somebody answers."""

from __future__ import annotations

import socket
from collections.abc import Iterable


def busy(ports: Iterable[int], host: str) -> frozenset[int]:
    """Those of ``ports`` that cannot be bound on ``host`` (some microseconds each)."""
    return frozenset(port for port in ports if not bindable(host, port))


def bindable(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Without it a connection in TIME_WAIT would count as a listener for a minute.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def unused(host: str) -> int:
    """A port of the kernel's own range, which instances never get, that could be bound a moment ago."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as held:
        port: int = held.getsockname()[1]
        return port


def answers(host: str, port: int, timeout: float = 0.2) -> bool:
    """Whether something listens. TEI and the engine open their port only when the model is warm."""
    try:
        socket.create_connection((host, port), timeout).close()
    except OSError:
        return False
    return True
