"""What this appliance tells its peers: its own instances, as a listing without addresses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from appliance.core.cachekey import Fingerprint
from appliance.core.instance import InstanceSpec
from appliance.core.listing import Listed, Listing
from appliance.core.program import engine_of
from appliance.core.settings import Settings
from appliance.core.state import Instance, State

MOST_CALLS = 1_000_000  # the largest `max_concurrent_requests`


def own_listing(
    state: State,
    settings: Settings,
    fingerprint: Callable[[str], Fingerprint | None],
    task: Callable[[str], str | None],
) -> Listing:
    """Those that answer calls, one that sleeps included. To a peer this appliance is one replica, which takes what all
    its replicas take.

    fingerprint, task: of an instance by its name, as far as they are known.
    """
    offered = [instance for instance in state.instances.values() if instance.is_offered]
    return tuple(
        Listed(spec_of(each, settings), addresses=(), task=task(each.name), fingerprint=fingerprint(each.name))
        for each in offered
    )


def spec_of(instance: Instance, settings: Settings) -> InstanceSpec:
    spec = instance.spec
    capacity = min(MOST_CALLS, spec.max_concurrent_requests * len(instance.ports))
    # Here it is the default of calls that name nobody; over there it is none.
    return replace(spec, engine=engine_of(instance, settings), max_concurrent_requests=capacity, default=False)
