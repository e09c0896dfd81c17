"""How many replicas an instance has on a cluster, by what waits in them: Serve asks every tenth of a second.

Theory of operation. Texts that wait in the replicas, by `te_queue_size`, are divided by what one replica may have
waiting, the target. They are counted once a second or so, and the mean of some seconds is taken: a batch that comes and
goes would else be seen as nothing or as far too much. Serve's own delays decide for how long more or fewer must have
been right before something happens.

    waiting                              replicas
    above the target in each             as many more as bring it to the target
    below half of it with one fewer      one fewer, down to those that were asked for
    between                              as many as there are
    nothing, and no call for long        none, where a call starts the instance again
    none are there                       one as soon as somebody asks for it (the directory's `wake`)
"""

from __future__ import annotations

import math
from statistics import fmean
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
        queue = [fmean(values(series)) for series in told.get(QUEUE, {}).values() if series]
        idle = [values(series)[-1] for series in told.get(IDLE, {}).values() if series]
        wanted = self.wanted(
            context.target_num_replicas, context.current_num_replicas, queue, idle, context.total_num_requests > 0
        )
        return wanted, {}

    def wanted(self, target: int, present: int, queue: list[float], idle: list[float], is_called: bool) -> int:
        """target: as it was decided last; present: replicas that run. queue, idle: of each replica that has told, the
        texts that wait in it on average, and the seconds since its last call."""
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
        if waiting >= self.target_queue / 2 * max(1, present - 1):
            return target
        return max(min(target, self.replicas), target - 1)


def values(series: Any) -> list[float]:
    """Of one of Serve's series, the newest last."""
    return [float(each.value) for each in series]
