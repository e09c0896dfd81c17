"""How many replicas an instance has on a cluster, by what waits in them: Serve asks every tenth of a second.

Theory of operation. Texts that wait in the replicas, by `te_queue_size`, are divided by what one replica may have
waiting. The replicas that there are count as needed while they have work; Serve's own delays decide for how long more
or fewer must have been right before something happens.

    waiting per replica    replicas
    above the target       as many more as bring it to the target
    some                   as many as there are
    none, for long enough  one fewer, down to those that were asked for
    none, and no call      none, where a call starts the instance again
    none are there         one as soon as somebody asks for it (the directory's `wake`)
"""

from __future__ import annotations

import math
from typing import Any

QUEUE, IDLE = "te_queue_size", "idle_secs"  # what a replica tells of itself


class QueuePolicy:
    """replicas: those that stay without any work. idle_secs: after so long without a call there is none; 0: never."""

    def __init__(self, target_queue: int, replicas: int, idle_secs: int) -> None:
        self.target_queue = target_queue
        self.replicas = replicas
        self.idle_secs = idle_secs

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """context: Serve's `AutoscalingContext`. Returns how many there shall be, and nothing to remember."""
        told = context.raw_metrics or {}
        queue = [newest(series) for series in told.get(QUEUE, {}).values() if series]
        idle = [newest(series) for series in told.get(IDLE, {}).values() if series]
        wanted = self.wanted(
            context.target_num_replicas, context.current_num_replicas, queue, idle, context.total_num_requests > 0
        )
        return wanted, {}

    def wanted(self, target: int, present: int, queue: list[float], idle: list[float], is_called: bool) -> int:
        """target: as it was decided last; present: replicas that run. queue, idle: of each replica that has told."""
        if target == 0:
            return 1 if is_called else 0
        if len(queue) < present or len(idle) < present:
            return target  # some have told nothing yet
        if self.idle_secs and min(idle, default=0.0) >= self.idle_secs and not is_called:
            return 0
        if present < target:
            return target  # some are on their way
        waiting = sum(queue)
        if waiting > self.target_queue * present:
            return math.ceil(waiting / self.target_queue)
        return target if waiting else max(min(target, self.replicas), target - 1)


def newest(series: Any) -> float:
    """The last value of one of Serve's series."""
    return float(series[-1].value)
