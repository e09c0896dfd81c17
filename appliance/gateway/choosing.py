"""Which instance shall answer: path prefix, then header, then the `model` field, then the only one there is."""

from __future__ import annotations

from dataclasses import dataclass

import falcon

from appliance.core.problems import Problem, nearest, quoted
from appliance.core.state import Instance
from appliance.gateway.refusals import Reason, Refusal
from appliance.node.directory import Directory
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux

LISTED = 20


@dataclass(frozen=True)
class Choice:
    """At least one instance; several when a model id was asked for that several serve."""

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
    def target(self) -> mux.Target:
        if self.by_model and len(self.instances) > 1:
            return mux.Target(model_id=self.model_id)
        return mux.Target(instance_name=self.first.name)

    @property
    def auto_truncate(self) -> bool:
        """The instance's own default; TEI's is true (1.9). gRPC's Info does not tell it."""
        return self.flag("--auto-truncate") != "false"

    def flag(self, name: str) -> str | None:
        """The value of a flag among the instance's extra_args."""
        return self.first.spec.flag(name)


class Chooser:
    """Follows the state file, so that an answer never rests on a list of yesterday."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory

    @property
    def instances(self) -> dict[str, Instance]:
        """All of them, in name order. Raises: Refusal while that cannot be known."""
        self.directory.refresh()
        try:
            self.directory.require()
        except Problem as problem:
            raise Refusal(Reason.UNAVAILABLE, problem.message) from None
        return dict(self.directory.state.instances)

    def choose(self, request: falcon.Request, model: str | None = None) -> Choice:
        """Raises: Refusal not_found, which lists what exists."""
        instances = self.instances
        if (name := request.context.instance) is not None:
            return self.named(name, instances)
        if (name := request.get_header("X-TEI-Instance")) is not None:
            return self.named(name, instances)
        if (wanted := request.get_header("X-TEI-Model")) is not None:
            return self.serving(wanted, instances)
        if model:
            return self.named(model, instances) if model in instances else self.serving(model, instances)
        if len(instances) == 1:
            return Choice(tuple(instances.values()), by_model=False)
        raise unknown(
            "Say which model: set `model`, the header X-TEI-Instance, or the path /instances/NAME/...", instances
        )

    def named(self, name: str, instances: dict[str, Instance]) -> Choice:
        if name not in instances:
            raise unknown(f"There is no instance {quoted(name)}{nearest(name, instances)}", instances)
        return Choice((instances[name],), by_model=False)

    def serving(self, model: str, instances: dict[str, Instance]) -> Choice:
        found = tuple(instance for instance in instances.values() if instance.spec.model_id == model)
        if not found:
            known = {*instances, *(instance.spec.model_id for instance in instances.values())}
            raise unknown(f"There is no model or instance {quoted(model)}{nearest(model, known)}", instances)
        return Choice(found, by_model=True)


def unknown(message: str, instances: dict[str, Instance]) -> Refusal:
    listed = ", ".join(f"{name} ({instance.spec.model_id})" for name, instance in list(instances.items())[:LISTED])
    return Refusal(Reason.NOT_FOUND, f"{message}; instances: {listed or 'none so far'}")
