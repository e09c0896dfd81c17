"""The registry of models: what callers added, the job that is at work on one, and how its last verification went.

Theory of operation. Only pins, jobs and verifications are stored; what the disk can tell is asked of the disk:

    a job of kind download     downloading
    a job of kind load         loading
    files are not complete     available
    files are wrong            failed      (not as they were verified, or no model's)
    no verification of them    downloaded
    its verification           verified, or failed

A job is an entry with a number, and a supervisor program of that number: to begin one is a change of the registry and
a reconcile, to cancel it is to take the entry away. It survives control and supervisord because its entry does; it
ends by writing its result and taking its entry away in one change. A verification belongs to the fingerprint of the
files it was made with: other files are `downloaded` again. Fields of a newer release are carried along in `extra`, as
in `core.state`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from appliance.core import fields as check
from appliance.core.layout import job_process
from appliance.core.model_names import PINNED, registered_id, registered_revision
from appliance.core.problems import Kind, Problem, invalid, nearest, quoted

LONGEST_ERROR = 4000
SPARE_BYTES = 64 * 1024 * 1024  # that a download or an import leaves free on the disk

SAFE_WEIGHTS = re.compile(r"(?:.*/)?(?:model(?:-\d+-of-\d+)?\.safetensors|model\.onnx)")
PICKLED_WEIGHTS = re.compile(r"(?:.*/)?pytorch_model(?:-\d+-of-\d+)?\.bin")
# What TEI 1.9 and the embedded engine read beside the weights. 1_Pooling, 2_Dense and the like are folders of modules.
SERVING = re.compile(
    r"config\.json|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|vocab\.txt|modules\.json"
    r"|sentence_\w+_config\.json|config_sentence_transformers\.json|\d+_\w+/config\.json"
    r"|preprocessor_config\.json|artifact\.metadata|chat_template\.jinja|(?:sparse|colbert)_linear\.pt"
    r"|processor_config\.json|model\.safetensors\.index\.json|pytorch_model\.bin\.index\.json"
)
# Weights beside a graph, by the names that exporters give them; torch's have those of their nodes, without an ending.
EXTERNAL = re.compile(
    r"(?:onnx/)?(?:model\.onnx[._]data(?:_\d+)?|[^./]*(?:__value|onnx__)[^./]*)"
    r"|onnx/(?:[^./]+|[^/]+\.(?:weight|bias))"
)


@dataclass(frozen=True)
class Job:
    """Work in a process of its own. ``fields``: of the instance whose flags a load uses, as JSON."""

    number: int
    kind: str
    asked_at: str
    fields: str = ""

    @property
    def program(self) -> str:
        """Its group and program in supervisor."""
        return job_process(self.number)


@dataclass(frozen=True)
class Verification:
    """A load that was tried. ``error`` is empty when it worked; memory in bytes."""

    at: str
    fingerprint: str
    error: str = ""
    dimensions: int = 0
    load_secs: float = 0.0
    memory: int = 0
    gpu_memory: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    model_id: str
    revision: str = ""  # pinned; empty: main
    added_at: str = ""
    download_error: str = ""
    job: Job | None = None
    verification: Verification | None = None
    last_verified: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Models:
    """All registered models by id (sorted), the number of the last job, and a number that rises with every change."""

    generation: int = 0
    jobs: int = 0
    models: Mapping[str, Model] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def get(self, model_id: str) -> Model:
        """Raises: Problem MODEL_NOT_FOUND."""
        if model_id not in self.models:
            raise not_found(model_id, self.models)
        return self.models[model_id]

    def job(self, number: int) -> tuple[Model, Job] | None:
        """The job of that number and its model, until it is ended or cancelled."""
        return next(((one, one.job) for one in self.models.values() if one.job and one.job.number == number), None)

    @property
    def running(self) -> list[Job]:
        return [model.job for model in self.models.values() if model.job]


def not_found(model_id: str, registered: Iterable[str]) -> Problem:
    return Problem(
        Kind.NOT_FOUND,
        "MODEL_NOT_FOUND",
        f"Model {quoted(model_id)} is not registered{nearest(model_id, registered)}: add it with POST /models",
    )


NEW_MODEL = check.Fields(
    {"model_id": registered_id, "revision": registered_revision}, required=("model_id",), null_is_absent=True
)


def parse(body: Any) -> Model:
    """A model that a caller asks to add: ``model_id`` and perhaps ``revision``. Raises: Problem."""
    return Model(**NEW_MODEL.values(check.required_object(body, "A model must be an object with its fields")))


def with_model(registry: Models, model: Model) -> Models:
    return replace(registry, models=dict(sorted({**registry.models, model.model_id: model}.items())))


def add(registry: Models, model: Model, now: str) -> Models:
    """The registry with this model; one that is there stays as it is, but for another revision.

    Raises: Problem MODEL_BUSY when the revision of a model is changed while a job works on it.
    """
    registered = registry.models.get(model.model_id)
    if registered is None:
        return with_model(registry, replace(model, added_at=now))
    if not model.revision or model.revision == registered.revision:
        return registry
    refuse_busy(registered)
    return with_model(registry, replace(registered, revision=model.revision, download_error="", verification=None))


def remove(registry: Models, model_id: str) -> Models:
    registry.get(model_id)
    return replace(registry, models={key: model for key, model in registry.models.items() if key != model_id})


def refuse_busy(model: Model) -> None:
    if model.job:
        verb = {"download": "downloaded", "load": "loaded"}[model.job.kind]
        raise Problem(
            Kind.CONFLICT,
            "MODEL_BUSY",
            f"Model {quoted(model.model_id)} is being {verb} since {model.job.asked_at}: wait for it, or cancel it",
        )


def begin(registry: Models, model_id: str, kind: str, now: str, fields: str = "") -> Models:
    """The registry with a new job for this model. Raises: Problem MODEL_BUSY, MODEL_NOT_FOUND."""
    model = registry.get(model_id)
    refuse_busy(model)
    number = registry.jobs + 1
    begun = replace(model, job=Job(number, kind, now, fields), download_error="")
    return with_model(replace(registry, jobs=number), begun)


def end(registry: Models, number: int, download_error: str = "", verification: Verification | None = None) -> Models:
    """The registry without this job, with its result. A job that was cancelled meanwhile changes nothing."""
    work = registry.job(number)
    if work is None:
        return registry
    model = replace(work[0], job=None, download_error=download_error[:LONGEST_ERROR])
    if verification:
        worked = verification.at if not verification.error else model.last_verified
        model = replace(model, verification=verification, last_verified=worked)
    return with_model(registry, model)


def downloaded(registry: Models, number: int) -> Models:
    """The registry without the job of a download that worked. What a load said of files that were wrong is gone."""
    work = registry.job(number)
    if work is None:
        return registry
    model = work[0]
    if model.verification and model.verification.error:
        registry = with_model(registry, replace(model, verification=None))
    return end(registry, number)


def status(model: Model, complete: bool, wrong: bool, fingerprint: str) -> str:
    """The table above."""
    if model.job:
        return {"download": "downloading", "load": "loading"}[model.job.kind]
    if not complete:
        return "available"
    if wrong:
        return "failed"
    if model.verification is None or model.verification.fingerprint != fingerprint:
        return "downloaded"
    return "failed" if model.verification.error else "verified"


# -- which files serving needs ----------------------------------------------------------------------------------------


def needed(names: Collection[str], allow_pickle: bool) -> list[str]:
    """Of the files of a repository those that serving needs. Raises: Problem that says what the repository lacks.

    Weights are safetensors, else onnx, else (only where allowed) pickles: a pickle can run code when it is read.
    """
    for required in ("config.json", "tokenizer.json"):
        if required not in names:
            raise invalid(f"It has no {required}: neither TEI nor the embedded engine can serve it", "MODEL_UNSUITABLE")
    weights = [name for name in names if SAFE_WEIGHTS.fullmatch(name) and serves(name)]
    tensors = [name for name in weights if name.endswith(".safetensors")]
    chosen = tensors or weights
    if not chosen and allow_pickle:
        chosen = [name for name in names if PICKLED_WEIGHTS.fullmatch(name) and serves(name)]
    if not any("/" not in name or name.startswith("onnx/") for name in chosen):
        if any(PICKLED_WEIGHTS.fullmatch(name) for name in names):
            raise invalid(
                "Its weights are pickles, which can run code when they are read: set allow_pickle = true if you trust "
                "them, or look for a version with safetensors",
                "MODEL_UNSUITABLE",
            )
        raise invalid("It has no weights as safetensors or onnx", "MODEL_UNSUITABLE")
    has_graph = any(name.endswith(".onnx") for name in chosen)
    beside = {name for name in names if SERVING.fullmatch(name) or (has_graph and EXTERNAL.fullmatch(name))}
    return sorted({*chosen, *beside})


def may_be_served(name: str) -> bool:
    """Whether serving may read this file. What is no text cannot be shown, nor be in a digest of names."""
    if not name.isprintable():
        return False
    weights = SAFE_WEIGHTS.fullmatch(name) or PICKLED_WEIGHTS.fullmatch(name)
    return bool(SERVING.fullmatch(name) or EXTERNAL.fullmatch(name) or (weights and serves(name)))


def serves(name: str) -> bool:
    """Weights at the top, of an onnx export, or of a module; not those of other frameworks' folders."""
    folder = name.rpartition("/")[0]
    return not folder or folder == "onnx" or bool(re.fullmatch(r"\d+_\w+", folder))


def missing(names: Collection[str], shards: Collection[str], modules: Collection[str]) -> list[str]:
    """What serving needs and a folder does not have. shards: the files that its weight index lists.

    modules: the folders that modules.json lists and that have files.
    """
    lacking = [name for name in ("config.json", "tokenizer.json") if name not in names]
    lacking += [name for name in shards if name not in names]
    lacking += [f"{folder}/config.json" for folder in modules if f"{folder}/config.json" not in names]
    single = {"model.safetensors", "model.onnx", "onnx/model.onnx", "pytorch_model.bin"}
    if not shards and not single.intersection(names):
        lacking.append("model.safetensors")
    return lacking


# -- to and from the plain values of a TOML file ----------------------------------------------------------------------

ERROR_TEXT = check.Check(lambda value: str(value)[:LONGEST_ERROR])
CHECKS: dict[str, check.Check] = {
    "model_id": registered_id,
    "revision": PINNED,
    "added_at": check.text(64, shortest=0),
    "download_error": ERROR_TEXT,
    "last_verified": check.text(64, shortest=0),
}
JOB_CHECKS: dict[str, check.Check] = {
    "number": check.whole(1, 2**62),
    "kind": check.one_of("download", "load"),
    "asked_at": check.text(64),
    "fields": check.Check(str),
}
VERIFICATION_CHECKS: dict[str, check.Check] = {
    "at": check.text(64),
    "fingerprint": check.text(128, shortest=0),
    "error": ERROR_TEXT,
    "dimensions": check.whole(0, 2**31),
    "load_secs": check.number(0, 1e9),
    "memory": check.whole(0, 2**62),
    "gpu_memory": check.whole(0, 2**62),
}
TOP = ("generation", "jobs", "count", "models")


def dump(registry: Models) -> dict[str, Any]:
    return {
        **registry.extra,
        "generation": registry.generation,
        "jobs": registry.jobs,
        "count": len(registry.models),  # a file that was cut between two tables is still TOML
        "models": [dump_model(model) for model in registry.models.values()],
    }


def dump_model(model: Model) -> dict[str, Any]:
    plain: dict[str, Any] = {**model.extra, **{key: getattr(model, key) for key in CHECKS}}
    if model.job:
        plain["job"] = {key: getattr(model.job, key) for key in JOB_CHECKS}
    if model.verification:
        own = {key: getattr(model.verification, key) for key in VERIFICATION_CHECKS}
        plain["verification"] = {**model.verification.extra, **own}
    return plain


def load(file: Mapping[str, Any]) -> Models:
    """The registry in a parsed file. Raises ValueError, KeyError or Problem when it is not one."""
    loaded = [load_model(entry) for entry in check.sequence_of(check.table, 100_000)(file.get("models", []))]
    if len(loaded) != file.get("count") or len({model.model_id for model in loaded}) < len(loaded):
        raise ValueError("its models are not those it counts")
    whole = check.whole(0, 2**62)
    return Models(
        generation=whole(file.get("generation")),
        jobs=whole(file.get("jobs")),
        models={model.model_id: model for model in sorted(loaded, key=lambda model: model.model_id)},
        extra=check.beyond(file, TOP),
    )


def load_model(entry: Mapping[str, Any]) -> Model:
    values: dict[str, Any] = {key: checked(entry[key]) for key, checked in CHECKS.items()}
    values["extra"] = check.beyond(entry, (*CHECKS, "job", "verification"))
    if "job" in entry:
        values["job"] = Job(**{key: checked(entry["job"][key]) for key, checked in JOB_CHECKS.items()})
    if "verification" in entry:
        table = entry["verification"]
        values["verification"] = Verification(
            **{key: checked(table[key]) for key, checked in VERIFICATION_CHECKS.items()},
            extra=check.beyond(table, VERIFICATION_CHECKS),
        )
    return Model(**values)
