"""The model of an instance: it is on this machine and can be served, or it is fetched first, or there is no start.

A process that cannot work is never started: it would die, and be started again, until the crash-loop fuse blows. An
instance whose model is not here is marked in the state (`lacks_model`) until the job that downloads it takes the mark
away; while no job does, its reason stands with its replicas.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from filelock import Timeout

from appliance.core import program, repairs, state
from appliance.core.instance import InstanceSpec
from appliance.core.model_names import registered_id, registered_revision
from appliance.core.models import Model
from appliance.core.problems import Kind, Problem, invalid, quoted
from appliance.core.state import State
from appliance.drivers import hub, modelfiles
from appliance.node import servable
from appliance.node.context import Node
from appliance.node.integrity import CACHE_FLAG
from appliance.operations import models, supervision

log = logging.getLogger(__name__)


def lacks_model(node: Node, spec: InstanceSpec) -> bool:
    """Whether the model of a new or starting instance has to be fetched first.

    Raises: Problem when it cannot be fetched, or cannot be served.
    """
    engine = spec.engine or program.default_engine(node.settings)
    place = servable.location(spec)
    if engine == "embedded":
        servable.refuse_unservable(spec, place)
    elif hub.is_folder(spec.model_id) or spec.flag(CACHE_FLAG):
        return False  # TEI may need fewer files than the embedded engine, and fetches into a cache of its own
    if place is not None:
        return False
    refuse_unfetchable(node, spec)
    return True


def refuse_unfetchable(node: Node, spec: InstanceSpec) -> None:
    """Raises: Problem unless the model can be downloaded, into the cache that the instance reads."""
    name = f"Model {quoted(spec.model_id)}"
    if hub.is_folder(spec.model_id):
        lacking = ", ".join(modelfiles.missing(Path(spec.model_id))[:5])
        raise invalid(f"{name} is a folder without {lacking}: add what is missing", "MODEL_INCOMPLETE")
    try:
        hub_id = not registered_id(spec.model_id).startswith("/")
    except ValueError:
        hub_id = False
    if not hub_id:
        raise invalid(f"{name} is no folder on this machine, and no hub id", "MODEL_NOT_FOUND")
    if spec.revision:
        try:
            registered_revision(spec.revision)
        except ValueError as error:
            raise invalid(f"{name} cannot be fetched: its revision {error}", "MODEL_NOT_FOUND") from None
    if spec.download == "never" or spec.flag(CACHE_FLAG):
        where = f"in {spec.flag(CACHE_FLAG)}" if spec.flag(CACHE_FLAG) else "on this machine"
        raise Problem(
            Kind.PRECONDITION,
            "MODEL_NOT_DOWNLOADED",
            f"{name} is not {where}: download it first (POST /models/ID/download), or say download = auto",
        )
    registered = node.models.read().models.get(spec.model_id)
    if registered and (registered.revision or "main") != (spec.revision or "main"):
        raise Problem(
            Kind.PRECONDITION,
            "MODEL_NOT_DOWNLOADED",
            f"{name} is registered at revision {registered.revision or 'main'}, and the instance asks for "
            f"{spec.revision or 'main'}: register that one (POST /models with revision), or ask for the other",
        )


def fetch(node: Node, spec: InstanceSpec) -> None:
    """Begin to download a model, unless that is under way. Where supervisord does not run yet, it starts the job."""
    model = node.models.read().models.get(spec.model_id) or Model(spec.model_id, spec.revision or "")
    if model.job and model.job.kind == "download":
        return
    try:
        if node.supervisor.answers():
            models.begin(node, model, "download")
        else:
            models.enlist(node, model, "download")
    except Problem:
        model = node.models.read().models.get(spec.model_id, model)
        if not (model.job and model.job.kind == "download"):  # else another instance of it came first
            raise


def supply(node: Node, name: str) -> None:
    """Before a start: mark the instance by whether its model is here, and fetch what is not. Raises: Problem."""
    spec = node.state.read().get(name).spec
    lacking = lacks_model(node, spec)
    node.state.update(partial(state.note_model, name=name, lacking=lacking))
    if lacking:
        fetch(node, spec)


def supplied(node: Node, model_id: str) -> None:
    """A model has come: start the instances that waited for it, or say with each why it cannot be served."""
    waiting = [each for each in node.state.read().instances.values() if each.lacks_model]
    for instance in waiting:
        if instance.spec.model_id != model_id:
            continue
        try:
            lacking = lacks_model(node, instance.spec)
        except Problem as problem:
            hold_back(node, instance.name, problem.message)
            continue
        if not lacking:
            node.state.update(partial(state.note_model, name=instance.name, lacking=False))
            supervise(node, instance.name)


def supervise(node: Node, name: str) -> None:
    """Start an instance whose model has come. Where supervisord is away, or another change is at work, the monitor does
    so within a minute, or the next `up`."""
    try:
        supervision.reconcile(node, {name})
    except (Problem, Timeout) as problem:
        log.warning('"%s" is started later: %s', name, problem)


def supply_missed(node: Node) -> None:
    """Instances that wait for a model which no job fetches: it may have come while they were made."""
    running = {model.model_id for model in node.models.read().models.values() if model.job}
    waiting = [each for each in node.state.read().instances.values() if each.lacks_model and not each.quarantined]
    for model_id in {each.spec.model_id for each in waiting} - running:
        supplied(node, model_id)


def hold_back(node: Node, name: str, reason: str) -> None:
    """Start no process of an instance, and say why, until it is started or restarted."""
    node.state.update(partial(held_back, name=name, reason=reason))


def held_back(before: State, name: str, reason: str) -> State:
    after = state.note_model(before, name, lacking=True)
    instance = after.instances.get(name)
    for replica in range(instance.spec.replicas if instance else 0):
        assert instance is not None
        after = repairs.quarantine(after, name, replica, instance.launch, reason)
    return after
