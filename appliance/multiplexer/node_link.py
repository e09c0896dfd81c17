"""What the multiplexer asks its node, and reports to the other processes there.

It asks which process listens on a port and which instances an operator has stopped. It reports convictions in the
journal, and doubts to the monitor.
"""

from __future__ import annotations

import logging
import threading
import time

from appliance.core.events import Event
from appliance.core.health import DOUBT_EVENT
from appliance.core.problems import Problem
from appliance.core.program import marker
from appliance.core.routing import Replica
from appliance.core.settings import Settings
from appliance.drivers.metrics import Meters
from appliance.multiplexer.suspicion import Conviction
from appliance.node.context import Node

log = logging.getLogger(__name__)
STATES_SECS = 0.5  # so long an answer of supervisord is used again
DOUBT_SECS = 5.0  # at least, between two reports of one replica


class NodeLink:
    """Thread-safe."""

    def __init__(self, settings: Settings, meters: Meters) -> None:
        self.node = Node.at(settings, meters.event)
        self.node_id = self.node.id
        self.lock = threading.Lock()
        self.states: dict[str, set[str]] = {}
        self.asked_at = float("-inf")
        self.doubts: dict[Replica, float] = {}

    def is_proved(self, replica: Replica) -> bool:
        """Whether the process that supervisord started for a replica listens on its port, and no other one."""
        process_marker = marker(self.node_id, replica.instance, replica.index, replica.launch)
        return self.node.listeners.proved(replica.port, process_marker)

    def is_stopped(self, instance: str) -> bool:
        """Whether an operator has stopped an instance with supervisorctl. Asked only where no replica is ready."""
        with self.lock:
            if time.monotonic() - self.asked_at > STATES_SECS:
                self.states, self.asked_at = self.group_states(), time.monotonic()
            return self.states.get(instance) == {"STOPPED"}

    def group_states(self) -> dict[str, set[str]]:
        """The states of the processes of each group; none where supervisord does not answer."""
        states: dict[str, set[str]] = {}
        try:
            for process in self.node.supervisor.processes():
                state = process.state if process.was_stopped or process.state != "STOPPED" else "NEVER STARTED"
                states.setdefault(process.group, set()).add(state)
        except Problem as problem:
            log.warning("%s", problem.message)
        return states

    def report_conviction(self, conviction: Conviction) -> None:
        """A call that ends replicas: the monitor does not hold their deaths against them."""
        launch, died, message = conviction
        self.node.journal.record(Event.CONVICTED, launch.instance, message, launch=launch.number, died=died)

    def report_doubt(self, replica: Replica) -> None:
        """A replica gave an answer that cannot be right: the monitor compares it with its golden answers at once."""
        log.error('Replica %s of "%s" gave an answer that cannot be right', replica.index, replica.instance)
        now = time.monotonic()
        with self.lock:
            if now - self.doubts.get(replica, float("-inf")) < DOUBT_SECS:
                return
            self.doubts = {each: at for each, at in self.doubts.items() if now - at < DOUBT_SECS} | {replica: now}
        try:
            self.node.supervisor.send_event(DOUBT_EVENT, f"{replica.instance}:{replica.index}:{replica.launch}")
        except Problem as problem:  # the monitor compares golden answers by itself, too, if later
            log.warning("The monitor could not be told: %s", problem.message)
