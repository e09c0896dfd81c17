"""`python -m appliance.control`: gunicorn with the REST API on api_port."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from gunicorn.app.base import BaseApplication

from appliance import operations
from appliance.control.app import create_app
from appliance.control.worker import JsonThreadWorker
from appliance.core.problems import Problem
from appliance.drivers import configfile, output
from appliance.operations import Appliance

log = logging.getLogger("appliance.control")
WORKERS = 2  # so that one dying worker is never an outage; the work waits for supervisor, not for the CPU
THREADS = 16


class Gunicorn(BaseApplication):  # type: ignore[misc]
    """gunicorn configured from our settings alone: no file, no GUNICORN_CMD_ARGS."""

    def __init__(self, box: Appliance) -> None:
        self.box = box
        super().__init__()

    def load_config(self) -> None:
        host, port = self.box.settings.bind, self.box.settings.api_port
        options: dict[str, Any] = {
            "bind": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            "workers": WORKERS,
            "worker_class": JsonThreadWorker,
            "threads": THREADS,
            "timeout": 120,
            "graceful_timeout": 10,
            "keepalive": 30,
            "proc_name": "tei-appliance control",
            "control_socket_disable": True,
        }
        for key, value in options.items():
            if key in self.cfg.settings:
                self.cfg.set(key, value)

    def load(self) -> Any:
        return create_app(self.box)


def main() -> int:
    output.configure()
    try:
        box = Appliance.at(configfile.load(os.environ))
        operations.reconcile(box)
    except Problem as problem:
        log.error("%s", problem.message)
        return 1
    Gunicorn(box).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
