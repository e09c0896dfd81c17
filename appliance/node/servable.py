"""Whether the embedded engine of this machine can serve a model: its flags, its runtime, its files, its configuration.

The engine asks the same when it starts. Asked before, a model that can never start is refused when it is created.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from appliance.core import engine_flags, servable
from appliance.core.families import FAMILIES, HEADS, architecture_of
from appliance.core.instance import InstanceSpec
from appliance.core.problems import Problem, invalid, quoted
from appliance.drivers import hub, modelfiles
from appliance.drivers.hub import ModelLocation
from appliance.drivers.modelfolder import Card, read_card
from appliance.node.integrity import CACHE_FLAG


def refuse_missing_runtime(runtime: str) -> None:
    """Raises: Problem when the packages of a runtime are not installed."""
    if find_spec({"torch": "transformers"}.get(runtime, runtime)) is None:
        raise invalid(
            f"--runtime {runtime} is not installed: pip install '.[{runtime}]' in the source of the appliance",
            "UNSUPPORTED_MODEL",
        )


def shipped_graph(card: Card, dtype: str | None) -> Path | None:
    """The graph that came with the model, where it serves as it is: of two towers, which one would it be? And it takes
    one adapter for all texts of a batch. Those of SPLADE models end before their vectors; none has weights as int8.

    Raises: Problem for a graph that would have to be another one, and there are no weights to build that of.
    """
    files = () if card.images or card.adapters else servable.SHIPPED
    shipped = next((card.folder / file for file in files if (card.folder / file).exists()), None)
    can_build = card.model_type in FAMILIES and any((card.folder / name).exists() for name in servable.WEIGHTS)
    fills_masks = card.task == "embedding" and card.architecture.endswith("MaskedLM")  # it may end behind their vectors
    if shipped and can_build and (dtype == "int8" or card.task == "sparse" or fills_masks):
        return None
    if shipped and dtype == "int8":
        words = f"{shipped} is computed in the dtype that it has, and there is nothing to build an int8 graph of"
        raise invalid(f"{words}: leave dtype out", "UNSUPPORTED_MODEL")
    return shipped


def refuse_unfit_runtime(runtime: str, card: Card) -> None:
    """Raises: Problem when a runtime lacks what the model needs."""
    needs = {
        "images": card.images and runtime != "onnxruntime",
        "adapters": card.adapters and runtime == "torch",
        "scores of language models": card.chat_template and runtime == "torch",
    }
    for what in (what for what, is_needed in needs.items() if is_needed):
        raise invalid(f"--runtime {runtime} has no {what}: leave it out", "UNSUPPORTED_MODEL")


def refuse_unknown_prompt(name: str | None, card: Card) -> None:
    if name is not None and name not in card.prompts:
        raise invalid(f"--default-prompt-name {name} is not one of the model's prompts")


def card_of(spec: InstanceSpec) -> Card | None:
    """What the folder of an instance's model says of it. None where the model is not where we look, or not readable:
    TEI may have a cache of its own."""
    try:
        return read_card(hub.find(spec.model_id, spec.revision, spec.flag(CACHE_FLAG)), spec.pooling)
    except Problem:
        return None


def vectors_of(spec: InstanceSpec) -> str:
    """Which vectors an instance gives where its model embeds: dense, sparse or tokens."""
    card = card_of(spec)
    if card and card.task == "multivector":
        return "tokens"
    return "sparse" if spec.pooling == "splade" else "dense"


def location(spec: InstanceSpec) -> ModelLocation | None:
    """Where all that serving needs of an instance's model is on this machine; None when some of it is missing."""
    place = hub.locate(spec.model_id, spec.revision, spec.flag(CACHE_FLAG))
    return place if place and not modelfiles.missing(place.folder) else None


def refuse_unservable(spec: InstanceSpec, place: ModelLocation | None) -> None:
    """place: of the model's files; None while they are not here, and then only the flags can be judged.

    Raises: Problem that names what the embedded engine refuses.
    """
    flags = engine_flags.of_instance(spec.model_id, spec.extra_args)
    refuse_missing_runtime(flags.runtime)
    dtype = servable.chosen_dtype(flags.runtime, spec.dtype)
    if place is None:
        return
    try:
        card = read_card(place.folder, spec.pooling)
        refuse_unknown_prompt(flags.default_prompt_name, card)
        refuse_unfit_runtime(flags.runtime, card)
        if flags.runtime == "openvino" or (flags.runtime == "onnxruntime" and not shipped_graph(card, dtype)):
            architecture_of(card.config, HEADS[card.task])
    except Problem as problem:
        message = f"Model {quoted(spec.model_id)} cannot be served: {problem.message}"
        raise Problem(problem.kind, problem.code, message) from problem
