"""The verbs of the product. Each changes the state file with a pure function, then makes supervisor match.

The rename of the state file is the commit point of every verb. If a process dies after it, the next reconcile finishes
its work; if before, nothing happened.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from filelock import Timeout

from appliance.core import program, state
from appliance.core.events import Cause
from appliance.core.health import Seen
from appliance.core.instance import AUTO, InstanceSpec
from appliance.core.layout import replica_process
from appliance.core.model_names import refuse_leading_out
from appliance.core.placement import refuse_unknown
from appliance.core.problems import Kind, Problem
from appliance.core.program import LOOPBACK
from appliance.core.state import Instance, State
from appliance.core.status import ALIVE
from appliance.drivers import logs, nvml, ports
from appliance.drivers.listeners import Owner
from appliance.node import gpus, overview
from appliance.node.context import Node, now
from appliance.node.integrity import CACHE_FLAG, refuse_changed
from appliance.operations import supervision

LONGEST_REASON = 4000  # characters, in the state file


def create(node: Node, given: Any, dry_run: bool = False) -> dict[str, Any]:
    """Add an instance that shall run; returns its overview, at this moment ``starting``.

    dry_run: the same answers and refusals, and nothing is created.
    """
    spec = accepted(node, given)
    busy = busy_ports(node, spec)
    node.supervisor.require()

    def change(before: State) -> State:
        return state.add(before, spec, node.settings, busy, now(), gpus.placed(node, before, spec))

    if dry_run:
        return overview.of(node, change(node.state.read()).get(spec.name))
    after = node.state.update(change)
    made = after.get(spec.name)
    try:
        shown = carried_out(node, made)
    except (Problem, Timeout):  # whoever is refused finds nothing afterwards
        node.state.update(lambda before: state.forget(before, made))
        raise
    message = f'Instance "{spec.name}" created for model {spec.model_id}'
    node.journal.record("created", spec.name, message, model=spec.model_id)
    return shown


def delete(node: Node, name: str) -> dict[str, Any]:
    """Forget an instance and stop its processes; returns what it was."""
    node.supervisor.require()
    last = overview.show(node, name)
    node.state.update(lambda before: state.remove(before, name))
    node.journal.record("deleted", name, f'Instance "{name}" deleted')
    supervision.reconcile(node, {name})
    with supervision.group_lock(node, name, wait=True):
        if name not in node.state.read().instances:  # or it was created again meanwhile, and has these logs
            node.set_logs_aside(name, last["replicas"])
    gone = {"status": "stopped", "pid": None, "uptime_secs": None}
    return {**last, **gone, "replicas_ready": 0, "replica_list": [{**each, **gone} for each in last["replica_list"]]}


def start(node: Node, name: str) -> dict[str, Any]:
    """Let an instance run again; of one with sound replicas, only its quarantined ones, so that those stay.

    Raises: Problem ALREADY_RUNNING unless it is stopped or failed, or has such.
    """
    lifted: list[int] = []

    def change(before: State) -> State:
        lifted.clear()
        instance = before.get(name)
        refuse_running(node, instance)
        if instance.wanted == "running" and 0 < len(instance.quarantined) < instance.spec.replicas:
            lifted.extend(instance.quarantined)
            return state.lift(before, name)
        return state.start(before, name)

    refuse_changed_of(node, name)
    refuse_running(node, node.state.read().get(name))  # before a port of it is changed
    leave_taken_ports(node, name)
    with supervision.group_lock(node, name, wait=True):  # or `quarantine` could come between the two
        after = node.state.update(change)
        node.journal.record("started", name, f'Instance "{name}" started')
        for replica in lifted:
            longest = node.settings.graceful_shutdown_timeout_secs + supervision.REPLACE_GRACE_SECS
            node.supervisor.start(name, replica_process(name, replica), longest)
    return carried_out(node, after.get(name))


def refuse_running(node: Node, instance: Instance) -> None:
    """Raises: Problem ALREADY_RUNNING where a start would change nothing."""
    current = overview.of(node, instance)["status"]
    if instance.wanted == "running" and not instance.quarantined and current not in ("stopped", "failed"):
        raise Problem(
            Kind.CONFLICT, "ALREADY_RUNNING", f'Instance "{instance.name}" is {current}: use restart to start it anew'
        )


def stop(node: Node, name: str) -> dict[str, Any]:
    """Stop an instance until somebody starts it. Raises: Problem NOT_RUNNING when it is stopped already."""

    def change(before: State) -> State:
        if before.get(name).wanted == "stopped":
            raise Problem(Kind.CONFLICT, "NOT_RUNNING", f'Instance "{name}" is stopped already')
        return state.stop(before, name)

    node.supervisor.require()
    after = node.state.update(change)
    node.journal.record("stopped", name, f'Instance "{name}" stopped')
    return carried_out(node, after.get(name))


def restart(node: Node, name: str) -> dict[str, Any]:
    """Replace the processes of an instance by new ones; a stopped one is started."""
    node.supervisor.require()
    refuse_changed_of(node, name)
    leave_taken_ports(node, name)
    after = node.state.update(lambda before: state.restart(before, name))
    node.journal.record("restarted", name, f'Instance "{name}" restarted', cause="asked")
    return carried_out(node, after.get(name))


def withhold(node: Node, name: str, replica: int, launch: int, reason: str) -> None:
    """Take a replica out of routing."""
    after = node.state.update(lambda before: state.withhold(before, name, replica, launch, reason))
    if name not in after.instances or replica not in after.instances[name].withheld:
        return  # deleted or started anew meanwhile
    node.journal.record("unhealthy", name, f'Replica {replica} of "{name}" gets no traffic: {reason}', replica=replica)


def release(node: Node, name: str, replica: int) -> None:
    """Let a replica have traffic again."""
    node.state.update(lambda before: state.release(before, name, replica))
    node.journal.record("recovered", name, f'Replica {replica} of "{name}" answers again', replica=replica)


def leave_taken_ports(node: Node, name: str) -> None:
    """Other ports for replicas whose own somebody else listens on.

    Raises: Problem PORT_IN_USE, which names him, where the port was asked for.
    """
    instance = node.state.read().get(name)
    owners: dict[int, Owner] = {}
    for port in (*instance.ports, *instance.prometheus_ports):
        if owner := node.listeners.stranger(port, f"{node.id}:{name}:"):
            owners[port] = owner
    asked = [port for port in instance.ports if port in owners and instance.spec.port is not None]
    if asked:
        raise Problem(
            Kind.CONFLICT,
            "PORT_IN_USE",
            f'Port {asked[0]} of "{name}" is in use by {owners[asked[0]]}: end that, or delete the instance and create '
            "it with another port",
        )
    if not owners:
        return
    busy = busy_ports(node, replace(instance.spec, port=None, prometheus_port=None))
    after = node.state.update(lambda before: state.move(before, name, node.settings, owners, busy))
    moved = after.get(name)
    if (moved.ports, moved.prometheus_ports) != (instance.ports, instance.prometheus_ports):
        taken = "; ".join(f"{port} is in use by {owner}" for port, owner in owners.items())
        message = f'"{name}" listens on {", ".join(map(str, moved.ports))} from now on: port {taken}'
        node.journal.record("moved", name, message, ports=list(moved.ports))


def move(node: Node, name: str) -> None:
    """Let an instance whose port somebody else has taken go on with another one."""
    leave_taken_ports(node, name)
    supervision.reconcile(node, {name})


def note_death(node: Node, name: str, replica: int, launch: int, how: str) -> None:
    """A process of a replica has ended by itself; supervisord starts the next."""
    tail = logs.tail(node.log_path(name, replica), overview.LAST_LINES)
    node.state.update(lambda before: state.count_restart(before, name, launch))
    node.journal.record("died", name, f'Replica {replica} of "{name}" {how}', replica=replica, last_lines=tail)


def note_stop(node: Node, name: str, replica: int, launch: int) -> None:
    """An operator has stopped a replica with supervisorctl; what we do ourselves is told by whoever does it."""
    with supervision.group_lock(node, name, wait=False) as mine:
        instance = node.state.read().instances.get(name)
        current = node.supervisor.process(name, replica_process(name, replica)) if mine else None
        if instance is None or instance.wanted != "running" or replica in instance.quarantined:
            return
        if instance.launch == launch and current and current.state == "STOPPED":
            message = f'Replica {replica} of "{name}" was stopped with supervisorctl'
            node.journal.record("stopped", name, message, replica=replica)


def start_again(node: Node, name: str, replica: int) -> None:
    """A replica that supervisor gave up on because of a call that ended it again and again."""
    with supervision.group_lock(node, name, wait=False) as mine:
        if mine:
            node.supervisor.start(name, replica_process(name, replica), timeout=1)


def replace_process(node: Node, name: str, replica: int, launch: int, pid: int, cause: Cause, reason: str) -> None:
    """End one process of a replica, which supervisord then starts anew. It is killed: one that hangs hears no TERM."""
    tail = logs.tail(node.log_path(name, replica), overview.LAST_LINES)
    current = node.supervisor.process(name, replica_process(name, replica))
    if current is None or current.pid != pid:
        return  # it went by itself
    node.state.update(lambda before: state.count_restart(before, name, launch))
    node.supervisor.signal(name, replica_process(name, replica), "KILL")
    message = f'Replica {replica} of "{name}" restarted: {reason}'
    node.journal.record("restarted", name, message, replica=replica, cause=cause, reason=reason, last_lines=tail)


def quarantine(node: Node, name: str, replica: int, seen: Seen, reason: str) -> None:
    """Stop a replica for good: until somebody starts or restarts its instance. seen: what it is judged for."""
    tail = "\n".join(logs.tail(node.log_path(name, replica), overview.LAST_LINES))
    why = f"{reason}. Last log lines:\n{tail}"[:LONGEST_REASON]
    # A start at the same moment comes before, or after and wins. Whoever holds the lock may take half a minute, and
    # others have to be watched meanwhile: what still holds then is decided again.
    with supervision.group_lock(node, name, wait=False) as mine:
        if not mine or not still_runs(node, name, replica, seen):
            return
        after = node.state.update(lambda before: state.quarantine(before, name, replica, seen.launch, why))
        instance = after.instances.get(name)
        if instance is None or replica not in instance.quarantined:
            return  # deleted or started anew meanwhile
        node.supervisor.stop(name, replica_process(name, replica))
    node.journal.record("quarantined", name, f'Replica {replica} of "{name}" is quarantined: {why}', replica=replica)


def still_runs(node: Node, name: str, replica: int, seen: Seen) -> bool:
    """Whether supervisor runs what was seen, and not its successor; nor is about to, where a start has only changed the
    state so far. Under the lock of the group."""
    if name in supervision.apply_sections(node):
        return False
    current = node.supervisor.process(name, replica_process(name, replica))
    if current is None or (current.state == "FATAL") != (seen.state == "FATAL"):
        return False
    return seen.state not in ALIVE or current.pid == seen.pid


def keep_stopped(node: Node, name: str, replica: int) -> None:
    """A quarantined replica that runs: supervisord was started anew."""
    with supervision.group_lock(node, name, wait=False) as mine:
        instance = node.state.read().instances.get(name)
        if mine and instance is not None and replica in instance.quarantined:
            node.supervisor.stop(name, replica_process(name, replica))


def carried_out(node: Node, instance: Instance) -> dict[str, Any]:
    """The overview of an instance after supervisor was told of its change."""
    supervision.reconcile(node, {instance.name})
    return overview.of(node, instance)


def seed(node: Node) -> None:
    """Add the seeds of the configuration file that were never added before.

    With auto_restore_on_restart = false every start begins with nothing but the seeds.
    """
    if not node.settings.auto_restore_on_restart:
        node.state.update(lambda _: State())
    for spec in node.settings.instances:
        before = node.state.read()
        if spec.name in before.seeded:
            continue
        accepted(node, spec.mapping())
        busy, placed = busy_ports(node, spec), gpus.placed(node, before, spec)
        node.state.update(partial(state.seed, spec=spec, settings=node.settings, busy=busy, now=now(), placed=placed))
        if spec.name not in before.instances:
            message = f'Instance "{spec.name}" created from the configuration file'
            node.journal.record("created", spec.name, message, model=spec.model_id)


def accepted(node: Node, given: Any) -> InstanceSpec:
    """The validated spec, also against this machine: its GPUs and its engines."""
    spec = InstanceSpec.parse(given)
    refuse_leading_out(spec.revision)
    refuse_changed_files(node, spec)
    program.refuse_missing_engine(spec.engine, node.settings)
    if spec.gpus or spec.gpu_ids == AUTO:
        refuse_unknown(spec, nvml.devices())
    return spec


def refuse_changed_of(node: Node, name: str) -> None:
    refuse_changed_files(node, node.state.read().get(name).spec)


def refuse_changed_files(node: Node, spec: InstanceSpec) -> None:
    refuse_changed(node.settings.data_dir, spec.model_id, spec.revision, spec.flag(CACHE_FLAG))


def busy_ports(node: Node, spec: InstanceSpec) -> frozenset[int]:
    return ports.busy(chain(*state.candidate_ports(spec, node.settings)), LOOPBACK)
