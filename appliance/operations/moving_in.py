"""Taking over the state file of tei-manager, once, before anything is started; its original is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from appliance.core import moving_in, state
from appliance.core.events import Event
from appliance.core.instance import InstanceSpec
from appliance.core.moving_in import MovedInstance
from appliance.core.problems import Kind, Problem, invalid
from appliance.core.state import State
from appliance.drivers import statefile
from appliance.node.context import Node, now
from appliance.operations.instances import busy_ports


def source_of(node: Node) -> Path:
    """The state file, or tei-manager's in the data folder where there is none of ours."""
    default = node.folder / moving_in.DEFAULT_STATE
    ours = node.state.path.exists() or node.state.good.exists()
    return node.state.path if ours or not default.exists() else default


def is_foreign(node: Node) -> bool:
    """Whether the state file itself is tei-manager's, which nobody else can read."""
    return statefile.foreign_table(node.state.path) is not None


def move_in(node: Node, say: Callable[[str], None]) -> None:
    """Make our state of tei-manager's, where that is what the state file is, or where there is none of ours and its own
    is in the data folder.

    Raises: Problem that names what of it cannot be taken over; then nothing was changed.
    """
    path, source = node.state.path, source_of(node)
    table = statefile.foreign_table(source)
    if table is None:
        return
    if not node.settings.auto_restore_on_restart:
        kept = node.state.take_over(State(generation=1), source) if source == path else source
        say(f"auto_restore_on_restart is false: the instances of tei-manager are not restored, and are kept in {kept}")
        return
    if source == path and node.state.good.exists():
        raise invalid(
            f"{path} is the state file of tei-manager, and {node.state.good.name} beside it is a good copy of this "
            "appliance's own: remove the one that you do not want"
        )
    try:
        moved = taken_over(node, moving_in.instances_of(table))
    except Problem as problem:
        raise invalid(
            f"{source} is the state file of tei-manager, and cannot be taken over: {problem.message}. Nothing was "
            "changed; mend that, and start again",
            problem.code,
        ) from problem
    original = node.state.take_over(moved, source)
    names = ", ".join(moved.instances) or "none"
    others = [name for name, each in moved.instances.items() if each.spec.prometheus_port is None]
    message = (
        f"{len(moved.instances)} instances of tei-manager were taken over ({names}); its state file is {original}. Our "
        f"listeners are on {node.settings.bind} (`bind`), its were on 0.0.0.0"
    )
    if others:
        message += (
            f". These get new metrics ports, because none was asked for or another one has it: {', '.join(others)}"
        )
    node.journal.record(Event.MOVED_IN, None, message)
    say(message)


def refuse_strangers(node: Node, spec: InstanceSpec) -> None:
    """Raises: Problem PORT_IN_USE that names who listens on a port of an instance."""
    if spec.port is not None and (owner := node.listeners.stranger(spec.port, f"{node.id}:{spec.name}:")):
        raise Problem(
            Kind.CONFLICT,
            "PORT_IN_USE",
            f'port {spec.port} of "{spec.name}" is in use by {owner}. tei-manager may have left it running, or runs '
            "itself: end that",
        )


def taken_over(node: Node, instances: list[MovedInstance]) -> State:
    """The state with these instances, which all shall run. The seeds of the configuration count as added: tei-manager
    does not add them either where it restores its state."""
    moved = State(seeded=frozenset(spec.name for spec in node.settings.instances))
    for spec, created_at in instances:
        refuse_strangers(node, spec)
        free = with_free_metrics_port(spec, moved)
        moved = state.add(moved, free, node.settings, busy_ports(node, free), created_at or now())
    return replace(moved, generation=1)


def with_free_metrics_port(spec: InstanceSpec, moved: State) -> InstanceSpec:
    """tei-manager lets two instances have one metrics port, of which one then has none: that one gets a new port."""
    taken = {port for other in moved.instances.values() for port in (*other.ports, *other.prometheus_ports)}
    return replace(spec, prometheus_port=None) if spec.prometheus_port in taken else spec
