"""What the multiplexer asks its node, and reports to the other processes there.

It asks which process listens on a port and which instances an operator has stopped. It reports convictions in the
journal, and doubts to the monitor.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from appliance.core.events import Event
from appliance.core.health import DOUBT_EVENT
from appliance.core.problems import Problem
from appliance.core.program import marker
from appliance.core.routing import Replica, Route
from appliance.core.settings import Settings
from appliance.core.state import Instance
from appliance.drivers import controlsocket
from appliance.drivers.activityfile import ActivityFile
from appliance.drivers.metrics import Meters
from appliance.drivers.serve import ServeDirectory
from appliance.multiplexer.suspicion import Conviction
from appliance.node.context import Node
from appliance.node.outlook import Outlook, outlook_of

log = logging.getLogger(__name__)
STATES_SECS = 0.5  # so long an answer of supervisord is used again
REPLACING_SECS = 10.0  # above the time that the processes before have to end
WAKE_SECS = 30.0  # above the time that those have who give way
GONE = Outlook("gone", None)
DOUBT_SECS = 5.0  # at least, between two reports of one replica


class NodeLink:
    """Thread-safe."""

    def __init__(self, settings: Settings, meters: Meters) -> None:
        self.node = Node.at(settings, meters.event)
        self.node_id = self.node.id
        self.cluster = ServeDirectory(place) if (place := settings.cluster_directory) else None
        self.lock = threading.Lock()
        self.states: dict[str, set[str]] = {}
        self.asked_at = float("-inf")
        self.doubts: dict[Replica, float] = {}
        self.launches: dict[str, tuple[int, float]] | None = None  # of each instance the present one, and since when
        self.outlooks_lock = threading.Lock()
        self.outlooks: dict[str, tuple[Outlook, float]] = {}

    def activity_file(self, number: int) -> ActivityFile:
        """That of the multiplexer process of this number."""
        return ActivityFile(Path(self.node.layout.activity_of(number)))

    def wake(self, instance: str, since: float) -> None:
        """Let control, or the cluster, wake an instance that sleeps. since: when its first call came.

        Raises: Problem, unavailable where asking again may help.
        """
        longest_secs = self.node.settings.graceful_shutdown_timeout_secs + WAKE_SECS
        if self.cluster:
            self.cluster.wake(instance, longest_secs)
            return
        controlsocket.wake(Path(self.node.layout.control_socket), instance, since, longest_secs)

    def load_left(self, name: str) -> float | None:
        """The seconds until an instance answers that is on its way, as far as they are known.

        Raises: LookupError where it is not on its way.
        """
        with self.outlooks_lock:
            outlook, at = self.outlooks.get(name, (None, float("-inf")))
            if outlook is None or time.monotonic() - at > STATES_SECS:
                outlook = self.outlook(name)
                since = time.monotonic() - STATES_SECS
                self.outlooks = {each: known for each, known in self.outlooks.items() if known[1] > since}
                self.outlooks[name] = outlook, time.monotonic()
        if not outlook.is_arriving and not (outlook.status == "stopped" and self.is_being_replaced(name)):
            raise LookupError(name)
        return outlook.left_secs

    def outlook(self, name: str) -> Outlook:
        try:
            instance = self.node.state.read().instances.get(name)
            found = outlook_of(self.node, instance) if instance else GONE
            if instance and found.status == "failed" and self.is_only_passing(instance):
                return Outlook("starting", None)
            return found
        except Problem as problem:
            log.warning("%s", problem.message)
            return GONE

    def is_only_passing(self, instance: Instance) -> bool:
        """Whether one that has failed is about to be something else: what it was before, or its present launch."""
        return instance.falls_back or (not instance.quarantined and self.is_being_replaced(instance.name))

    def is_proved(self, replica: Replica) -> bool:
        """Whether the process that supervisord started for a replica listens on its port, and no other one."""
        process_marker = marker(self.node_id, replica.instance, replica.index, replica.launch)
        return self.node.listeners.proved(replica.port, process_marker)

    def note_launches(self, routes: Iterable[Route]) -> None:
        """When each launch was seen first. Those of the first table are not known to be new."""
        known = {route.name: replica.launch for route in routes for replica in route.replicas[:1]}
        now = time.monotonic() if self.launches is not None else float("-inf")
        before = self.launches or {}
        self.launches = {
            name: before[name] if name in before and before[name][0] == launch else (launch, now)
            for name, launch in known.items()
        }

    def is_being_replaced(self, instance: str) -> bool:
        """Whether its launch is so new that a process which has stopped may be one of the launch before."""
        _, since = (self.launches or {}).get(instance, (0, float("-inf")))
        longest_secs = self.node.settings.graceful_shutdown_timeout_secs + REPLACING_SECS
        return time.monotonic() - since < longest_secs

    def is_stopped(self, instance: str) -> bool:
        """Whether an operator has stopped an instance with supervisorctl. Asked only where no replica is ready."""
        if self.is_being_replaced(instance):
            return False
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
        threading.Thread(target=self.tell_of_doubt, args=(replica,), name="doubt", daemon=True).start()

    def tell_of_doubt(self, replica: Replica) -> None:
        """In a thread: the call shall not wait for supervisord."""
        try:
            self.node.supervisor.send_event(DOUBT_EVENT, f"{replica.instance}:{replica.index}:{replica.launch}")
        except Problem as problem:  # the monitor compares golden answers by itself, too, if later
            log.warning("The monitor could not be told: %s", problem.message)
