"""When an instance that is on its way will answer: what status says of it, and what its load took before."""

from __future__ import annotations

from typing import NamedTuple

from appliance.core.state import Instance
from appliance.node import overview
from appliance.node.context import Node

ARRIVING = ("starting", "running", "stopping", "sleeping")  # of one that is offered: to a caller it is on its way


class Outlook(NamedTuple):
    """left_secs: until it answers, by the measured load of its model; None where that was never measured."""

    status: str
    left_secs: float | None

    @property
    def is_arriving(self) -> bool:
        return self.status in ARRIVING


def outlook_of(node: Node, instance: Instance) -> Outlook:
    """Raises: Problem when supervisord does not answer."""
    view = overview.view_of(node, instance)
    if view.load_secs is None:
        return Outlook(view.status, None)
    ages = [replica.uptime_secs for replica in view.replicas if replica.status == "starting" and replica.uptime_secs]
    left_secs = view.load_secs - max(ages, default=0)
    return Outlook(view.status, left_secs if left_secs > 0 else None)  # overdue: nobody knows
