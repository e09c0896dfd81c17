"""The monitor of a cluster's head: Ray Serve watches the replicas, and this sees that Serve has what is wanted."""

from __future__ import annotations

import logging
import time

from appliance.core.cluster import application_name
from appliance.core.events import Event
from appliance.core.problems import Problem
from appliance.core.state import State
from appliance.monitor.machine import MachineWatch
from appliance.node import cluster as sights
from appliance.node.cluster import ClusterSight
from appliance.node.context import Node
from appliance.operations import cache, cluster, models, supervision

log = logging.getLogger("appliance.monitor")
LOOK_SECS, MEND_SECS = 2.0, 60.0


class ClusterMonitor:
    """In the place of `Monitor`, whose calls it takes."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.machine = MachineWatch(node)
        self.looked_at = float("-inf")
        self.mended_at = time.monotonic()
        self.ready: set[str] | None = None  # Serve's ids of the replicas that answered at the last look

    def doubt(self, name: str, replica: int, launch: int) -> None:
        """Golden answers are not compared here."""
        log.error('Replica %s of "%s" gave an answer that cannot be right', replica, name)

    def tick(self, woken: bool = True) -> None:
        """Raises: Problem while Ray or supervisord does not answer."""
        now = time.monotonic()
        self.machine.examine(now)
        if now - self.mended_at > MEND_SECS:
            self.mended_at = now
            self.mend()
        if now - self.looked_at < LOOK_SECS:
            return
        self.looked_at = now
        self.write_health()
        sight = sights.look(self.node)
        self.note_ready(self.node.state.read(), sight)
        if not cluster.is_deployed(self.node, sight):
            cluster.deploy(self.node)
            self.node.journal.record(Event.RECONCILED, None, "Ray Serve has what the state wants again")

    def note_ready(self, state: State, sight: ClusterSight) -> None:
        """Those of the first look are no news."""
        ready = {
            each.id: name
            for name in state.instances
            if (application := sight.applications.get(application_name(name)))
            for each in application.replicas
            if each.state == "RUNNING"
        }
        if self.ready is not None:
            for replica in ready.keys() - self.ready:
                words = f'Replica {replica} of "{ready[replica]}" answers'
                self.node.journal.record(Event.READY, ready[replica], words, replica=replica)
        self.ready = set(ready)

    def write_health(self) -> None:
        """That there is such a file says that the monitor looks; Serve probes the replicas."""
        try:
            self.node.health.write({})
        except OSError as error:
            log.error("Cannot write %s: %s", self.node.health.path, error)

    def mend(self) -> None:
        """Once a minute what is not Serve's."""
        try:
            supervision.reconcile(self.node, ())
            models.settle(self.node)
            supervision.end_orphans(self.node)
            cache.finish(self.node)
        except Problem as problem:
            log.error("Looking again in a minute: %s", problem.message)
