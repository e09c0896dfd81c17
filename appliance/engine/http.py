"""HTTP on the Prometheus port, as in TEI's gRPC build: /health answers OK, every other path answers the metrics; that
of the monitor's probes those that it reads."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from appliance.wire.exposition import WORK_PATH

log = logging.getLogger(__name__)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def serve(
    host: str, port: int, metrics: Callable[[], str], work: Callable[[], str] | None = None
) -> ThreadingHTTPServer | None:
    """Start to answer in a thread. work: the metrics that tell what is in progress; all of them, where it is left out.
    None, and a warning, when the port is taken: the model is served without metrics."""

    class MetricsHandler(BaseHTTPRequestHandler):
        timeout = 10  # seconds that a silent client may hold a thread

        def do_GET(self) -> None:
            page = work if work and self.path == WORK_PATH else metrics
            body = b"OK" if self.path == "/health" else page().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass  # a scrape every few seconds is no news

    class MetricsServer(ThreadingHTTPServer):
        def shutdown(self) -> None:
            self.socket.shutdown(socket.SHUT_RDWR)  # which wakes the thread that waits for callers
            super().shutdown()

        def handle_error(self, request: object, client_address: object) -> None:
            if not isinstance(sys.exception(), OSError):  # a scraper that disconnects is no news either
                super().handle_error(request, client_address)  # type: ignore[arg-type]

    try:
        server = MetricsServer((host, port), MetricsHandler)
    except OSError as error:
        log.warning(
            "Port %s on %s cannot be used for metrics (%s): this engine has none, and the monitor cannot tell its long "
            "texts from a hang. Free the port and restart the instance, or give it another prometheus_port",
            port,
            host,
            error,
        )
        return None
    server.daemon_threads = True
    # By default it wakes up twice a second, to see whether it shall end.
    options = {"poll_interval": None}
    threading.Thread(target=server.serve_forever, kwargs=options, name="metrics", daemon=True).start()
    return server
