"""`python -m appliance.control`: gunicorn with the REST API on api_port."""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path

from appliance.control.app import create_app
from appliance.control.errors import refusal
from appliance.control.models import App
from appliance.core.addresses import address
from appliance.core.problems import Problem
from appliance.drivers import configfile, memory, output
from appliance.drivers.ending import leave
from appliance.drivers.eventstream import STREAMS
from appliance.drivers.httpserver import GunicornServer
from appliance.drivers.metrics import Meters
from appliance.node.authentication import Authenticator
from appliance.node.context import Node
from appliance.operations import model_archives, models, supervision
from appliance.operations.hung_programs import MONITOR, ProgramWatch

log = logging.getLogger("appliance.control")
WORKERS = 2  # so that one dying worker is never an outage; the work waits for supervisor, not for the CPU
THREADS = 16


def main() -> int:
    output.configure()
    try:
        node = Node.at(configfile.load(os.environ))
        authenticator = Authenticator.of(node.settings)
    except Problem as problem:
        log.error("%s", problem.message)
        return 1
    settings = node.settings
    for model_id in settings.models:
        try:
            models.add(node, {"model_id": model_id})
        except Problem as problem:
            log.error("models in the configuration: %s", problem.message)

    def make_app() -> App:
        meters = Meters(Path(node.layout.metrics), "control")
        counted = Node.at(settings, meters.event)
        threading.Thread(target=finish, args=[counted], name="finish", daemon=True).start()
        ProgramWatch(counted, "control", [MONITOR]).start()
        return create_app(counted, authenticator)

    memory.freeze_startup_objects()  # of the workers, too: a collection would copy each page that they share
    where = address(settings.bind, settings.api_port)
    GunicornServer(
        "control",
        where,
        WORKERS,
        THREADS,
        make_app,
        refusal,
        authenticator.certificates,
        own_socket=Path(settings.layout.control_socket),
        heartbeat=Path(settings.layout.heartbeat("control")),
        probes=("/health", "/ready", "/metrics"),
        has_taken=STREAMS.has_taken,
        leave=leave,
    ).run()
    return 0


def finish(node: Node) -> None:
    """Finish what a process that died has left half done, while others are served: an instance that was being deleted
    may take half a minute to stop. Where it cannot be finished, `/health` says why."""
    model_archives.remove_abandoned()
    try:
        supervision.reconcile(node, ())
    except Problem as problem:
        log.error("%s", problem.message)


if __name__ == "__main__":
    sys.exit(main())
