"""The metrics page of one replica. It is on loopback: nothing of what a library for the web does is needed."""

from __future__ import annotations

from http.client import HTTPConnection, HTTPException

from appliance.core.program import LOOPBACK


def metrics_page(port: int, timeout_secs: float) -> str | None:
    """The text of ``/metrics``; None when it does not come. timeout_secs: of connecting, and of each read."""
    connection = HTTPConnection(LOOPBACK, port, timeout=timeout_secs)
    try:
        connection.request("GET", "/metrics")
        reply = connection.getresponse()
        text = reply.read().decode(errors="replace")
        return text if reply.status == 200 else None
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()
