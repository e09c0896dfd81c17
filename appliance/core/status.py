"""Status: computed from what supervisor and the port say at the moment of asking, never stored.

Theory of operation. One replica is judged by what the operator and the monitor want, what supervisor says,
whether its port answers, and how old the process is. The first matching row decides:

    wanted    supervisor             port     age            status
    any       STOPPING               any      any            stopping
    stopped   STARTING, RUNNING      any      any            stopping   (the decision is made, the effect is under way)
    stopped   anything else          any      any            stopped, or sleeping where the next call starts it
    running   any, lacks its model   any      any            downloading, or failed where no download is under way
    running   any, quarantined       any      any            failed     (the monitor gave it up; start lifts that)
    running   FATAL, UNKNOWN         any      any            failed     (died start_retries times while starting)
    running   STOPPED                any      any            stopped    (an operator's `supervisorctl stop`)
    running   STOPPED, never started any      any            starting   (its model has just come: it is about to be)
    running   absent, EXITED         any      any            starting   (supervisor is about to start it; a process of
                                                                         an earlier launch counts as absent)
    running   BACKOFF                any      any            starting   (died while starting, will be tried again)
    running   STARTING, RUNNING, ejected   any  any          unhealthy  (misses probes, or answers wrongly)
    running   STARTING, RUNNING      answers  any            running    (it is this process that listens)
    running   STARTING, RUNNING      silent   <= timeout     starting   (TEI opens its port only after warm-up)
    running   STARTING, RUNNING      silent   > timeout      failed     (start-up timeout)

An instance has the best status of its replicas, in the order of RANK: it runs while one replica runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from appliance.core.problems import Kind, Problem
from appliance.core.state import Instance

RANK = ("running", "unhealthy", "starting", "downloading", "stopping", "sleeping", "failed", "stopped")
ALIVE = ("STARTING", "RUNNING")


class ProcessRow(NamedTuple):
    """What supervisord knows of one process. Times are seconds of its clock, 0 for never; pid 0: it does not run.

    exit_status: None unless it has ended since it was started last.
    """

    group: str
    name: str
    state: str
    pid: int
    spawn_error: str
    exit_status: int | None
    started: float
    stopped: float
    now: float


@dataclass(frozen=True)
class Process:
    """What supervisor says of one program. ``started`` and ``now`` are seconds of supervisor's clock.

    age: seconds since the process was started, as the kernel counts them: the clock may be set while a model loads.
    """

    group: str
    name: str
    state: str
    pid: int | None = None
    exit_status: int | None = None
    spawn_error: str = ""
    started: float = 0.0
    now: float = 0.0
    age: float | None = None

    @property
    def ending(self) -> str:
        """How one that does not live has ended, behind its name."""
        if self.spawn_error:
            return f"did not start: {self.spawn_error}"
        if self.exit_status is None:
            return "ended right after its start"
        return "was ended by a signal" if self.exit_status < 0 else f"ended with exit status {self.exit_status}"

    @property
    def was_stopped(self) -> bool:
        """Whether it ran and does not, as a person wished. One that waits for its model was never started."""
        return self.state == "STOPPED" and self.started > 0

    @property
    def uptime(self) -> float | None:
        if self.state not in ALIVE:
            return None
        if self.age is not None:
            return self.age
        return self.now - self.started if self.started else None


def replica_status(
    wanted: str,
    process: Process | None,
    answers: bool,
    timeout: float,
    ejected: bool = False,
    quarantined: bool = False,
    without_model: str = "",
    sleeping: bool = False,
) -> str:
    """The table above, row by row. process None: supervisor does not know the program. without_model: the status of
    one that lacks its model, else empty."""
    state = process.state if process else "ABSENT"
    if state == "STOPPING":
        return "stopping"
    if wanted == "stopped":
        return "stopping" if state in ALIVE else "sleeping" if sleeping else "stopped"
    if without_model:
        return without_model
    if quarantined or state in ("FATAL", "UNKNOWN"):
        return "failed"
    if process and process.was_stopped:
        return "stopped"
    if state not in ALIVE:
        return "starting"
    if ejected:
        return "unhealthy"
    if answers:
        return "running"
    uptime = process.uptime if process else None
    return "failed" if uptime is not None and uptime > timeout else "starting"


def instance_status(replicas: Sequence[str]) -> str:
    return min(replicas, key=RANK.index)


class Liveness(NamedTuple):
    """What there is of one replica: its process, and whether that listens on the replica's port."""

    process: Process | None = None
    answers: bool = False


class Sighting(NamedTuple):
    """What was seen of an instance: of each replica of this launch. downloading: whether a job fetches its model."""

    launch: int
    replicas: tuple[Liveness, ...]
    downloading: bool = False

    def of_launch(self, instance: Instance) -> tuple[Liveness, ...]:
        """For each replica of the instance; what was seen of another launch says nothing of this one."""
        return self.replicas if self.launch == instance.launch else (Liveness(),) * instance.spec.replicas


def replica_statuses(instance: Instance, sighting: Sighting, timeout: float) -> list[str]:
    without_model = ("downloading" if sighting.downloading else "failed") if instance.lacks_model else ""
    return [
        replica_status(
            instance.wanted,
            liveness.process,
            liveness.answers,
            timeout,
            ejected=index in instance.ejected,
            quarantined=index in instance.quarantined,
            without_model=without_model,
            sleeping=instance.sleeping,
        )
        for index, liveness in enumerate(sighting.of_launch(instance))
    ]


def halted(instance: Instance, sighting: Sighting) -> tuple[int, ...]:
    """The replicas that somebody stopped with supervisorctl, and those that supervisord has given up."""
    seen = {index: each.process for index, each in enumerate(sighting.of_launch(instance)) if each.process}
    idle = [index for index, process in seen.items() if process.was_stopped or process.state == "FATAL"]
    return tuple(index for index in idle if index not in instance.rolling)


def refuse_running(instance: Instance, sighting: Sighting, timeout: float) -> None:
    """Raises: Problem ALREADY_RUNNING where a start would change nothing."""
    current = instance_status(replica_statuses(instance, sighting, timeout))
    idle = instance.quarantined or halted(instance, sighting)
    if instance.wanted == "running" and not idle and current not in ("stopped", "failed"):
        raise Problem(
            Kind.CONFLICT, "ALREADY_RUNNING", f'Instance "{instance.name}" is {current}: use restart to start it anew'
        )
