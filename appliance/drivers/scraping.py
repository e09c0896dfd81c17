"""The metrics pages of replicas. They are on loopback: nothing of what a library for the web does is needed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException

from appliance.core.program import LOOPBACK

LEAST_SECS = 0.001  # 0 would mean not to wait at all, and then what has arrived is not read either


def metrics_page(port: int, timeout_secs: float) -> str | None:
    """The text of ``/metrics``; None when it does not come. timeout_secs: of connecting, and of each read."""
    return metrics_pages([port], timeout_secs)[0]


def metrics_pages(ports: Sequence[int], timeout_secs: float) -> list[str | None]:
    """The page of each port, as `metrics_page`. All are asked before the first is read, so they work at the same time,
    and those that hang cost ``timeout_secs`` together. With 16 threads 100 pages took three times as long."""
    until = time.monotonic() + timeout_secs
    asked = [ask(port, timeout_secs) for port in ports]
    return [read(connection, until) for connection in asked]


def ask(port: int, timeout_secs: float) -> HTTPConnection | None:
    """A connection on which the page was asked for; None where nothing listens."""
    connection = HTTPConnection(LOOPBACK, port, timeout=timeout_secs)
    try:
        connection.request("GET", "/metrics")
    except OSError:
        connection.close()
        return None
    return connection


def read(connection: HTTPConnection | None, until: float) -> str | None:
    if connection is None:
        return None
    try:
        connection.sock.settimeout(max(LEAST_SECS, until - time.monotonic()))
        reply = connection.getresponse()
        text = reply.read().decode(errors="replace")
        return text if reply.status == 200 else None
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()
