"""Which instance answers: that of the path prefix, else of a header, else of the field `model`, else the only one for
the task, or the one of them that is the default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import falcon

from appliance.core.problems import Problem, instances_listed, nearest, quoted
from appliance.core.state import Instance
from appliance.gateway.cards import Cards
from appliance.gateway.refusals import Reason, Refusal
from appliance.node.directory import Directory
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux


@dataclass(frozen=True)
class Selection:
    """The instances that may answer: at least one, and several where several serve the model id of the request."""

    instances: tuple[Instance, ...]
    by_model: bool

    @property
    def first(self) -> Instance:
        return self.instances[0]

    @property
    def model_id(self) -> str:
        return self.first.spec.model_id

    @property
    def names(self) -> str:
        return ", ".join(instance.name for instance in self.instances)

    @property
    def is_of_several(self) -> bool:
        """Whether the multiplexer chooses among several instances."""
        return self.by_model and len(self.instances) > 1

    @property
    def target(self) -> mux.Target:
        if self.is_of_several:
            return mux.Target(model_id=self.model_id)
        return mux.Target(instance_name=self.first.name)

    @property
    def express(self) -> bool:
        """Whether single calls may take the express lane."""
        return self.first.spec.express and not self.is_of_several

    @property
    def auto_truncate(self) -> bool:
        """The instance's default, which gRPC's Info does not tell; TEI's (1.9) is true."""
        return self.flag("--auto-truncate") != "false"

    def flag(self, name: str) -> str | None:
        """The value of a flag among the instance's extra_args."""
        return self.first.spec.flag(name)


class InstanceSelector:
    """Selects by what the state file has at the moment of the request."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.cards = Cards(directory)

    @property
    def instances(self) -> dict[str, Instance]:
        """All instances, in name order. Raises: Refusal while the state file could never be read."""
        self.directory.refresh()
        try:
            self.directory.require()
        except Problem as problem:
            raise Refusal(Reason.UNAVAILABLE, problem.message) from None
        return dict(self.directory.state.instances)

    def select(self, request: falcon.Request, model: str | None, tasks: Sequence[frozenset[str]]) -> Selection:
        """tasks: what the route is for, the best first; they count where nobody is named. As over gRPC, those of the
        peers get what none of ours is asked for.

        Raises: Refusal (not found), which lists the instances.
        """
        instances = self.instances
        if (name := request.context.instance) is not None:
            return self.by_name(name, instances)
        if (name := request.get_header("X-TEI-Instance")) is not None:
            return self.by_name(name, instances)
        if (wanted := request.get_header("X-TEI-Model")) is not None:
            return self.by_model(wanted, instances)
        own = self.own(instances)
        if model and model not in own and (serving := self.serving(model, own)):
            return serving
        if model:
            return self.by_name(model, instances) if model in instances else self.by_model(model, instances)
        if chosen := self.unnamed(own or instances, tasks):
            return Selection((chosen,), by_model=False)
        raise not_found(
            "Say which model: set `model`, the header X-TEI-Instance, or the path /instances/NAME/...; or make one "
            "instance for this task the default",
            instances,
        )

    def unnamed(self, instances: dict[str, Instance], tasks: Sequence[frozenset[str]]) -> Instance | None:
        """The only one, else the only one for a task, else the default among them."""
        everyone = list(instances.values())
        if len(everyone) == 1:
            return everyone[0]
        for task in tasks:
            if fitting := [each for each in everyone if self.cards.fits(each, task)]:
                return only(fitting)
        return None if tasks else only([each for each in everyone if each.spec.default])

    def knows(self, name: str) -> bool:
        """Whether an instance, an alias or a model is called so."""
        return any(name in (each.name, each.spec.model_id, *each.spec.aliases) for each in self.instances.values())

    def by_name(self, name: str, instances: dict[str, Instance]) -> Selection:
        if name not in instances:
            raise not_found(f"There is no instance {quoted(name)}{nearest(name, instances)}", instances)
        return Selection((instances[name],), by_model=False)

    def by_model(self, model: str, instances: dict[str, Instance]) -> Selection:
        if serving := self.serving(model, self.own(instances)) or self.serving(model, instances):
            return serving
        specs = [instance.spec for instance in instances.values()]
        known = {*instances, *(each.model_id for each in specs), *(name for each in specs for name in each.aliases)}
        raise not_found(f"There is no model or instance {quoted(model)}{nearest(model, known)}", instances)

    def serving(self, model: str, instances: dict[str, Instance]) -> Selection | None:
        """Those with this alias, else those of this model."""
        aliased = tuple(instance for instance in instances.values() if model in instance.spec.aliases)
        serving = aliased or tuple(each for each in instances.values() if each.spec.model_id == model)
        return Selection(serving, by_model=not aliased) if serving else None

    def own(self, instances: dict[str, Instance]) -> dict[str, Instance]:
        """Those that are not of a peer."""
        return {name: instance for name, instance in instances.items() if not self.is_elsewhere(name)}

    def is_elsewhere(self, name: str) -> bool:
        """Whether an instance is of a peer."""
        return any(route.name == name for route in self.directory.table.elsewhere)


def only(instances: Sequence[Instance]) -> Instance | None:
    """The only one, or the only default."""
    chosen = instances if len(instances) == 1 else [each for each in instances if each.spec.default]
    return chosen[0] if len(chosen) == 1 else None


def not_found(message: str, instances: dict[str, Instance]) -> Refusal:
    listed = instances_listed(f"{name} ({instance.spec.model_id})" for name, instance in instances.items())
    return Refusal(Reason.NOT_FOUND, message + listed)
