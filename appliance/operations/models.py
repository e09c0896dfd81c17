"""The verbs of models: add, remove, download, load, cancel; what is true of each now; and what may not start.

Only pins, jobs and verifications are stored (`core.models`). A job runs in a process of its own under supervisord and
ends by writing its result; whoever waits for it looks at the registry. A job whose process is gone for good is ended
here, with the last lines of its log, so that no model stays busy.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from appliance.core import models
from appliance.core.instance import InstanceSpec
from appliance.core.model_names import registered_id
from appliance.core.models import Job, Model, Models
from appliance.core.problems import Kind, Problem, invalid, quoted
from appliance.core.state import Instance
from appliance.core.status import ALIVE
from appliance.drivers import hub, logs, manifests, modelfiles
from appliance.drivers.hub import ModelLocation
from appliance.drivers.manifests import Change, Manifest
from appliance.node.context import Node, now
from appliance.operations import supervision

POLL_SECS = 0.2
SETTLE_SECS = 5.0  # how often somebody who waits looks whether the job's process still lives
START_SECS = 10.0  # that supervisord may take to start a job
LAST_LINES = 10


# -- looking ----------------------------------------------------------------------------------------------------------


def show_all(node: Node) -> list[dict[str, Any]]:
    """Every model that was added or that this machine has, sorted by id."""
    registry = node.models.read()
    present = [*hub.cached_ids(), *(each for each in hub.PACKAGES if hub.packaged(each))]
    return [of(node, registry.models.get(each) or Model(each)) for each in sorted({*registry.models, *present})]


def show(node: Node, model_id: str) -> dict[str, Any]:
    return of(node, known(node, model_id))


def known(node: Node, model_id: str) -> Model:
    """A model that was added, or that the cache or a package has. Raises: Problem MODEL_NOT_FOUND, or invalid id."""
    model_id = checked(model_id)
    registry = node.models.read()
    if model_id in registry.models:
        return registry.models[model_id]
    if not model_id.startswith("/") and hub.locate(model_id):  # somebody's folder is not looked into unasked
        return Model(model_id)
    raise models.not_found(model_id, registry.models)


def checked(model_id: str) -> str:
    try:
        name: str = registered_id(model_id)
        return name
    except ValueError as error:
        raise invalid(f"A model id {error}") from None


def of(node: Node, model: Model) -> dict[str, Any]:
    """What CONTRACT and issue promise of a model; every value is computed now."""
    place = hub.locate(model.model_id, model.revision or None)
    files = modelfiles.serving_files(place.folder) if place else []
    manifest = manifest_of(node, model.model_id, model.revision, place)
    changed = manifests.changes(manifest, place.folder) if manifest and place else []
    lacking = modelfiles.missing(place.folder) if place else ["everything"]
    wrong = modelfiles.wrong(place.folder) if place else ""
    complete = not lacking and not any(each.certain for each in changed)
    fingerprint = manifest.fingerprint if manifest else ""
    proved = model.verification if model.verification and model.verification.fingerprint == fingerprint else None
    sums = {entry.name: entry.sha256 for entry in manifest.files} if manifest else {}
    return {
        "model_id": model.model_id,
        "revision": model.revision or None,
        "commit": (place and place.commit) or None,
        "source": place.source if place else None,
        "status": models.status(model, complete, bool(changed or wrong), fingerprint),
        "downloaded": complete,
        "cache_path": str(place.folder) if place else None,
        "cache_size_bytes": sum(file.size for file in files) if place else None,
        "files": [{"name": file.name, "size": file.size, "sha256": sums.get(file.name)} for file in files],
        "progress": progress(node, model.job) if model.job else None,
        "metadata": modelfiles.metadata(place.folder) if place else None,
        "last_verified": model.last_verified or None,
        "verification_error": reason(model, changed, wrong),
        "verification": {
            "dimensions": proved.dimensions or None,
            "load_secs": round(proved.load_secs, 3),
            "memory_bytes": proved.memory,
            "gpu_memory_bytes": proved.gpu_memory or None,
        }
        if proved and not proved.error
        else None,
        "download_error": model.download_error or None,
        "added_at": model.added_at or None,
    }


def reason(model: Model, changed: list[Change], wrong: str) -> str | None:
    if wrong:
        return wrong
    if changed:
        return f"{changed[0].name} {changed[0].why}"
    return (model.verification.error or None) if model.verification else None


def manifest_path(node: Node, model_id: str, revision: str) -> Path:
    return Path(node.layout.manifest(model_id, revision))


def manifest_of(node: Node, model_id: str, revision: str, place: ModelLocation | None) -> Manifest | None:
    """The manifest of these very files: of the same commit, where they are the hub's."""
    found = manifests.read(manifest_path(node, model_id, revision))
    return found if found and place and found.commit == place.commit else None


def digests(node: Node, instance: Instance) -> dict[str, str]:
    """SHA-256 of each file of an instance's model, by name; empty for a model that was never verified."""
    spec = instance.spec
    place = hub.locate(spec.model_id, spec.revision)
    manifest = manifest_of(node, spec.model_id, spec.revision or "", place)
    return {entry.name: entry.sha256 for entry in manifest.files} if manifest else {}


def progress_path(node: Node, job: Job) -> Path:
    return Path(node.layout.job_progress(job.number))


def progress(node: Node, job: Job) -> dict[str, Any]:
    """What the job last told of itself."""
    try:
        told: dict[str, Any] = json.loads(progress_path(node, job).read_text())
    except (OSError, ValueError):
        return {"bytes_done": 0, "bytes_total": None, "bytes_per_sec": None, "eta_secs": None, "step": "starting"}
    return told


# -- verbs ------------------------------------------------------------------------------------------------------------


def add(node: Node, given: Any) -> tuple[dict[str, Any], bool]:
    """Register a model; returns it, and whether it is new."""
    wanted = models.parse(given)
    if wanted.model_id.startswith("/") and not Path(wanted.model_id, "config.json").is_file():
        raise invalid(f"{quoted(wanted.model_id)} is no folder with a config.json on this machine")
    before = node.models.read()
    after = node.models.update(lambda registry: models.add(registry, wanted, now()))
    new = wanted.model_id not in before.models
    if new:
        node.journal.record("model_added", None, f"Model {wanted.model_id} added", model=wanted.model_id)
    return of(node, after.get(wanted.model_id)), new


def remove(node: Node, model_id: str, keep_files: bool) -> dict[str, Any]:
    """Forget a model and delete what the cache has of it; a folder or package is left where it is.

    Raises: Problem MODEL_IN_USE while an instance has it, MODEL_BUSY while a job works on it.
    """
    model = known(node, model_id)

    def change(registry: Models) -> Models:
        model = registry.models.get(model_id)
        refuse_used(node, model_id)
        if model is None:
            return registry
        models.refuse_busy(model)
        return models.remove(registry, model_id)

    last = of(node, model)
    node.models.update(change)
    manifest_path(node, model_id, model.revision).unlink(missing_ok=True)
    if not keep_files and not model_id.startswith("/"):
        hub.forget(model_id)
    node.journal.record("model_deleted", None, f"Model {model_id} deleted", model=model_id)
    return {**last, "status": "available", "downloaded": False}


def refuse_used(node: Node, model_id: str) -> None:
    users = [name for name, each in node.state.read().instances.items() if each.spec.model_id == model_id]
    if users:
        names = ", ".join(users[:10])
        raise Problem(
            Kind.CONFLICT, "MODEL_IN_USE", f"Model {quoted(model_id)} is used by {names}: delete the instance first"
        )


def download(node: Node, model_id: str) -> Job | None:
    """Begin to download a model; None when all of it is here already. Raises: Problem MODEL_BUSY, MODEL_NOT_FOUND."""
    model = known(node, model_id)
    models.refuse_busy(model)
    place = hub.locate(model_id, model.revision or None)
    if model_id.startswith("/") or (place and place.source != "hub"):
        return None  # a folder, or a package: it comes from elsewhere
    manifest = manifest_of(node, model_id, model.revision, place)
    if manifest and place and not manifests.changes(manifest, place.folder):
        return None
    return begin(node, model, "download")


def load(node: Node, model_id: str, given: Any) -> Job:
    """Begin to prove that a model loads, with the flags of the instance that uses it, and ``given`` on top.

    Raises: Problem MODEL_LOAD_FAILED unless its files are complete; MODEL_BUSY, MODEL_NOT_FOUND.
    """
    model = known(node, model_id)
    models.refuse_busy(model)
    fields = load_fields(node, model, given)
    place = hub.locate(model_id, model.revision or None)
    lacking = modelfiles.missing(place.folder) if place else ["everything"]
    if lacking:
        raise Problem(
            Kind.INTERNAL,
            "MODEL_LOAD_FAILED",
            f"Model {quoted(model_id)} is not downloaded: {', '.join(lacking[:5])} is missing; download it first",
        )
    return begin(node, model, "load", json.dumps(fields))


def load_fields(node: Node, model: Model, given: Any) -> dict[str, Any]:
    """The fields of an instance as which the model is tried. Raises: Problem when they are none."""
    users = [each.spec for each in node.state.read().instances.values() if each.spec.model_id == model.model_id]
    own = users[0].mapping() if users else {}
    fixed = {"name": "load", "model_id": model.model_id, "port": None, "prometheus_port": None, "replicas": 1}
    if model.revision:
        fixed["revision"] = model.revision
    if given is not None and not isinstance(given, dict):
        raise invalid("The body must be an object with fields of an instance, such as pooling, or be left out")
    for key in given or {}:
        if key in fixed:
            raise invalid(f"Field {quoted(key)} cannot be chosen for a load")
    spec = InstanceSpec.parse({**own, **(given or {}), **fixed})
    return {key: value for key, value in spec.mapping().items() if value is not None}


def begin(node: Node, model: Model, kind: str, fields: str = "") -> Job:
    def change(registry: Models) -> Models:
        return models.begin(models.add(registry, model, now()), model.model_id, kind, now(), fields)

    node.supervisor.require()
    job = node.models.update(change).get(model.model_id).job
    assert job is not None
    supervision.reconcile(node, {job.program})
    return job


def cancel(node: Node, model_id: str) -> dict[str, Any]:
    """End the job of a model; what was downloaded so far is kept for the next time. Without a job nothing changes."""
    model = known(node, model_id)
    if model.job:
        finish(node, model.job, f"Cancelled at {now()}")
        node.journal.record(
            "model_cancelled", None, f"The {model.job.kind} of {model_id} was cancelled", model=model_id
        )
    return show(node, model_id)


def finish(node: Node, job: Job, error: str = "") -> None:
    """Take a job out of the registry and out of supervisord."""
    node.models.update(lambda registry: models.end(registry, job.number, error))
    supervision.reconcile(node, {job.program})
    progress_path(node, job).unlink(missing_ok=True)
    log_path(node, job).unlink(missing_ok=True)


def log_path(node: Node, job: Job) -> Path:
    return Path(node.layout.log(job.program))


def wait(node: Node, job: Job, until: float) -> bool:
    """Until the job has ended, or ``until`` on the steady clock; whether it has ended."""
    settled = time.monotonic()
    while True:
        if node.models.read().job(job.number) is None:
            finish(node, job)
            return True
        if time.monotonic() >= until:
            return False
        if time.monotonic() - settled > SETTLE_SECS:
            settled = time.monotonic()
            settle(node)
        time.sleep(POLL_SECS)


def settle(node: Node) -> None:
    """End the jobs whose process supervisord has given up, and clear away what those that ended left behind."""
    running = node.models.read().running
    table = {process.name: process for process in node.supervisor.processes()}
    for job in running:
        process = table.get(job.program)
        if process is None:
            supervision.reconcile(node, {job.program})
        elif process.state in ("FATAL", "EXITED", "UNKNOWN") and node.models.read().job(job.number):
            tail = "\n".join(logs.tail(log_path(node, job), LAST_LINES))
            finish(node, job, f"Its process {process.ending}. Last log lines:\n{tail}")
    wanted = {job.program for job in running}
    if any(name.startswith("job.") and name not in wanted and each.state not in ALIVE for name, each in table.items()):
        supervision.reconcile(node)
    kept = {f"{job.number}" for job in running}
    for path in Path(node.layout.jobs).glob("*.json"):
        if path.stem not in kept:
            path.unlink(missing_ok=True)
