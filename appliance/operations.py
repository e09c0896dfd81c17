"""The verbs of the product. Each changes the state file with a pure function, then makes supervisor match.

The rename of the state file is the commit point of every verb. `reconcile` may be repeated at any time by anybody:
it renders the include file, asks supervisor for the difference, and replaces the groups that differ. If a process dies
after the commit, the next reconcile finishes its work; if before, nothing happened.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from appliance.core import program, state, status
from appliance.core.instance import RESERVED_NAMES, InstanceSpec
from appliance.core.problems import Kind, Problem, invalid
from appliance.core.program import LOOPBACK, MARKER
from appliance.core.settings import Settings
from appliance.core.state import Instance, State
from appliance.drivers import logs, nvml, ports, processes
from appliance.drivers.healthfile import HealthFile
from appliance.drivers.journal import Count, Journal, uncounted
from appliance.drivers.statefile import StateFile, write_durably
from appliance.drivers.supervisord import Supervisor
from appliance.export.supervisord import instances_conf

LOCK_STRIPES = 64  # files that serialise work on groups: names share them, so that they never pile up
LAST_LINES = 10  # of a log, told with a failure
LONGEST_REASON = 4000  # characters, in the state file
REPLACE_GRACE_SECS = 10  # on top of stopwaitsecs, before a stop counts as stuck


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class Appliance:
    """One appliance on this machine: its settings and the drivers to its files and its supervisord."""

    settings: Settings
    state: StateFile
    supervisor: Supervisor
    journal: Journal
    health: HealthFile

    @classmethod
    def at(cls, settings: Settings, count: Count = uncounted) -> Appliance:
        """count: called with each event of the journal."""
        folder = Path(settings.data_dir)
        journal = Journal(folder / "events.jsonl", now, count)
        return cls(
            settings=settings,
            state=StateFile(settings.state_file, now, lambda message: journal.record("state_repaired", None, message)),
            supervisor=Supervisor(folder / "supervisor.sock"),
            journal=journal,
            health=HealthFile(folder / "health.json"),
        )

    @property
    def folder(self) -> Path:
        return Path(self.settings.data_dir)

    @property
    def box(self) -> str:
        """A short id of this data folder, so that two appliances on one machine know their own processes."""
        return hashlib.sha256(os.path.realpath(self.folder).encode()).hexdigest()[:12]

    def log_path(self, name: str, replica: int) -> Path:
        return Path(self.settings.log_dir) / f"{name}-{replica}.log"


# -- verbs ------------------------------------------------------------------------------------------------------------


def create(box: Appliance, given: Any) -> dict[str, Any]:
    """Add an instance that shall run; returns its overview, at this moment ``starting``."""
    spec = accepted(box, given)
    busy = busy_ports(box, spec)
    box.supervisor.require()
    after = box.state.update(lambda before: state.add(before, spec, box.settings, busy, now()))
    message = f'Instance "{spec.name}" created for model {spec.model_id}'
    box.journal.record("created", spec.name, message, model=spec.model_id)
    return carried_out(box, after.get(spec.name))


def delete(box: Appliance, name: str) -> dict[str, Any]:
    """Forget an instance and stop its processes; returns what it was."""
    box.supervisor.require()
    last = show(box, name)
    box.state.update(lambda before: state.remove(before, name))
    box.journal.record("deleted", name, f'Instance "{name}" deleted')
    reconcile(box, {name})
    return {**last, "status": "stopped", "pid": None, "uptime_secs": None, "replicas_ready": 0}


def start(box: Appliance, name: str) -> dict[str, Any]:
    """Let an instance run again; of one with sound replicas, only its quarantined ones, so that those stay.

    Raises: Problem ALREADY_RUNNING unless it is stopped or failed, or has such.
    """
    lifted: list[int] = []

    def change(before: State) -> State:
        lifted.clear()
        instance = before.get(name)
        current = overview(box, instance)["status"]
        if instance.wanted == "running" and 0 < len(instance.quarantined) < instance.spec.replicas:
            lifted.extend(instance.quarantined)
            return state.lift(before, name)
        if instance.wanted == "running" and not instance.quarantined and current not in ("stopped", "failed"):
            raise Problem(
                Kind.CONFLICT, "ALREADY_RUNNING", f'Instance "{name}" is {current}: use restart to start it anew'
            )
        return state.start(before, name)

    after = box.state.update(change)
    box.journal.record("started", name, f'Instance "{name}" started')
    if lifted:
        with group_lock(box, name, wait=True):
            for replica in lifted:
                longest = box.settings.graceful_shutdown_timeout_secs + REPLACE_GRACE_SECS
                box.supervisor.start(name, f"{name}-{replica}", longest)
    return carried_out(box, after.get(name))


def stop(box: Appliance, name: str) -> dict[str, Any]:
    """Stop an instance until somebody starts it. Raises: Problem NOT_RUNNING when it is stopped already."""

    def change(before: State) -> State:
        if before.get(name).wanted == "stopped":
            raise Problem(Kind.CONFLICT, "NOT_RUNNING", f'Instance "{name}" is stopped already')
        return state.stop(before, name)

    box.supervisor.require()
    after = box.state.update(change)
    box.journal.record("stopped", name, f'Instance "{name}" stopped')
    return carried_out(box, after.get(name))


def restart(box: Appliance, name: str) -> dict[str, Any]:
    """Replace the processes of an instance by new ones; a stopped one is started."""
    box.supervisor.require()
    after = box.state.update(lambda before: state.restart(before, name))
    box.journal.record("restarted", name, f'Instance "{name}" restarted', cause="asked")
    return carried_out(box, after.get(name))


def withhold(box: Appliance, name: str, replica: int, launch: int, reason: str) -> None:
    """Take a replica out of routing."""
    after = box.state.update(lambda before: state.withhold(before, name, replica, launch, reason))
    if name not in after.instances or replica not in after.instances[name].withheld:
        return  # deleted or started anew meanwhile
    box.journal.record("unhealthy", name, f'Replica {replica} of "{name}" gets no traffic: {reason}', replica=replica)


def release(box: Appliance, name: str, replica: int) -> None:
    """Let a replica have traffic again."""
    box.state.update(lambda before: state.release(before, name, replica))
    box.journal.record("recovered", name, f'Replica {replica} of "{name}" answers again', replica=replica)


def replace_process(box: Appliance, name: str, replica: int, launch: int, pid: int, cause: str, reason: str) -> None:
    """End one process of a replica, which supervisord then starts anew. It is killed: one that hangs hears no TERM."""
    tail = logs.tail(box.log_path(name, replica), LAST_LINES)
    current = next((each for each in box.supervisor.processes() if each.name == f"{name}-{replica}"), None)
    if current is None or current.pid != pid:
        return  # it went by itself
    box.state.update(lambda before: state.repaired(before, name, launch))
    box.supervisor.signal(name, f"{name}-{replica}", "KILL")
    message = f'Replica {replica} of "{name}" restarted: {reason}'
    box.journal.record("restarted", name, message, replica=replica, cause=cause, reason=reason, last_lines=tail)


def quarantine(box: Appliance, name: str, replica: int, launch: int, reason: str) -> None:
    """Stop a replica for good: until somebody starts or restarts its instance."""
    tail = "\n".join(logs.tail(box.log_path(name, replica), LAST_LINES))
    why = f"{reason}. Last log lines:\n{tail}"[:LONGEST_REASON]
    with group_lock(box, name, wait=True):  # a start at the same moment comes before, or after and wins
        after = box.state.update(lambda before: state.quarantine(before, name, replica, launch, why))
        instance = after.instances.get(name)
        if instance is None or replica not in instance.quarantined:
            return  # deleted or started anew meanwhile
        box.supervisor.stop(name, f"{name}-{replica}")
    box.journal.record("quarantined", name, f'Replica {replica} of "{name}" is quarantined: {why}', replica=replica)


def keep_stopped(box: Appliance, name: str, replica: int) -> None:
    """A quarantined replica that runs: supervisord was started anew."""
    with group_lock(box, name, wait=True):
        instance = box.state.read().instances.get(name)
        if instance is not None and replica in instance.quarantined:
            box.supervisor.stop(name, f"{name}-{replica}")


def carried_out(box: Appliance, instance: Instance) -> dict[str, Any]:
    """The overview of an instance after supervisor was told of its change."""
    reconcile(box, {instance.name})
    return overview(box, instance)


def seed(box: Appliance) -> None:
    """Add the seeds of the configuration file that were never added before.

    With auto_restore_on_restart = false every start begins with nothing but the seeds.
    """
    if not box.settings.auto_restore_on_restart:
        box.state.update(lambda _: State())
    for spec in box.settings.instances:
        before = box.state.read()
        if spec.name in before.seeded:
            continue
        accepted(box, spec.mapping())
        change = partial(state.seed, spec=spec, settings=box.settings, busy=busy_ports(box, spec), now=now())
        box.state.update(change)
        if spec.name not in before.instances:
            message = f'Instance "{spec.name}" created from the configuration file'
            box.journal.record("created", spec.name, message, model=spec.model_id)


def accepted(box: Appliance, given: Any) -> InstanceSpec:
    """The validated spec, also against this machine: its GPUs and its engines."""
    spec = InstanceSpec.parse(given)
    program.refuse_missing_engine(spec.engine, box.settings)
    if spec.gpus:
        count = len(nvml.gpus())
        for gpu in spec.gpus:
            if gpu >= count:
                known = f"0 to {count - 1}" if count else "none: no NVIDIA driver answers"
                raise invalid(f"Invalid GPU ID {gpu}: this machine has {known}", "INVALID_GPU_ID")
    return spec


def busy_ports(box: Appliance, spec: InstanceSpec) -> frozenset[int]:
    return ports.busy(chain(*state.candidate_ports(spec, box.settings)), LOOPBACK)


# -- making supervisor match --------------------------------------------------------------------------------------


def reconcile(box: Appliance, names: Collection[str] | None = None) -> list[str]:
    """Make supervisor match the state file; returns the groups that were changed.

    names: wait for the work on these groups, also when another process is at it; groups of others that are being
    worked on are left to whoever does. None waits for all. Idempotent: a second run changes nothing.
    """
    done = []
    for group in sorted(apply_sections(box)):
        with group_lock(box, group, wait=names is None or group in names) as mine:
            # Whoever held the lock may have done the work: only what still differs is replaced.
            if mine and group in (difference := apply_sections(box)):
                replace(box, group, difference[group])
                done.append(group)
    return done


def apply_sections(box: Appliance) -> dict[str, str]:
    """Write the include file for the current state and ask supervisor what differs: group -> added|changed|removed.

    State is read, rendered, written and compared under one lock, so that an older rendering never follows a newer.
    """
    with FileLock(box.folder / "instances.conf.lock", timeout=30):
        write_sections(box)
        added, changed, removed = box.supervisor.difference()
    kinds = {"added": added, "changed": changed, "removed": removed}
    return {group: kind for kind, groups in kinds.items() for group in groups if group not in RESERVED_NAMES}


def write_sections(box: Appliance) -> None:
    path = box.folder / "instances.conf"
    current = box.state.update(lambda same: same)  # repairs an unreadable file on the way
    text = instances_conf(current, box.settings, sys.executable, box.box)
    if not path.exists() or path.read_bytes() != text.encode():
        write_durably(path, text)


def replace(box: Appliance, group: str, difference: str) -> None:
    if difference in ("changed", "removed"):
        box.supervisor.remove(group, box.settings.graceful_shutdown_timeout_secs + REPLACE_GRACE_SECS)
    if difference in ("changed", "added"):
        end_leftovers(box, group)
        box.supervisor.add(group)


@contextmanager
def group_lock(box: Appliance, group: str, wait: bool) -> Iterator[bool]:
    """The right to stop, remove and add one group. Yields False when another has it and ``wait`` is false."""
    folder = box.folder / "locks"
    folder.mkdir(exist_ok=True)
    stripe = int(hashlib.sha256(group.encode()).hexdigest(), 16) % LOCK_STRIPES
    longest = box.settings.graceful_shutdown_timeout_secs + 2 * REPLACE_GRACE_SECS
    lock = FileLock(folder / f"{stripe:02}.lock", timeout=longest if wait else 0)
    try:
        lock.acquire()
    except Timeout:
        if wait:
            raise Problem(
                Kind.UNAVAILABLE, "BACKEND_UNAVAILABLE", f'Another change of "{group}" takes longer than {longest} s'
            ) from None
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def end_leftovers(box: Appliance, group: str | None = None) -> list[str]:
    """End replicas that an earlier supervisord left behind, so that no replica ever has two processes.

    They are found by the marker in their environment, not by port: a port may be anybody's. group None: of all groups.
    Returns the markers of those that were ended.
    """
    known = {process.pid for process in box.supervisor.processes()} if box.supervisor.answers() else set()
    prefix = f"{box.box}:{group}:" if group else f"{box.box}:"
    found = list(processes.marked(MARKER, prefix, except_under=known))
    processes.end([process for process, _ in found], box.settings.graceful_shutdown_timeout_secs)
    for process, marker in found:
        name = marker.split(":")[1]
        box.journal.record("orphan_ended", name, f'Left-over process {process.pid} of "{name}" ended')
    return [marker for _, marker in found]


def end_orphans(box: Appliance) -> None:
    """End what carries our marker and is no child of the supervisord that runs now."""
    found = list(processes.marked(MARKER, f"{box.box}:", except_under={box.supervisor.pid()}))
    processes.end([process for process, _ in found], box.settings.graceful_shutdown_timeout_secs)
    for process, marker in found:
        name = marker.split(":")[1]
        box.journal.record("orphan_ended", name, f'Left-over process {process.pid} of "{name}" ended')


# -- looking ----------------------------------------------------------------------------------------------------------


def show(box: Appliance, name: str) -> dict[str, Any]:
    return overview(box, box.state.read().get(name))


def show_all(box: Appliance) -> list[dict[str, Any]]:
    """Every instance, sorted by name."""
    instances = box.state.read().instances.values()
    known = box.supervisor.processes() if instances else []
    with ThreadPoolExecutor(max_workers=16) as pool:
        return list(pool.map(lambda instance: overview(box, instance, known), instances))


def overview(box: Appliance, instance: Instance, known: list[status.Process] | None = None) -> dict[str, Any]:
    """CONTRACT section 3's response for one instance; every value is computed now."""
    known = box.supervisor.processes() if known is None else known
    table = {process.name: process for process in known if process.group == instance.name}
    replicas = [replica(box, instance, index, table) for index in range(instance.spec.replicas)]
    statuses = [entry["status"] for entry in replicas]
    first = next((entry for entry in replicas if entry["pid"]), replicas[0])
    checks = box.health.of(instance.name, instance.launch)
    return {
        **instance.spec.mapping(),
        "port": instance.ports[0],
        "prometheus_port": instance.prometheus_ports[0],
        "engine": program.engine_of(instance, box.settings),
        "startup_timeout_secs": program.startup_timeout(instance, box.settings),
        "status": status.instance_status(statuses),
        "pid": first["pid"],
        "created_at": instance.created_at,
        "uptime_secs": first["uptime_secs"],
        "restarts": instance.restarts,
        "health_check_failures": max((told["failures"] for told in checks), default=0),
        "last_health_check": max((told["checked_at"] for told in checks), default=None),
        "last_error": last_error(box, instance, replicas, table),
        "replicas_ready": statuses.count("running"),
        "replica_list": replicas,
    }


def replica(box: Appliance, instance: Instance, index: int, table: dict[str, status.Process]) -> dict[str, Any]:
    process = table.get(f"{instance.name}-{index}")
    answers = ports.answers(LOOPBACK, instance.ports[index]) if process and process.uptime is not None else False
    timeout = program.startup_timeout(instance, box.settings)
    uptime = process.uptime if process else None
    return {
        "index": index,
        "port": instance.ports[index],
        "prometheus_port": instance.prometheus_ports[index],
        "gpu_id": instance.spec.gpu_of(index),
        "pid": process.pid if process else None,
        "status": status.replica_status(
            instance.wanted,
            process,
            answers,
            timeout,
            withheld=index in instance.withheld,
            quarantined=index in instance.quarantined,
        ),
        "exit_status": process.exit_status if process else None,
        "uptime_secs": round(uptime, 3) if uptime is not None else None,
    }


def last_error(
    box: Appliance, instance: Instance, replicas: list[dict[str, Any]], table: dict[str, status.Process]
) -> str | None:
    """Why a replica is failed, unhealthy or keeps dying while it starts, with the last lines of its log."""
    for entry in replicas:
        index = entry["index"]
        if reason := instance.quarantined.get(index) or instance.withheld.get(index):
            return f"Replica {index}: {reason}"
        process = table.get(f"{instance.name}-{entry['index']}")
        if process is None or (entry["status"] != "failed" and process.state not in ("BACKOFF", "EXITED")):
            continue
        if process.state in status.ALIVE:
            reason = f"did not open port {entry['port']} within {program.startup_timeout(instance, box.settings)} s"
        else:
            reason = f"ended with exit status {process.exit_status}; {process.spawn_error}".rstrip("; ")
        tail = "\n".join(logs.tail(box.log_path(instance.name, entry["index"]), LAST_LINES))
        return f"Replica {entry['index']} {reason}. Last log lines:\n{tail}"
    return None


def log_window(box: Appliance, name: str, replica: int, start: int | None, end: int | None) -> dict[str, Any]:
    """A slice of the log lines of one replica; an instance that never wrote a line has an empty log."""
    instance = box.state.read().get(name)
    if not 0 <= replica < instance.spec.replicas:
        raise invalid(f'Replica {replica} does not exist: "{name}" has 0 to {instance.spec.replicas - 1}')
    found, first, last, total = logs.window(box.log_path(name, replica), start, end)
    return {"lines": found, "start": first, "end": last, "total_lines": total}


def health(box: Appliance) -> dict[str, Any]:
    """``degraded`` when supervisor or the state cannot be read, or an instance that shall run does not."""
    try:
        instances = show_all(box)
        running = sum(entry["status"] == "running" for entry in instances)
        failed = any(entry["status"] in ("failed", "unhealthy") for entry in instances)
        return {"status": "degraded" if failed else "healthy", "running": running, "total": len(instances)}
    except Problem as problem:
        return {"status": "degraded", "running": 0, "total": 0, "reason": problem.message}


def gpus() -> list[dict[str, Any]]:
    return [asdict(gpu) for gpu in nvml.gpus()]
