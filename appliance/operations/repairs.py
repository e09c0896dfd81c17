"""What the monitor does about replicas that die, hang, answer wrongly, or find their port taken."""

from __future__ import annotations

import logging
from functools import partial

from appliance.core import repairs
from appliance.core.events import Cause, Event
from appliance.core.health import Look
from appliance.core.problems import Problem
from appliance.core.state import Instance
from appliance.core.status import ALIVE
from appliance.node import overview
from appliance.node.context import Node
from appliance.operations import instances, supervision

log = logging.getLogger(__name__)
LONGEST_REASON = 4000  # characters, in the state file


def eject(node: Node, instance: Instance, replica: int, reason: str) -> None:
    """Take a replica out of routing."""
    name, launch = instance.name, instance.launch
    ejected = partial(repairs.eject, name=name, replica=replica, launch=launch, reason=reason)
    after = node.state.update(ejected).after.of_launch(name, launch)
    if after is None or replica not in after.ejected:
        return  # deleted or started anew meanwhile
    message = f"{described(instance, replica)} gets no traffic: {reason}"
    node.journal.record(Event.UNHEALTHY, name, message, replica=replica)


def readmit(node: Node, instance: Instance, replica: int) -> None:
    """Let a replica have traffic again."""
    node.state.update(partial(repairs.readmit, name=instance.name, replica=replica, launch=instance.launch))
    message = f"{described(instance, replica)} answers again"
    node.journal.record(Event.RECOVERED, instance.name, message, replica=replica)


def move(node: Node, name: str) -> None:
    """Let an instance whose port another program has taken go on with another port."""
    instances.leave_taken_ports(node, name)
    supervision.reconcile(node, {name})


def note_death(node: Node, instance: Instance, replica: int, how: str) -> None:
    """A process of a replica has ended by itself; supervisord starts the next."""
    name, tail = instance.name, overview.last_lines(node, instance, replica)
    count_restart(node, instance)
    message = f"{described(instance, replica)} {how}"
    node.journal.record(Event.DIED, name, message, replica=replica, last_lines=tail)


def note_stop(node: Node, instance: Instance, replica: int) -> None:
    """An operator has stopped a replica with supervisorctl. A verb journals its own stop."""
    name = instance.name
    with supervision.group_lock(node, name, wait=False) as mine:
        now = node.state.read().of_launch(name, instance.launch)
        current = node.supervisor.process(name, instance.process(replica)) if mine else None
        if now is None or now.wanted != "running" or replica in now.quarantined:
            return
        if current and current.state == "STOPPED":
            message = f"{described(instance, replica)} was stopped with supervisorctl"
            node.journal.record(Event.STOPPED, name, message, replica=replica)


def start_again(node: Node, instance: Instance, replica: int) -> None:
    """A replica that supervisor gave up on because of a call that ended it again and again."""
    with supervision.group_lock(node, instance.name, wait=False) as mine:
        if mine:
            node.supervisor.start(instance.name, instance.process(replica), timeout=1)


def replace_process(node: Node, instance: Instance, replica: int, pid: int, cause: Cause, reason: str) -> None:
    """End one process of a replica, which supervisord then starts anew. It is killed: one that hangs hears no TERM."""
    name, process = instance.name, instance.process(replica)
    tail = overview.last_lines(node, instance, replica)
    current = node.supervisor.process(name, process)
    if current is None or current.pid != pid:
        return  # it went by itself
    node.supervisor.signal(name, process, "KILL")
    count_restart(node, instance)
    message = f"{described(instance, replica)} restarted: {reason}"
    node.journal.record(Event.RESTARTED, name, message, replica=replica, cause=cause, reason=reason, last_lines=tail)


def count_restart(node: Node, instance: Instance) -> None:
    """For the overview. A disk that is full keeps nobody from what was counted."""
    try:
        node.state.update(partial(repairs.count_restart, name=instance.name, launch=instance.launch))
    except Problem as problem:
        log.error('A restart of "%s" is not counted: %s', instance.name, problem.message)


def quarantine(node: Node, instance: Instance, replica: int, look: Look, reason: str) -> None:
    """Stop a replica until its instance is started or restarted. look: what it is judged for."""
    name = instance.name
    why = with_last_lines(node, instance, replica, reason)
    # A start at the same moment comes before, or after and wins. The holder of the lock may take half a minute, and
    # other replicas have to be watched meanwhile: what still holds then is decided again.
    with supervision.group_lock(node, name, wait=False) as mine:
        if not mine or not still_runs(node, instance, replica, look):
            return
        quarantined = partial(repairs.quarantine, name=name, replica=replica, launch=look.launch, reason=why)
        try:
            after = node.state.update(quarantined).after.of_launch(name, look.launch)
        except Problem:  # a full disk: better one that was stopped without a reason than wrong answers
            node.supervisor.stop(name, instance.process(replica))
            raise
        if after is None or replica not in after.quarantined:
            return  # deleted or started anew meanwhile
        node.supervisor.stop(name, instance.process(replica))
    message = f"{described(instance, replica)} is quarantined: {why}"
    node.journal.record(Event.QUARANTINED, name, message, replica=replica)


def with_last_lines(node: Node, instance: Instance, replica: int, reason: str) -> str:
    tail = "\n".join(overview.last_lines(node, instance, replica))
    return f"{reason}. Last log lines:\n{tail}"[:LONGEST_REASON]


def still_runs(node: Node, instance: Instance, replica: int, look: Look) -> bool:
    """Whether supervisor runs the process of the look. It does not when it runs a successor, nor when a start has
    changed the state and will replace the process. Under the lock of the group."""
    if supervision.differs(node, instance.name):
        return False
    current = node.supervisor.process(instance.name, instance.process(replica))
    if current is None or (current.state == "FATAL") != (look.state == "FATAL"):
        return False
    return look.state not in ALIVE or current.pid == look.pid


def keep_stopped(node: Node, instance: Instance, replica: int) -> None:
    """A quarantined replica that runs: supervisord was started anew."""
    with supervision.group_lock(node, instance.name, wait=False) as mine:
        now = node.state.read().of_launch(instance.name, instance.launch)
        if mine and now is not None and replica in now.quarantined:
            node.supervisor.stop(instance.name, instance.process(replica))


def described(instance: Instance, replica: int) -> str:
    """A replica, at the beginning of a message."""
    return f'Replica {replica} of "{instance.stem}"'
