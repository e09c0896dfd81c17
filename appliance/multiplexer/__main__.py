"""`python -m appliance.multiplexer`: the gRPC data path on grpc_port."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

from appliance.core.problems import Problem
from appliance.drivers import configfile, output
from appliance.drivers.grpcserver import Server
from appliance.drivers.statefile import StateFile
from appliance.multiplexer.directory import Directory
from appliance.multiplexer.fleet import Fleet
from appliance.multiplexer.relay import Relay
from appliance.wire.methods import METHODS, MULTIPLEXER

log = logging.getLogger("appliance.multiplexer")
UNARY_THREADS = 256  # on top of one thread for each stream that may be open


def main() -> int:
    output.configure()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    signal.signal(signal.SIGINT, lambda *_: ended.set())
    try:
        settings = configfile.load(os.environ)
        state = StateFile(settings.state_file, now=str, on_repair=log.warning)  # only read here, never repaired
        fleet = Fleet(Directory(state), retire_secs=settings.graceful_shutdown_timeout_secs)
        relay = Relay(fleet, settings.grpc_request_timeout_secs, settings.grpc_max_parallel_streams)
        threads = settings.grpc_max_parallel_streams + UNARY_THREADS
        server = Server(threads, settings.grpc_max_message_bytes, shared_port=True)
        server.add(MULTIPLEXER, {method.name: relay.handler(method) for method in METHODS})
        fleet.start()
        server.start(settings.bind, settings.grpc_port)
    except Problem as problem:
        log.error("%s", problem.message)
        return 1
    log.info("Listening on %s:%s", settings.bind, settings.grpc_port)
    ended.wait()
    log.info("Stopping: calls in progress may end within %s s", settings.graceful_shutdown_timeout_secs)
    server.stop(settings.graceful_shutdown_timeout_secs)
    fleet.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
