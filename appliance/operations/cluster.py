"""The verbs of the product where instances run on a cluster of Ray Serve, whose head this machine is.

The state file says what is wanted, as on one machine; its rename is the commit point. What follows is one request to
Serve with all that is wanted: Serve starts, replaces and ends replicas. The monitor repeats it while the two differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from appliance.core import cluster, state
from appliance.core.events import Event
from appliance.core.fields import required_object
from appliance.core.instance import InstanceSpec
from appliance.core.model_names import refuse_leading_out
from appliance.core.problems import Kind, Problem, invalid
from appliance.core.settings import Settings
from appliance.core.state import Instance, State
from appliance.core.views import InstanceView
from appliance.drivers.statefile import Update
from appliance.export import ray
from appliance.node import cluster as sights
from appliance.node.context import Node, now
from appliance.operations import supervision
from appliance.operations.creation import taken_back

LOCK_SECS = 30
DECIDES_VECTORS = frozenset({"model_id", "revision", "pooling", "dtype", "engine", "extra_args"})


def create(node: Node, body: Any, dry_run: bool = False) -> InstanceView:
    """As `instances.create`."""
    spec = validated(body)
    sight = sights.look(node)
    add = partial(added, spec=spec, settings=node.settings, created_at=now())
    if dry_run:
        return sights.view_of(node, add(node.state.read()).get(spec.name), sight)
    created = node.state.update(add).after.get(spec.name)
    with taken_back(node, created):
        deploy(node)
    message = f'Instance "{spec.name}" created for model {spec.model_id}'
    node.journal.record(Event.CREATED, spec.name, message, model=spec.model_id)
    return sights.view_of(node, created, sights.look(node))


def seed(node: Node) -> None:
    """Add the seeds of the configuration file that were never added before; the monitor deploys them.

    What ran on this machine before runs on the cluster from now on.
    """
    node.state.update(cluster.without_machine)
    for spec in node.settings.instances:
        if spec.name not in node.state.read().seeded:
            validated(spec.mapping())
            node.state.update(partial(seeded, spec=spec, settings=node.settings, created_at=now()))


def seeded(before: State, spec: InstanceSpec, settings: Settings, created_at: str) -> State:
    marked = replace(before, seeded=before.seeded | {spec.name})
    return marked if spec.name in before.instances else added(marked, spec, settings, created_at)


def added(before: State, spec: InstanceSpec, settings: Settings, created_at: str) -> State:
    """It has no ports of this machine. Raises: Problem as `state.add`."""
    state.refuse_new(before, spec, settings)
    return state.with_instance(before, Instance(spec, ports=(), prometheus_ports=(), created_at=created_at))


def set_fields(node: Node, name: str, body: Any, whole: bool, dry_run: bool = False) -> InstanceView:
    """Other values for fields of an instance; Serve replaces its replicas one after the other where that needs it.

    whole: fields that are left out get their defaults.
    """
    sight = sights.look(node)
    changing = partial(changed, name=name, body=body, whole=whole)
    after = changing(node.state.read()).get(name)
    if dry_run or after == node.state.read().get(name):
        return sights.view_of(node, after, sight)
    return carried_out(node, name, changing, Event.CHANGED, f'Instance "{name}" changed')


def changed(before: State, name: str, body: Any, whole: bool) -> State:
    given = required_object(body, "A change must be an object with the fields that change")
    instance = before.get(name)
    if given.get("name", name) != name:
        raise invalid('Field "name" cannot change: create another instance')
    kept = {"model_id": instance.spec.model_id} if whole else instance.spec.mapping()
    spec = validated({**kept, **given, "name": name})
    if decisive := sorted(instance.spec.differences(spec).intersection(DECIDES_VECTORS)):
        raise cluster.one_machine_only(
            f'A change of "{decisive[0]}"',
            "its old and new replicas would answer beside each other, with vectors that do not go together; create "
            "another instance, and let the callers change",
        )
    state.refuse_taken_names(before, spec)
    return state.with_instance(before, replace(instance, spec=spec))


def delete(node: Node, name: str) -> InstanceView:
    """As `instances.delete`."""
    last = sights.view_of(node, node.state.read().get(name), sights.look(node))
    deploy_change(node, name, partial(state.remove, name=name))
    node.journal.record(Event.DELETED, name, f'Instance "{name}" deleted')
    return last.gone()


def start(node: Node, name: str) -> InstanceView:
    """As `instances.start`; one that has failed is deployed anew."""
    view = sights.view_of(node, node.state.read().get(name), sights.look(node))
    if view.instance.wanted == "running" and view.status != "failed":
        raise Problem(
            Kind.CONFLICT, "ALREADY_RUNNING", f'Instance "{name}" is {view.status}: use restart to start it anew'
        )
    return carried_out(node, name, partial(state.start, name=name), Event.STARTED, f'Instance "{name}" started')


def stop(node: Node, name: str) -> InstanceView:
    """As `instances.stop`."""
    if not node.state.read().get(name).is_offered:
        raise Problem(Kind.CONFLICT, "NOT_RUNNING", f'Instance "{name}" is stopped already')
    return carried_out(node, name, partial(state.stop, name=name), Event.STOPPED, f'Instance "{name}" stopped')


def restart(node: Node, name: str) -> InstanceView:
    """New replicas in the place of the present ones, one after the other."""
    words = f'Instance "{name}" restarted'
    return carried_out(node, name, partial(state.restart, name=name), Event.RESTARTED, words)


def carried_out(node: Node, name: str, change: Callable[[State], State], event: Event, words: str) -> InstanceView:
    """Change what is wanted, and deploy it. Raises: Problem; CLUSTER_UNAVAILABLE before anything is changed."""
    sights.look(node)
    after = deploy_change(node, name, change).after.get(name)
    node.journal.record(event, name, words)
    return sights.view_of(node, after, sights.look(node))


def deploy_change(node: Node, name: str, change: Callable[[State], State]) -> Update[State]:
    """Change an instance, and deploy it. What Serve refuses is as it was: else it would refuse every later change, too.

    Raises: Problem.
    """
    update = node.state.update(change)
    try:
        deploy(node)
    except Problem as problem:
        if problem.code == "CLUSTER_REFUSES":
            node.state.update(partial(put_back, name=name, update=update))
        raise
    return update


def put_back(now_: State, name: str, update: Update[State]) -> State:
    """The state with an instance as it was before an update, unless somebody has changed it since."""
    before, after = update.before.instances.get(name), update.after.instances.get(name)
    if before is None or now_.instances.get(name) != after:
        return now_
    return state.with_instance(now_, before)


def deploy(node: Node) -> None:
    """Let Serve run what the state wants. Raises: Problem.

    The state is read and sent under one lock, so that an older one never follows a newer.
    """
    words = f"Another deployment takes longer than {LOCK_SECS} s"
    taken = Problem(Kind.UNAVAILABLE, "CLUSTER_UNAVAILABLE", words)
    with supervision.file_lock(f"{node.layout.listing}.lock", LOCK_SECS, taken):
        instances = list(node.state.read().instances.values())
        sights.serve_api(node.settings).deploy(ray.configuration(instances, node.settings))


def is_deployed(node: Node, sight: sights.ClusterSight) -> bool:
    """Whether Serve has what the state wants."""
    wanted = ray.configuration(list(node.state.read().instances.values()), node.settings)
    return not cluster.differs(wanted, sight.applications)


def validated(body: Any) -> InstanceSpec:
    """The spec, valid also on a cluster. Whether a machine there can serve it is seen when a replica starts."""
    spec = InstanceSpec.parse(body)
    refuse_leading_out(spec.revision)
    cluster.refuse_unsupported(spec)
    return spec
