"""What is wrong with the machine, and what models take of it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from filelock import Timeout

from appliance.core.events import Event
from appliance.core.state import State
from appliance.core.status import Process
from appliance.node import conditions
from appliance.node.context import Node
from appliance.node.room import keep_peaks

log = logging.getLogger(__name__)
EXAMINE_SECS = 5.0
PEAK_SECS = 60.0  # between two looks at the peak of a process, which the kernel keeps


class MachineWatch:
    """Used by the thread that looks. now: of time.monotonic."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.examined_at = self.measured_at = self.peaks_at = float("-inf")
        self.peaks_of: set[int] = set()  # processes whose peaks were taken since then
        self.conditions: dict[Event, str] = {}  # at the last look

    def examine(self, now: float) -> None:
        """Journal what has begun or ended to be wrong with the machine, when it is time to look."""
        if now - self.examined_at < EXAMINE_SECS:
            return
        self.examined_at = now
        present = conditions.present(self.node)
        for event in present.keys() - self.conditions.keys():
            self.node.journal.record(event, None, present[event])
        for event in self.conditions.keys() - present.keys():
            self.node.journal.record(Event.CONDITION_OVER, None, f"No longer: {event}", trouble=event)
        self.conditions = present
        self.node.journal.write()

    def measure(self, now: float, state: State, table: Sequence[Process], answering: Collection[int]) -> None:
        """Keep how much memory each workload was seen to take. answering: the processes that have loaded their model.

        Who gives way before the next look is measured by whoever makes room.
        """
        if now - self.measured_at < self.node.settings.health_check_interval_secs:
            return
        self.measured_at = now
        if now - self.peaks_at >= PEAK_SECS:
            self.peaks_at, self.peaks_of = now, set()
        others = set(answering) - self.peaks_of
        try:
            keep_peaks(self.node, state, table, others)
            self.peaks_of |= others
        except (OSError, Timeout) as error:
            log.error("Cannot keep what models take: %s", error)
