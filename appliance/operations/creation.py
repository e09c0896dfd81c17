"""What becomes of an instance that was created and could not be started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from appliance.core import state
from appliance.core.problems import Problem, quoted
from appliance.core.state import Instance
from appliance.node.context import Node


@contextmanager
def taken_back(node: Node, created: Instance) -> Iterator[None]:
    """Whoever is refused finds nothing afterwards. Raises: what the block raises; where the instance cannot be taken
    back, a Problem that says so."""
    try:
        yield
    except (Problem, OSError) as error:
        try:
            node.state.update(partial(state.forget, created=created))
        except Problem as problem:
            words = f"{quoted(created.name)} is created, and could not be started: {error}. Nor can it be taken back"
            message = f"{words}: {problem.message}. Start it (POST /instances/{created.name}/start) or delete it"
            raise Problem(problem.kind, "NOT_TAKEN_BACK", message) from error
        raise
