"""Instances that were replaced by what does not work: what they were before comes back."""

from __future__ import annotations

import logging

from filelock import Timeout

from appliance.core.problems import Problem
from appliance.core.state import Instance
from appliance.node.context import Node
from appliance.operations import replacement

log = logging.getLogger(__name__)


def fall_back(node: Node, instance: Instance, reason: str) -> None:
    """Beside the looks: processes have to end for it."""
    try:
        replacement.fall_back(node, instance.name, instance.launch, reason)
    except (Problem, Timeout) as problem:
        log.error('Could not bring back what "%s" was before: %s', instance.name, problem)
