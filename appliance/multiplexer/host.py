"""What the multiplexer asks the machine and tells its neighbours: who listens, what was stopped, what went wrong."""

from __future__ import annotations

import logging
import threading
import time

from appliance.core.health import DOUBT_EVENT
from appliance.core.problems import Problem
from appliance.core.program import marker
from appliance.core.routing import Replica
from appliance.core.settings import Settings
from appliance.drivers.metrics import Meters
from appliance.node.context import Node

log = logging.getLogger(__name__)
STOPPED_SECS = 0.5  # how long the answer of supervisord counts
DOUBT_SECS = 5.0  # between two doubts of one replica


class Host:
    """Thread-safe."""

    def __init__(self, settings: Settings, meters: Meters) -> None:
        self.node = Node.at(settings, meters.event)
        self.id = self.node.id
        self.lock = threading.Lock()
        self.states: dict[str, set[str]] = {}
        self.asked_at = float("-inf")
        self.doubted: dict[Replica, float] = {}

    def proved(self, replica: Replica) -> bool:
        """Whether the process that supervisord started for a replica listens on its port, and nobody else."""
        mark = marker(self.id, replica.instance, replica.index, replica.launch)
        return self.node.listeners.proved(replica.port, mark)

    def stopped(self, instance: str) -> bool:
        """Whether an operator has stopped an instance with supervisorctl. Asked where no replica is there to answer."""
        with self.lock:
            if time.monotonic() - self.asked_at > STOPPED_SECS:
                self.states, self.asked_at = self.look(), time.monotonic()
            return self.states.get(instance) == {"STOPPED"}

    def look(self) -> dict[str, set[str]]:
        """The states of the processes of each group; nothing without supervisord, and then nobody stopped anything."""
        states: dict[str, set[str]] = {}
        try:
            for process in self.node.supervisor.processes():
                states.setdefault(process.group, set()).add(process.state)
        except Problem as problem:
            log.warning("%s", problem.message)
        return states

    def convicted(self, instance: str, launch: int, died: list[int], message: str) -> None:
        """A call that ends replicas: the monitor does not hold their deaths against them."""
        self.node.journal.record("convicted", instance, message, launch=launch, died=died)

    def doubt(self, replica: Replica) -> None:
        """A replica whose answer cannot be right: the monitor compares it with its golden answers at once."""
        log.error('Replica %s of "%s" gave an answer that cannot be right', replica.index, replica.instance)
        now = time.monotonic()
        with self.lock:
            if now - self.doubted.get(replica, float("-inf")) < DOUBT_SECS:
                return
            self.doubted = {each: at for each, at in self.doubted.items() if now - at < DOUBT_SECS} | {replica: now}
        try:
            self.node.supervisor.send_event(DOUBT_EVENT, f"{replica.instance}:{replica.index}:{replica.launch}")
        except Problem as problem:  # the monitor compares golden answers by itself, too, if later
            log.warning("The monitor could not be told: %s", problem.message)
