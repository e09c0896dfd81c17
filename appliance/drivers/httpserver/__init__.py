"""The HTTP server of all programs: gunicorn, whose workers are ours (`worker.py`)."""

from __future__ import annotations

import mmap
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from gunicorn.app.base import BaseApplication

from appliance.core.connection_counts import SLOTS, ConnectionCounts
from appliance.core.tls_settings import TlsSettings
from appliance.drivers.httpserver.worker import GunicornWorker, HasTaken, Refusal
from appliance.files.sockets import most_descriptors
from appliance.files.transferlimits import App, time_limited

CONNECTIONS = 4000  # of a worker, with those that are silent


class ServerTls(Protocol):
    """The certificates of `drivers.tls`."""

    @property
    def settings(self) -> TlsSettings: ...

    def context(self) -> ssl.SSLContext:
        """The context for a new connection."""


def with_head(resource: object) -> object:
    """The resource of Falcon, which answers HEAD wherever it answers GET."""
    if hasattr(resource, "on_get"):
        resource.on_head = resource.on_get  # type: ignore[attr-defined]
    return resource


class GunicornServer(BaseApplication):  # type: ignore[misc]
    """gunicorn configured by our settings only: by no file, and not by GUNICORN_CMD_ARGS.

    make_app is called in each worker, after the fork.
    """

    def __init__(
        self,
        name: str,
        address: str,
        workers: int,
        threads: int,
        make_app: Callable[[], App],
        refusal: Refusal,
        tls: ServerTls | None = None,
        grace_secs: int = 10,
        own_socket: Path | None = None,
        heartbeat: Path | None = None,
        probes: tuple[str, ...] = (),
        has_taken: HasTaken = lambda client: False,
        leave: Callable[[int], object] = sys.exit,
    ) -> None:
        """grace_secs: how long requests in work may take to end when the server is stopped.

        own_socket: a unix socket to listen on as well, without TLS and for this user only.
        heartbeat: the file in which one of its workers tells each second that it goes on.
        probes: how the paths end that are answered also while all threads have work, and that take no long time.
        has_taken: whether an answer has handed its connection over, whose end is not gunicorn's business then
        (`eventstream`).
        leave: ends a worker, with that status, when its calls are answered or their time is over.
        """
        self.make_app = make_app
        counts = ConnectionCounts(memoryview(mmap.mmap(-1, 8 * SLOTS)).cast("q"))
        members = {
            "refusal": staticmethod(refusal),
            "has_taken": staticmethod(has_taken),
            "connection_counts": counts,
            "heartbeat": heartbeat,
            "probes": probes,
        }

        def give_slot(arbiter: Any, worker: Any) -> None:
            worker.slot = counts.enter(each.slot for each in arbiter.WORKERS.values())

        self.options: dict[str, Any] = {
            "bind": [address, *([f"unix:{own_socket}"] if own_socket else [])],
            "umask": 0o077,  # of its sockets and temporary files
            "workers": workers,
            "worker_class": type("OurWorker", (GunicornWorker,), members),
            "pre_fork": give_slot,
            "child_exit": lambda arbiter, worker: counts.leave(worker.slot),
            "threads": threads,
            "worker_connections": min(CONNECTIONS, most_descriptors() // 2),
            "timeout": 60,  # of a worker's main thread, which says something each second, whatever the others are at
            "graceful_timeout": grace_secs,
            "keepalive": 30,
            "proc_name": f"tei-appliance {name}",
            "control_socket_disable": True,
            # What a proxy says of a client counts for nothing, and gunicorn need not look up whose word counts at each
            # request. By default it takes a path from a client of this machine.
            "forwarded_allow_ips": "*",
            "forwarder_headers": "",
            "secure_scheme_headers": {},
            # One that has not started tells the arbiter why by its own exit status.
            "worker_exit": lambda arbiter, worker: worker.booted and leave(0),
        }
        if tls:  # with both files: gunicorn takes a server that has only a context for one without TLS
            self.options |= {
                "certfile": tls.settings.cert_file,
                "keyfile": tls.settings.key_file,
                "ssl_context": lambda conf, default: tls.context(),
            }
        super().__init__()

    def load_config(self) -> None:
        for key, value in self.options.items():
            if key in self.cfg.settings:
                self.cfg.set(key, value)

    def load(self) -> App:
        return time_limited(self.make_app())
