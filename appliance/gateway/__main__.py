"""`python -m appliance.gateway`: gunicorn with HTTP inference on http_port."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import falcon

from appliance.core.addresses import address
from appliance.core.problems import Problem
from appliance.core.settings import Settings
from appliance.drivers import configfile, memory, output
from appliance.drivers.ending import leave
from appliance.drivers.httpserver import GunicornServer
from appliance.drivers.imagefetch import ImageFetcher
from appliance.drivers.metrics import Meters
from appliance.gateway.app import create_app, refusal
from appliance.gateway.client_watch import ClientWatch
from appliance.gateway.multiplexer_channels import MultiplexerChannels
from appliance.gateway.resource import Gateway
from appliance.gateway.selection import InstanceSelector
from appliance.node.authentication import Authenticator
from appliance.node.context import Node
from appliance.node.directory import Directory

log = logging.getLogger("appliance.gateway")
WORKERS = 2
THREADS = 64  # requests in work; nearly all of their time they wait for the multiplexer
ANSWER_SECS = 10.0  # on top of what a call may wait and work in the multiplexer, before that itself counts as stuck


def main() -> int:
    output.configure()
    try:
        settings = configfile.load(os.environ)
        authenticator = Authenticator.of(settings)
    except Problem as problem:
        log.error("%s", problem.message)
        return 1
    where = address(settings.bind, settings.http_port)
    grace_secs = settings.graceful_shutdown_timeout_secs
    make_app = lambda: app_of(settings, authenticator)  # noqa: E731
    memory.freeze_startup_objects()  # of the workers, too: a collection would copy each page that they share
    certificates = authenticator.certificates
    GunicornServer(
        "gateway",
        where,
        WORKERS,
        THREADS,
        make_app,
        refusal,
        certificates,
        grace_secs,
        heartbeat=Path(settings.layout.heartbeat("gateway")),
        probes=("/health", "/ping", "/metrics"),
        leave=leave,
    ).run()
    return 0


def app_of(settings: Settings, authenticator: Authenticator) -> falcon.App[falcon.Request, falcon.Response]:
    """The app of one worker, made after the fork: grpc's threads would not survive it."""
    wait, work = settings.queue.max_wait_ms / 1000, settings.grpc_request_timeout_secs
    return create_app(
        Gateway(
            node=Node.at(settings),
            selector=InstanceSelector(Directory.of(settings)),
            channels=MultiplexerChannels(
                [f"unix:{path}" for path in settings.multiplexer_sockets(os.cpu_count() or 1)],
                settings.grpc_max_message_bytes,
                wait + work + ANSWER_SECS if work else None,
                lane=f"unix:{settings.layout.express_inside_socket}",
            ),
            client_watch=ClientWatch(),
            meters=Meters(Path(settings.layout.metrics), "gateway"),
            authenticator=authenticator,
            reserve=memory.Reserve(settings.memory_budget_bytes),
            image_fetcher=ImageFetcher(settings.image_url_hosts),
        ),
        settings.cors_allow_origins,
    )


if __name__ == "__main__":
    sys.exit(main())
