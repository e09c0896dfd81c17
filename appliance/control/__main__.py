"""`python -m appliance.control`: gunicorn with the REST API on api_port."""

from __future__ import annotations

import logging
import os
import sys

from appliance import registry, supervision
from appliance.box import Appliance
from appliance.control.app import create_app
from appliance.control.errors import refusal
from appliance.control.models import App
from appliance.core.problems import Problem
from appliance.core.settings import address
from appliance.drivers import configfile, output
from appliance.drivers.httpserver import Server
from appliance.drivers.metrics import Meters
from appliance.guard import Guard, control_socket

log = logging.getLogger("appliance.control")
WORKERS = 2  # so that one dying worker is never an outage; the work waits for supervisor, not for the CPU
THREADS = 16


def main() -> int:
    output.configure()
    try:
        box = Appliance.at(configfile.load(os.environ))
        guard = Guard.of(box.settings)
    except Problem as problem:
        log.error("%s", problem.message)
        return 1
    settings = box.settings
    finish(box)
    for model_id in settings.models:
        try:
            registry.add(box, {"model_id": model_id})
        except Problem as problem:
            log.error("models in the configuration: %s", problem.message)

    def make_app() -> App:
        meters = Meters(box.folder / "metrics", "control")
        counted = Appliance.at(settings, meters.event)
        finish(counted)
        return create_app(counted, guard)

    where = address(settings.bind, settings.api_port)
    Server(
        "control", where, WORKERS, THREADS, make_app, refusal, guard.http_tls, own_socket=control_socket(settings)
    ).run()
    return 0


def finish(box: Appliance) -> None:
    """Finish what a process that died has left half done. Where it cannot be, `/health` says why."""
    try:
        supervision.reconcile(box)
    except Problem as problem:
        log.error("%s", problem.message)


if __name__ == "__main__":
    sys.exit(main())
