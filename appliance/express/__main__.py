"""`python -m appliance.express`: Envoy on the gRPC port, and the tables that it follows, ten times a second.

Envoy is a child in a process group of its own: at the end supervisord's signal must not reach it before its calls have
ended. Where this process is killed, its successor ends the Envoy that it left behind.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from pathlib import Path

from appliance.core.layout import EXPRESS
from appliance.core.problems import Kind, Problem
from appliance.core.program import MARKER
from appliance.drivers import configfile, envoy, memory, output, processes
from appliance.drivers.ending import leave
from appliance.drivers.metrics import DURATIONS
from appliance.drivers.signals import ShutdownSignals
from appliance.export import envoy as export
from appliance.export.express_lane import ExpressLane
from appliance.express.tables import Tables
from appliance.node import express
from appliance.node.context import Node

log = logging.getLogger("appliance.express")
SCRIPT = Path(__file__).with_name("lane.lua")
BOOTSTRAP = "bootstrap.json"
TICK_SECS = 0.1
UNWRITTEN_SECS = 1.0  # after tables that could not be written
END_SECS = 5.0
CORES_PER_THREAD = 8  # one thread takes some 8,000 calls a second
ASK_SECS = 1.0  # between two questions whether Envoy lives
MOST_SILENCES = 5  # in a row, then it hangs: it would keep every caller until his deadline
ACTIVE = "http.grpc.downstream_rq_active"


def main() -> int:
    memory.limit_malloc()
    output.configure()
    shutdown = ShutdownSignals()
    cores = os.cpu_count() or 1
    try:
        settings = configfile.load(os.environ)
        node = Node.at(settings)
        binary = envoy.binary()
        if binary is None:
            raise Problem(Kind.UNAVAILABLE, "NO_ENVOY", f"Envoy is not installed any more: {express.INSTALL}")
        lane = ExpressLane.of(settings, express.ipv4(settings.bind), cores, SCRIPT.read_text(), DURATIONS)
        Path(lane.folder).mkdir(mode=0o700, exist_ok=True)
        end_predecessor(node, Path(lane.admin_socket))
        tables = Tables(node, lane, binary)
        tables.follow()
        if not tables.accepted("listener", export.bootstrap(lane)):
            # With that of an earlier start it might listen elsewhere, or without TLS. The multiplexer has the port.
            raise Problem(Kind.UNAVAILABLE, "NO_ENVOY", "Envoy takes no calls: it rejects its configuration, see above")
        tables.put(BOOTSTRAP, export.bootstrap(lane))
    except Problem as problem:
        log.error("%s", problem.message)
        return 1
    except OSError as error:
        log.error("The configuration of Envoy cannot be written: %s", error)
        return 1
    command = envoy.command(binary, Path(lane.folder) / BOOTSTRAP, threads=max(1, cores // CORES_PER_THREAD))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    log.info("Envoy is process %s on %s:%s", child.pid, lane.host, lane.port)
    pulse, followed = Pulse(Path(lane.admin_socket)), True
    while child.poll() is None and not shutdown.received and followed:
        time.sleep(TICK_SECS)
        followed = follow(tables)
        if pulse.is_lost():
            log.error("Envoy has not answered %s times, and is ended", MOST_SILENCES)
            child.kill()
            child.wait()
    if child.poll() is None:
        drain(child, Path(lane.admin_socket), settings.graceful_shutdown_timeout_secs)
        return 0 if shutdown.received else 1
    log.error("Envoy has ended by itself, with %s", child.returncode)
    return 1


class Pulse:
    """Whether Envoy's main thread answers; of its other threads its own watchdog takes care. admin: its socket."""

    def __init__(self, admin: Path) -> None:
        self.admin = admin
        self.asked, self.silences = time.monotonic(), 0

    def is_lost(self) -> bool:
        """Ask, if the last question is long ago; up to 2 s without an answer."""
        if time.monotonic() - self.asked > ASK_SECS:
            answer = envoy.ask(self.admin, "GET", "/server_info")
            self.asked = time.monotonic()
            self.silences = self.silences + 1 if answer is None else 0
        return self.silences >= MOST_SILENCES


def follow(tables: Tables) -> bool:
    """Follow; False when Envoy can follow no more, because the folder that it watches is gone.

    On a full disk Envoy goes on: it admits nobody while the tables are not said to be right.
    """
    try:
        tables.follow()
    except FileNotFoundError as error:
        log.error("The tables of Envoy are gone: %s", error)
        return False
    except OSError as error:
        log.error("The tables of Envoy cannot be written: %s", error)
        time.sleep(UNWRITTEN_SECS)
    return True


def end_predecessor(node: Node, admin: Path) -> None:
    """An Envoy whose parent was killed listens as well, and follows no table. Its calls may end meanwhile: nothing of
    the lane needs its replicas any more, and new connections go to the multiplexer."""
    left = [process for process, _ in processes.marked(MARKER, f"{node.id}:{EXPRESS}:", except_under=())]
    if left:
        log.info("An Envoy was left behind: it is ended")
        drain_listeners(admin, END_SECS)
    processes.end(left, 0)


def drain(child: subprocess.Popen[bytes], admin: Path, grace_secs: float) -> None:
    """Let no new connection in, let the calls end, and end Envoy."""
    drain_listeners(admin, grace_secs)
    child.terminate()
    try:
        child.wait(END_SECS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def drain_listeners(admin: Path, grace_secs: float) -> None:
    """Let no new connection in, and wait until no call is left, or Envoy does not answer."""
    envoy.ask(admin, "POST", "/drain_listeners")
    until = time.monotonic() + grace_secs
    while time.monotonic() < until and active_calls(admin):
        time.sleep(TICK_SECS)


def active_calls(admin: Path) -> int:
    text = envoy.ask(admin, "GET", f"/stats?filter=^{ACTIVE}$") or ""
    number = text.partition(":")[2].strip()
    return int(number) if number.isdigit() else 0


if __name__ == "__main__":
    leave(main())
