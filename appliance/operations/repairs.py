"""What the monitor does about replicas that die, hang, answer wrongly, or find their port taken."""

from __future__ import annotations

from functools import partial

from appliance.core import state
from appliance.core.events import Cause, Event
from appliance.core.health import Look
from appliance.core.layout import replica_process
from appliance.core.status import ALIVE
from appliance.node import overview
from appliance.node.context import Node
from appliance.operations import instances, supervision

LONGEST_REASON = 4000  # characters, in the state file


def eject(node: Node, name: str, replica: int, launch: int, reason: str) -> None:
    """Take a replica out of routing."""
    ejected = partial(state.eject, name=name, replica=replica, launch=launch, reason=reason)
    instance = node.state.update(ejected).after.instances.get(name)
    if instance is None or replica not in instance.ejected:
        return  # deleted or started anew meanwhile
    message = f'Replica {replica} of "{name}" gets no traffic: {reason}'
    node.journal.record(Event.UNHEALTHY, name, message, replica=replica)


def readmit(node: Node, name: str, replica: int) -> None:
    """Let a replica have traffic again."""
    node.state.update(partial(state.readmit, name=name, replica=replica))
    node.journal.record(Event.RECOVERED, name, f'Replica {replica} of "{name}" answers again', replica=replica)


def move(node: Node, name: str) -> None:
    """Let an instance whose port another program has taken go on with another port."""
    instances.leave_taken_ports(node, name)
    supervision.reconcile(node, {name})


def note_death(node: Node, name: str, replica: int, launch: int, how: str) -> None:
    """A process of a replica has ended by itself; supervisord starts the next."""
    tail = overview.last_lines(node, name, replica)
    node.state.update(partial(state.count_restart, name=name, launch=launch))
    node.journal.record(Event.DIED, name, f'Replica {replica} of "{name}" {how}', replica=replica, last_lines=tail)


def note_stop(node: Node, name: str, replica: int, launch: int) -> None:
    """An operator has stopped a replica with supervisorctl. A verb journals its own stop."""
    with supervision.group_lock(node, name, wait=False) as mine:
        instance = node.state.read().instances.get(name)
        current = node.supervisor.process(name, replica_process(name, replica)) if mine else None
        if instance is None or instance.wanted != "running" or replica in instance.quarantined:
            return
        if instance.launch == launch and current and current.state == "STOPPED":
            message = f'Replica {replica} of "{name}" was stopped with supervisorctl'
            node.journal.record(Event.STOPPED, name, message, replica=replica)


def start_again(node: Node, name: str, replica: int) -> None:
    """A replica that supervisor gave up on because of a call that ended it again and again."""
    with supervision.group_lock(node, name, wait=False) as mine:
        if mine:
            node.supervisor.start(name, replica_process(name, replica), timeout=1)


def replace_process(node: Node, name: str, replica: int, launch: int, pid: int, cause: Cause, reason: str) -> None:
    """End one process of a replica, which supervisord then starts anew. It is killed: one that hangs hears no TERM."""
    tail = overview.last_lines(node, name, replica)
    current = node.supervisor.process(name, replica_process(name, replica))
    if current is None or current.pid != pid:
        return  # it went by itself
    node.state.update(partial(state.count_restart, name=name, launch=launch))
    node.supervisor.signal(name, replica_process(name, replica), "KILL")
    message = f'Replica {replica} of "{name}" restarted: {reason}'
    node.journal.record(Event.RESTARTED, name, message, replica=replica, cause=cause, reason=reason, last_lines=tail)


def quarantine(node: Node, name: str, replica: int, look: Look, reason: str) -> None:
    """Stop a replica until its instance is started or restarted. look: what it is judged for."""
    tail = "\n".join(overview.last_lines(node, name, replica))
    why = f"{reason}. Last log lines:\n{tail}"[:LONGEST_REASON]
    # A start at the same moment comes before, or after and wins. The holder of the lock may take half a minute, and
    # other replicas have to be watched meanwhile: what still holds then is decided again.
    with supervision.group_lock(node, name, wait=False) as mine:
        if not mine or not still_runs(node, name, replica, look):
            return
        quarantined = partial(state.quarantine, name=name, replica=replica, launch=look.launch, reason=why)
        instance = node.state.update(quarantined).after.instances.get(name)
        if instance is None or replica not in instance.quarantined:
            return  # deleted or started anew meanwhile
        node.supervisor.stop(name, replica_process(name, replica))
    node.journal.record(
        Event.QUARANTINED, name, f'Replica {replica} of "{name}" is quarantined: {why}', replica=replica
    )


def still_runs(node: Node, name: str, replica: int, look: Look) -> bool:
    """Whether supervisor runs the process of the look. It does not when it runs a successor, nor when a start has
    changed the state and will replace the process. Under the lock of the group."""
    if supervision.differs(node, name):
        return False
    current = node.supervisor.process(name, replica_process(name, replica))
    if current is None or (current.state == "FATAL") != (look.state == "FATAL"):
        return False
    return look.state not in ALIVE or current.pid == look.pid


def keep_stopped(node: Node, name: str, replica: int) -> None:
    """A quarantined replica that runs: supervisord was started anew."""
    with supervision.group_lock(node, name, wait=False) as mine:
        instance = node.state.read().instances.get(name)
        if mine and instance is not None and replica in instance.quarantined:
            node.supervisor.stop(name, replica_process(name, replica))
