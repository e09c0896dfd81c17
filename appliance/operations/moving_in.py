"""Taking over the state file of tei-manager, once, before anything is started; its original is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from appliance.core import moving_in, state
from appliance.core.events import Event
from appliance.core.moving_in import MovedInstance
from appliance.core.problems import Problem, invalid
from appliance.core.state import State
from appliance.drivers import statefile
from appliance.node.context import Node, now
from appliance.operations.instances import busy_ports


def move_in(node: Node, say: Callable[[str], None]) -> None:
    """Make our state of tei-manager's, where that is what the state file is, or where there is none of ours and its own
    is in the data folder.

    Raises: Problem that names what of it cannot be taken over; then nothing was changed.
    """
    path = node.state.path
    default = node.folder / moving_in.DEFAULT_STATE
    source = default if not path.exists() and not node.state.good.exists() else path
    table = statefile.foreign_table(source)
    if table is None:
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
            "changed; change it there, and start again",
            problem.code,
        ) from problem
    original = node.state.take_over(moved, source)
    names = ", ".join(moved.instances) or "none"
    message = f"{len(moved.instances)} instances of tei-manager were taken over ({names}); its state file is {original}"
    node.journal.record(Event.MOVED_IN, None, message)
    say(message)


def taken_over(node: Node, instances: list[MovedInstance]) -> State:
    """The state with these instances, which all shall run. The seeds of the configuration count as added: tei-manager
    does not add them either where it restores its state."""
    moved = State(seeded=frozenset(spec.name for spec in node.settings.instances))
    for spec, created_at in instances:
        moved = state.add(moved, spec, node.settings, busy_ports(node, spec), created_at or now())
    return replace(moved, generation=1)
