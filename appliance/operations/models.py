"""The verbs of models: add, remove, download, load, cancel.

Only pins, jobs and verifications are stored (`core.models`). A job runs in a process of its own under supervisord and
ends by writing its result, which those that wait for it find in the registry. A job whose process is gone for good is
ended here, with the last lines of its log, so that no model stays busy.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from appliance.core import models
from appliance.core.events import Event
from appliance.core.instance import InstanceSpec
from appliance.core.layout import JOB_PREFIX
from appliance.core.log_lines import readable
from appliance.core.models import Job, Model, Models
from appliance.core.problems import Kind, Problem, invalid, quoted
from appliance.core.status import ALIVE, Process
from appliance.core.views import ModelView
from appliance.drivers import hub, logs, manifests, modelfiles
from appliance.node import model_overview as overview
from appliance.node.context import Node, now
from appliance.operations import supervision

POLL_SECS = 0.2
SETTLE_SECS = 5.0  # how often a caller that waits looks whether the job's process still lives
LAST_LINES = 10
FILES_SECS = 60.0


class Added(NamedTuple):
    """A model after it was registered, and whether it is new."""

    model: ModelView
    new: bool


def add(node: Node, body: Any) -> Added:
    """Register a model."""
    wanted = models.parse(body)
    if wanted.model_id.startswith("/") and not os.path.isfile(f"{wanted.model_id}/config.json"):
        raise invalid(f"{quoted(wanted.model_id)} is no folder with a config.json that can be read")
    change = node.models.update(partial(models.add, model=wanted, now=now()))
    new = wanted.model_id not in change.before.models
    if new:
        node.journal.record(Event.MODEL_ADDED, None, f"Model {wanted.model_id} added", model=wanted.model_id)
    return Added(overview.view_of(node, change.after.get(wanted.model_id)), new)


def remove(node: Node, model_id: str, keep_files: bool) -> ModelView:
    """Forget a model and delete what the cache has of it; a folder or package is left where it is.

    Raises: Problem MODEL_IN_USE while an instance has it, unless its files stay; MODEL_BUSY while a job works on it;
    DELETE_FAILED where files of it are left.
    """
    overview.require(node, model_id)
    with files_held(node):
        model = overview.require(node, model_id)  # as it is by now
        last = overview.view_of(node, model)
        if not keep_files:
            refuse_used(node, model_id)
            models.refuse_busy(model)
            if not model_id.startswith("/"):
                hub.forget(model_id)  # first: what is left of it can be deleted again
        try:
            node.models.update(partial(removed, model_id=model_id))
        except Problem as problem:
            if not (keep_files or model_id.startswith("/")):
                words = f"The files of {quoted(model_id)} are deleted, and it is registered still: {problem.message}"
                raise Problem(problem.kind, problem.code, words) from problem
            raise
        manifests.forget(node.layout, model_id, model.revision)
    node.journal.record(Event.MODEL_DELETED, None, f"Model {model_id} deleted", model=model_id)
    return last.gone()


@contextmanager
def files_held(node: Node) -> Iterator[None]:
    """While the block runs, nobody else deletes files of models, begins a job on them, or judges that they are there.

    Raises: Problem.
    """
    words = f"Another change to the files of models takes longer than {FILES_SECS:.0f} s: try again"
    taken = Problem(Kind.UNAVAILABLE, "MODEL_BUSY", words)
    with supervision.file_lock(node.layout.model_files_lock, FILES_SECS, taken):
        yield


def removed(registry: Models, model_id: str) -> Models:
    """The registry without a model, which may never have been in it. Raises: Problem MODEL_BUSY."""
    model = registry.models.get(model_id)
    if model is None:
        return registry
    models.refuse_busy(model)
    return models.remove(registry, model_id)


def refuse_used(node: Node, model_id: str) -> None:
    state = node.state.read()
    users = [each.name for each in state.generations if each.spec.model_id == model_id]
    for instance in state.instances.values():  # or it could not fall back
        if instance.falls_back and instance.previous and instance.previous.spec.model_id == model_id:
            users.append(instance.name)
    if users:
        names = ", ".join(sorted(set(users))[:10])
        raise Problem(
            Kind.CONFLICT, "MODEL_IN_USE", f"Model {quoted(model_id)} is used by {names}: delete the instance first"
        )


def download(node: Node, model_id: str) -> Job | None:
    """Begin to download a model; None when all of it is here already. Raises: Problem MODEL_BUSY, MODEL_NOT_FOUND."""
    model = overview.require(node, model_id)
    models.refuse_busy(model)
    place = hub.locate(model_id, model.revision or None)
    if model_id.startswith("/") or (place and place.source != "hub"):
        return None  # a folder, or a package: it comes from elsewhere
    manifest = overview.manifest_of(node, model_id, model.revision, place)
    if manifest and place and not manifests.changes(manifest, place.folder):
        return None
    return begin(node, model, "download")


def load(node: Node, model_id: str, body: Any) -> Job:
    """Begin to prove that a model loads, with the flags of the instance that uses it, and those in ``body`` on top.

    Raises: Problem MODEL_LOAD_FAILED unless its files are complete; MODEL_BUSY, MODEL_NOT_FOUND.
    """
    model = overview.require(node, model_id)
    models.refuse_busy(model)
    chosen = load_fields(node, model, body)
    place = hub.locate(model_id, model.revision or None)
    lacking = modelfiles.missing(place.folder) if place else ["everything"]
    if lacking:
        raise Problem(
            Kind.INTERNAL,
            "MODEL_LOAD_FAILED",
            f"Model {quoted(model_id)} is not downloaded: {', '.join(lacking[:5])} is missing; download it first",
        )
    return begin(node, model, "load", json.dumps(chosen))


def load_fields(node: Node, model: Model, body: Any) -> dict[str, Any]:
    """The fields of an instance as which the model is tried. Raises: Problem when they are none."""
    users = [each.spec for each in node.state.read().generations if each.spec.model_id == model.model_id]
    own = users[0].mapping() if users else {}
    fixed = {"name": "load", "model_id": model.model_id, "port": None, "prometheus_port": None, "replicas": 1}
    if model.revision:
        fixed["revision"] = model.revision
    if body is not None and not isinstance(body, dict):
        raise invalid("The body must be an object with fields of an instance, such as pooling, or be left out")
    for key in body or {}:
        if key in fixed:
            raise invalid(f"Field {quoted(key)} cannot be chosen for a load")
    spec = InstanceSpec.parse({**own, **(body or {}), **fixed})
    return {key: value for key, value in spec.mapping().items() if value is not None}


def begin(node: Node, model: Model, kind: str, fields: str = "") -> Job:
    node.supervisor.require()
    job = enlist(node, model, kind, fields)
    supervision.reconcile(node, {job.program})
    return job


def enlist(node: Node, model: Model, kind: str, fields: str = "") -> Job:
    """Put a job into the registry, for supervisord to start at the next reconcile, or when it starts itself."""
    with files_held(node):
        change = node.models.update(partial(begun, model=model, kind=kind, now=now(), fields=fields))
    job = change.after.get(model.model_id).job
    assert job is not None
    return job


def begun(registry: Models, model: Model, kind: str, now: str, fields: str) -> Models:
    """The registry with a job for a model, which is added where only the cache had it."""
    return models.begin(models.add(registry, model, now), model.model_id, kind, now, fields)


def cancel(node: Node, model_id: str) -> ModelView:
    """End the job of a model; what was downloaded so far is kept for the next time, and a load that was cancelled says
    nothing of the model. Without a job nothing changes."""
    model = overview.require(node, model_id)
    if model.job:
        if model.job.kind == "download":
            fail(node, model, model.job, f"Cancelled at {now()}")
        finish(node, model.job)
        node.journal.record(
            Event.MODEL_CANCELLED, None, f"The {model.job.kind} of {model_id} was cancelled", model=model_id
        )
    return overview.show(node, model_id)


def fail(node: Node, model: Model, job: Job, why: str) -> None:
    """Take a job out of the registry and write down why it failed: as that of the download, or of the verification.
    Raises: Problem, OSError."""
    result: dict[str, Any] = {"download_error": why}
    if job.kind == "load":
        place = hub.locate(model.model_id, model.revision or None)
        manifest = overview.manifest_of(node, model.model_id, model.revision, place)
        result = {"verification": models.Verification(now(), manifest.fingerprint if manifest else "", why)}
    node.models.update(partial(models.end, number=job.number, **result))


def finish(node: Node, job: Job) -> None:
    """Take a job out of supervisord, and out of the registry where it has not ended there."""
    node.models.update(partial(models.end, number=job.number))
    supervision.reconcile(node, {job.program})
    overview.progress_path(node, job).unlink(missing_ok=True)
    log_path(node, job).unlink(missing_ok=True)
    Path(node.layout.backend_log(job.number)).unlink(missing_ok=True)  # of a load that was cancelled


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
    running = [(model, model.job) for model in node.models.read().models.values() if model.job]
    table = {process.name: process for process in node.supervisor.processes()}
    for model, job in running:
        process = table.get(job.program)
        if process is None:
            supervision.reconcile(node, {job.program})
        elif why := why_given_up(node, job, process):
            fail(node, model, job, why)
            finish(node, job)
    wanted = {job.program for _, job in running}
    if any(
        name.startswith(JOB_PREFIX) and name not in wanted and each.state not in ALIVE for name, each in table.items()
    ):
        supervision.reconcile(node, ())  # others may be at an instance that stops slowly
    kept = {f"{job.number}" for _, job in running}
    for path in Path(node.layout.jobs).glob("*.json"):
        if path.stem not in kept:
            path.unlink(missing_ok=True)


def why_given_up(node: Node, job: Job, process: Process) -> str:
    """Why the process of a job does no more work on it; empty when it does, or when its result is there."""
    if process.state == "STOPPED" and process.started:
        why = "It was stopped with supervisorctl"
    elif process.state in ("FATAL", "EXITED", "UNKNOWN"):
        tail = "\n".join(readable(logs.tail(log_path(node, job), LAST_LINES)))
        why = f"Its process {process.ending}. Last log lines:\n{tail}"
    else:
        return ""
    return why if node.models.read().job(job.number) else ""
