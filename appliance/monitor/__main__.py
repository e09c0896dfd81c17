"""`python -m appliance.monitor`: started by supervisord as an event listener.

Events only wake the monitor: supervisor loses some when a listener is slow, and each is over when it is read. They are
acknowledged at once, and what is true is looked up. Standard output belongs to supervisor's event protocol.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path

from supervisor import childutils

from appliance.core.health import DOUBT_EVENT
from appliance.core.problems import Problem
from appliance.drivers import configfile, output
from appliance.drivers.metrics import Meters
from appliance.files.heartbeat import Heartbeat
from appliance.monitor.cluster_monitor import ClusterMonitor
from appliance.monitor.monitor import LOOK_SECS, Monitor
from appliance.node.context import Node
from appliance.operations.hung_programs import ProgramWatch, serving

log = logging.getLogger("appliance.monitor")


def main() -> int:
    output.configure(stream=sys.stderr)
    woken = threading.Event()
    try:
        settings = configfile.load(os.environ)
        meters = Meters(Path(settings.layout.metrics), "monitor")
        node = Node.at(settings, meters.event)
        on_cluster = settings.is_cluster_head
        monitor = ClusterMonitor(node) if on_cluster else Monitor(node, meters, wake=woken.set)
    except Problem as problem:
        log.error("%s", problem.message)
        return 1
    heart = Heartbeat(Path(settings.layout.heartbeat("monitor")))
    threading.Thread(target=keep, args=(monitor, woken, heart), name="watch", daemon=True).start()
    ProgramWatch(node, "monitor", serving(settings.workers(os.cpu_count() or 1))).start()
    while True:
        headers, payload = childutils.listener.wait(sys.stdin, sys.stdout)  # ends the process when supervisord is gone
        childutils.listener.ok(sys.stdout)
        kind, _, data = payload.partition("\n")
        if headers["eventname"] == "REMOTE_COMMUNICATION" and kind == f"type:{DOUBT_EVENT}":
            name, replica, launch = data.rsplit(":", 2)
            monitor.doubt(name, int(replica), int(launch))
        woken.set()


def keep(monitor: Monitor | ClusterMonitor, woken: threading.Event, heart: Heartbeat) -> None:
    while True:
        heart.beat()
        news = woken.wait(LOOK_SECS)
        if news:  # what comes right now is news of the next look
            woken.clear()
        try:
            monitor.tick(news)
        except Problem as problem:
            log.error("Looking again in a moment: %s", problem.message)
        except Exception:
            log.exception("The watch stumbled; looking again in a moment")


if __name__ == "__main__":
    sys.exit(main())
