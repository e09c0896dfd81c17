"""The verbs of the product. Each changes the state file with a pure function, then makes supervisor match.

The rename of the state file is the commit point of every verb. If a process dies after it, the next reconcile finishes
its work; if before, nothing happened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, reduce
from itertools import chain
from typing import Any

from appliance.core import generations, placement, port_choice, program, state, status
from appliance.core.cluster import refuse_without_cluster, with_ports
from appliance.core.events import Event
from appliance.core.instance import AUTO, Gpu, InstanceSpec
from appliance.core.model_names import refuse_leading_out
from appliance.core.placement import Occupancy
from appliance.core.problems import Kind, Problem
from appliance.core.program import LOOPBACK
from appliance.core.settings import Settings
from appliance.core.state import Instance, State
from appliance.core.status import Sighting
from appliance.core.views import InstanceView
from appliance.drivers import nvml, ports
from appliance.drivers.listeners import Owner
from appliance.node import directory, express, gpus, overview
from appliance.node import tei_binary as tei
from appliance.node.context import Node, now
from appliance.node.integrity import CACHE_FLAG, refuse_changed
from appliance.operations import cluster, models, room, supervision, supply
from appliance.operations.creation import taken_back


def create(node: Node, body: Any, dry_run: bool = False) -> InstanceView:
    """Add an instance that shall run; returns its overview, at this moment ``starting``.

    dry_run: the same answers and refusals, and nothing is created.
    """
    if node.settings.is_cluster_head:
        return cluster.create(node, body, dry_run)
    directory.refuse_listed(node.settings)
    spec = validated(node, body)
    node.supervisor.require()
    before = node.state.read()
    lacking = supply.lacks_model(node, spec)
    add = addition(node, before, spec, partial(state.add, lacks_model=lacking))
    if dry_run:
        would_be = add(before).get(spec.name)
        if would_be.wanted == "running":
            room.refuse_without(node, would_be)
        return overview.view_of(node, would_be, downloading=lacking)
    made = nullcontext() if spec.is_on_demand else room.made_for(node, add(before).get(spec.name))
    with made, models.files_held(node):
        supervision.set_stale_logs_aside(node, spec.name)
        lacking = supply.lacks_model(node, spec)  # making room took its time
        add = addition(node, before, spec, partial(state.add, lacks_model=lacking))
        created = node.state.update(add).after.get(spec.name)
    with taken_back(node, created):
        if lacking:
            supply.fetch(node, spec)
        view = carried_out(node, created)
    message = f'Instance "{spec.name}" created for model {spec.model_id}'
    node.journal.record(Event.CREATED, spec.name, message, model=spec.model_id)
    return view


SPARE_PORTS = 64  # of each range: so many others may take while an instance is created
Add = Callable[[State, InstanceSpec, Settings, Collection[int], str, tuple[Gpu, ...]], State]  # see `state.add`


def addition(
    node: Node, before: State, spec: InstanceSpec, add: Add, spare_ports: int = SPARE_PORTS
) -> Callable[[State], State]:
    """The change that adds an instance, with what it has to know of the machine. add: `state.add` or `state.seed`.
    spare_ports: as many others may take until then."""
    occupancy = gpus.occupancy(node, before, spec)
    busy = ports_not_free(node, before, spec, spare_ports)
    return partial(add_placed, add=add, spec=spec, settings=node.settings, busy=busy, now=now(), occupancy=occupancy)


def add_placed(
    before: State,
    add: Add,
    spec: InstanceSpec,
    settings: Settings,
    busy: Collection[int],
    now: str,
    occupancy: Occupancy,
) -> State:
    """The GPUs are chosen here, beside the instances that there are when the state is changed."""
    placed = placement.place_beside(before.generations, spec, occupancy)
    return add(before, spec, settings, busy, now, placed)


def change(node: Node, name: str, body: Any, dry_run: bool = False) -> InstanceView:
    """Give fields of an instance other values; its processes stay. dry_run: the same answers, and nothing changes."""
    node.supervisor.require()
    changing = partial(generations.change, name=name, body=body)
    before = node.state.read()
    after = changing(before).get(name)
    if after.spec.express and not before.get(name).spec.express:
        express.refuse_missing(node.settings)
    if dry_run or after == before.get(name):
        return overview.view_of(node, after)
    change = node.state.update(changing)
    changed = change.after.get(name)
    fields = sorted(changed.spec.differences(change.before.get(name).spec))
    node.journal.record(Event.CHANGED, name, f'Instance "{name}" changed: {", ".join(fields)}')
    return carried_out(node, changed)


def delete(node: Node, name: str) -> InstanceView:
    """Forget an instance and stop its processes; returns what it was."""
    if node.settings.is_cluster_head:
        return cluster.delete(node, name)
    node.supervisor.require()
    last = overview.show(node, name)
    node.state.update(partial(state.remove, name=name))
    node.journal.record(Event.DELETED, name, f'Instance "{name}" deleted')
    supervision.reconcile(node, {name})
    with supervision.group_lock(node, name, wait=True):
        if name not in node.state.read().instances:  # or it was created again meanwhile, and has these logs
            for each in last.instance.generations:
                node.set_logs_aside(each)
    return last.gone()


def start(node: Node, name: str) -> InstanceView:
    """Let an instance run again; of one with sound replicas, only those that do not run, so that the sound ones stay.

    Raises: Problem ALREADY_RUNNING unless it is stopped or failed, or has such.
    """
    if node.settings.is_cluster_head:
        return cluster.start(node, name)
    refuse_changed_of(node, name)
    instance = node.state.read().get(name)
    timeout = program.startup_timeout(instance, node.settings)
    sighting = overview.sighting_of(node, instance)
    try:
        status.refuse_running(instance, sighting, timeout)  # before a port of it is changed
    except Problem:
        if instance.lacks_model or all(each.process for each in sighting.replicas):
            raise
        return carried_out(node, instance)  # somebody has taken a program of it out of supervisord
    supply.supply(node, name)
    leave_taken_ports(node, name)
    # Always the room before a group: to make room is to stop other groups.
    with room.made_for(node, node.state.read().get(name)), supervision.group_lock(node, name, wait=True):
        # Under the lock, or `quarantine` could come between the two.
        sighting = overview.sighting_of(node, node.state.read().get(name))
        change = node.state.update(partial(started, name=name, sighting=sighting, settings=node.settings))
        node.journal.record(Event.STARTED, name, f'Instance "{name}" started')
        before = change.before.get(name)
        for replica in state.liftable(before, status.halted(before, sighting)):
            longest = node.settings.graceful_shutdown_timeout_secs + supervision.REPLACE_GRACE_SECS
            node.supervisor.start(name, change.after.get(name).process(replica), longest)
    return carried_out(node, change.after.get(name))


def started(before: State, name: str, sighting: Sighting, settings: Settings) -> State:
    """The state in which an instance runs again. Raises: Problem ALREADY_RUNNING, by the sighting."""
    instance = before.get(name)
    if not instance.lacks_model:  # else this very start has begun the download
        status.refuse_running(instance, sighting, program.startup_timeout(instance, settings))
    return state.start(before, name, status.halted(instance, sighting))


def stop(node: Node, name: str) -> InstanceView:
    """Stop an instance until it is started. Raises: Problem NOT_RUNNING when it is stopped already."""
    if node.settings.is_cluster_head:
        return cluster.stop(node, name)
    node.supervisor.require()
    change = node.state.update(partial(stopped, name=name))
    node.journal.record(Event.STOPPED, name, f'Instance "{name}" stopped')
    return carried_out(node, change.after.get(name))


def stopped(before: State, name: str) -> State:
    if not before.get(name).is_offered:
        raise Problem(Kind.CONFLICT, "NOT_RUNNING", f'Instance "{name}" is stopped already')
    return state.stop(before, name)


def leave_taken_ports(node: Node, name: str) -> None:
    """Other ports for replicas on whose own another program listens.

    Raises: Problem PORT_IN_USE, which names the owner, where the port was asked for; PORT_CONFLICT where that is ours.
    """
    instance = node.state.read().get(name)
    mine = node.settings.own_ports  # another configuration than that with which they were chosen
    owners: dict[int, Owner | str] = {}
    for port in (*instance.ports, *instance.prometheus_ports):
        if port in mine:
            owners[port] = f"the appliance itself ({mine[port]})"
        elif owner := node.listeners.stranger(port, f"{node.id}:{name}:"):
            owners[port] = owner
    asked = [port for port in instance.ports if port in owners and instance.spec.port is not None]
    asked += [port for port in instance.prometheus_ports if port in mine and instance.spec.prometheus_port is not None]
    if asked:
        raise Problem(
            Kind.CONFLICT,
            "PORT_CONFLICT" if asked[0] in mine else "PORT_IN_USE",
            f'Port {asked[0]} of "{name}" is in use by {owners[asked[0]]}: end that, or delete the instance and create '
            "it with another port",
        )
    if not owners:
        return
    busy = busy_ports(node, replace(instance.spec, port=None, prometheus_port=None))
    moving = partial(state.move, name=name, settings=node.settings, taken=frozenset(owners), busy=busy)
    moved = node.state.update(moving).after.get(name)
    if (moved.ports, moved.prometheus_ports) != (instance.ports, instance.prometheus_ports):
        taken = "; ".join(f"{port} is in use by {owner}" for port, owner in owners.items())
        message = f'"{name}" listens on {", ".join(map(str, moved.ports))} from now on: port {taken}'
        node.journal.record(Event.MOVED, name, message, ports=list(moved.ports))


def carried_out(node: Node, instance: Instance) -> InstanceView:
    """The overview of an instance after its change has reached supervisor."""
    supervision.reconcile(node, {instance.name})
    return overview.view_of(node, instance)


def seed(node: Node) -> None:
    """Add the seeds of the configuration file that were never added before.

    With auto_restore_on_restart = false every start begins with nothing but the seeds.
    """
    if not node.settings.auto_restore_on_restart:
        node.state.update(emptied)
    if node.settings.is_cluster_head:
        cluster.seed(node)
        return
    node.state.update(partial(with_ports, settings=node.settings))
    before = node.state.read()
    new = [spec for spec in node.settings.instances if spec.name not in before.seeded]
    for spec in new:  # all of them, before the first is added
        try:
            validated(node, spec.mapping())
        except Problem as problem:
            message = f'Instance "{spec.name}" of the configuration file: {problem.message}'
            raise Problem(problem.kind, problem.code, message) from problem
    new.sort(key=lambda spec: not spec.asks_for_ports)  # the others take what is left
    spare = SPARE_PORTS + 2 * sum(spec.replicas for spec in new)
    additions = [addition(node, before, spec, state.seed, spare) for spec in new]
    change = node.state.update(lambda state_: reduce(lambda so_far, add: add(so_far), additions, state_))
    for spec in new:
        if spec.name not in change.before.instances:
            message = f'Instance "{spec.name}" created from the configuration file'
            node.journal.record(Event.CREATED, spec.name, message, model=spec.model_id)


def emptied(before: State) -> State:
    return State()


def validated(node: Node, body: Any) -> InstanceSpec:
    """The spec, valid also on this machine: its GPUs and its engines."""
    spec = InstanceSpec.parse(body)
    refuse_without_cluster(spec)
    refuse_leading_out(spec.revision)
    refuse_changed_files(node, spec)
    program.refuse_missing_engine(spec.engine, node.settings)
    if spec.express:
        express.refuse_missing(node.settings)
    if (spec.engine or program.default_engine(node.settings)) == "tei":
        tei.refuse_missing(node.settings.tei_binary_path)
        tei.refuse_unknown_flags(node.settings.tei_binary_path, spec.extra_args)
    if spec.gpus or spec.gpu_ids == AUTO:
        placement.refuse_unknown(spec, nvml.devices())
    return spec


def refuse_changed_of(node: Node, name: str) -> None:
    refuse_changed_files(node, node.state.read().get(name).spec)


def refuse_changed_files(node: Node, spec: InstanceSpec) -> None:
    refuse_changed(node.settings.data_dir, spec.model_id, spec.revision, spec.flag(CACHE_FLAG))


def busy_ports(node: Node, spec: InstanceSpec) -> frozenset[int]:
    return ports.busy(chain(*port_choice.candidate_ports(spec, node.settings)), LOOPBACK)


def ports_not_free(node: Node, before: State, spec: InstanceSpec, spare: int) -> frozenset[int]:
    """As `busy_ports`, for a new instance. The machine is asked for the lowest ones until so many are free, and the
    others count as busy: to ask for all took 10 ms."""
    taken, busy = {*before.taken_ports, *node.settings.own_ports}, set[int]()
    for candidates in port_choice.candidate_ports(spec, node.settings):
        free = 0
        for port in candidates:
            if port in taken or free == spec.replicas + spare or ports.busy([port], LOOPBACK):
                busy.add(port)
            else:
                free += 1
    return frozenset(busy)
