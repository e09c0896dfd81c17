"""What each instance does is written down, for the plots of the console and whoever asks for its series."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from appliance.core import series
from appliance.core.series import NAN, Counts, Moment
from appliance.core.state import State
from appliance.core.status import Process
from appliance.drivers import metrics, processes
from appliance.drivers.seriesfile import SeriesFile
from appliance.monitor.golden import Golden
from appliance.node import express_metrics, gpus
from appliance.node.context import Node

log = logging.getLogger(__name__)
MIB = 1024**2
CountsByName = Mapping[str, Counts]


class Recording:
    """Used by the thread that looks."""

    def __init__(self, node: Node, golden: Golden) -> None:
        self.node = node
        self.golden = golden
        self.folder = Path(node.layout.series)
        self.counted: CountsByName | None = None  # by the multiplexers
        self.by_lane: CountsByName | None = None  # by Envoy
        self.at = float("-inf")  # of time.monotonic, when that was counted

    def look(self, now: float, state: State, table: Sequence[Process], ready: Collection[int]) -> None:
        """Write a row of each instance when it is time. now: of time.monotonic. ready: the processes that answer."""
        if now - self.at < series.FINE.secs:
            return
        before, lane_before, secs = self.counted, self.by_lane, now - self.at
        self.at = now
        self.counted = metrics.counts_by_instance(Path(self.node.layout.metrics))
        has_lane = any(instance.spec.express for instance in state.instances.values())
        self.by_lane = express_metrics.counts_by_instance(self.node) if has_lane else None
        seen = self.see(state, table, ready)
        for name in state.instances:
            happened = since(before, self.counted, name)
            by_lane = since(lane_before, self.by_lane, name)
            both = happened + by_lane if happened and by_lane else happened
            queue = self.counted.get(name, Counts()).queue
            try:
                SeriesFile(self.folder / name).append(time.time(), series.measured(both, queue, secs, seen[name]))
            except OSError as error:
                log.error("Cannot write the series of %s: %s", name, error)

    def see(self, state: State, table: Sequence[Process], ready: Collection[int]) -> dict[str, Moment]:
        """What is so now, of each instance."""
        memory, answering = Counter[str](), Counter[str]()
        for process in table:
            if process.group in state.instances and process.pid:
                memory[process.group] += processes.resident_bytes(process.pid)
                answering[process.group] += process.pid in ready
        on_gpus = gpus.memory_by_instance(table)
        return {
            name: Moment(
                memory_mib=memory[name] / MIB,
                gpu_mib=on_gpus[name] / MIB if name in on_gpus else NAN,
                ready=float(answering[name]),
                golden_distance=self.golden.distance(instance) if answering[name] else NAN,
            )
            for name, instance in state.instances.items()
        }

    def forget_others(self, names: Collection[str]) -> None:
        """Delete the files of instances that are gone."""
        for path in self.folder.glob("*"):
            if path.name not in names:
                path.unlink(missing_ok=True)


def since(before: CountsByName | None, now: CountsByName | None, name: str) -> Counts | None:
    """What has happened of an instance between two looks; None where one of them was not answered."""
    if before is None or now is None:
        return None
    return now.get(name, Counts()).since(before.get(name, Counts()))
