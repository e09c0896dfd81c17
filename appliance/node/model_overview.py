"""What is true of models now: what the registry says of them, and what this machine has of their files."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, fields
from pathlib import Path

from appliance.core import models
from appliance.core.model_names import registered_id
from appliance.core.models import Job, Model
from appliance.core.problems import invalid
from appliance.core.state import Instance
from appliance.core.views import FileView, JobProgress, ModelView, VerificationView
from appliance.drivers import hub, manifests, modelfiles
from appliance.drivers.hub import ModelLocation
from appliance.drivers.manifests import Change, Manifest
from appliance.node import integrity
from appliance.node.context import Node, rfc3339


def show_all(node: Node) -> list[ModelView]:
    """Every model that was added or that this machine has, sorted by id."""
    registry = node.models.read()
    present = [*hub.cached_ids(), *(each for each in hub.PACKAGES if hub.packaged(each))]
    return [view_of(node, registry.models.get(each) or Model(each)) for each in sorted({*registry.models, *present})]


def show(node: Node, model_id: str) -> ModelView:
    return view_of(node, require(node, model_id))


def require(node: Node, model_id: str) -> Model:
    """A model that was added, or that the cache or a package has. Raises: Problem MODEL_NOT_FOUND, or invalid id."""
    model_id = valid_id(model_id)
    registry = node.models.read()
    if model_id in registry.models:
        return registry.models[model_id]
    if not model_id.startswith("/") and hub.locate(model_id):  # a folder is not looked into unless it was added
        return Model(model_id)
    raise models.not_found(model_id, registry.models)


def valid_id(model_id: str) -> str:
    try:
        name: str = registered_id(model_id)
        return name
    except ValueError as error:
        raise invalid(f"A model id {error}") from None


@dataclass(frozen=True)
class OnDisk:
    """What this machine has of a model's files; nothing without a place."""

    place: ModelLocation | None
    manifest: Manifest | None
    changed: Change | None
    lacking: list[str]
    wrong: str  # why the files are no model's, or empty

    @classmethod
    def of_model(cls, node: Node, model: Model) -> OnDisk:
        place = hub.locate(model.model_id, model.revision or None)
        if place is None:
            return cls(None, None, None, ["everything"], "")
        manifest = manifest_of(node, model.model_id, model.revision, place)
        lacking, changed = modelfiles.missing(place.folder), None
        if manifest:
            lacking = lacking or [file.name for file in manifest.files if not (place.folder / file.name).exists()]
            changed = first_change(manifest, place)
        return cls(place, manifest, changed, lacking, modelfiles.wrong(place.folder))

    @property
    def complete(self) -> bool:
        return not self.lacking

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint if self.manifest else ""

    @property
    def files(self) -> tuple[FileView, ...]:
        sums = {entry.name: entry.sha256 for entry in self.manifest.files} if self.manifest else {}
        listed = modelfiles.serving_files(self.place.folder) if self.place else []
        return tuple(FileView(file.name, file.size, sums.get(file.name)) for file in listed)


def view_of(node: Node, model: Model) -> ModelView:
    """A model; every value is computed now."""
    disk = OnDisk.of_model(node, model)
    place, files = disk.place, disk.files
    return ModelView(
        model_id=model.model_id,
        revision=model.revision or None,
        commit=(place.commit or None) if place else None,
        source=place.source if place else None,
        status=models.status(model, disk.complete, bool(disk.changed or disk.wrong), disk.fingerprint),
        downloaded=disk.complete,
        cache_path=str(place.folder) if place else None,
        cache_size_bytes=sum(file.size for file in files) if place else None,
        files=files,
        progress=progress(node, model.job) if model.job else None,
        metadata=modelfiles.metadata(place.folder) if place else None,
        last_verified=model.last_verified or None,
        verification_error=verification_error(model, disk),
        verification=verification_view(model, disk.fingerprint),
        download_error=model.download_error or None,
        added_at=model.added_at or since_when(place),
    )


def first_change(manifest: Manifest, place: ModelLocation) -> Change | None:
    """The first file that is not as it was proved, as far as its size and time tell: no file is read."""
    if changes := manifests.changes(manifest, place.folder):
        return next((each for each in changes if each.certain), changes[0])
    added = integrity.added(manifest, place.folder)
    return Change(added[0], integrity.WAS_ADDED, certain=True) if added else None


def since_when(place: ModelLocation | None) -> str:
    """When a model that nobody added came to this machine, by the time of its folder."""
    try:
        changed = place.folder.stat().st_mtime if place else time.time()
    except OSError:
        changed = time.time()  # it has just been deleted
    return rfc3339(changed)


def verification_view(model: Model, fingerprint: str) -> VerificationView | None:
    """Of a load that worked, with the files that are there now."""
    verification = model.verification
    if verification is None or verification.error or verification.fingerprint != fingerprint:
        return None
    return VerificationView(
        dimensions=verification.dimensions or None,
        load_secs=round(verification.load_secs, 3),
        memory_bytes=verification.memory,
        gpu_memory_bytes=verification.gpu_memory or None,
    )


def verification_error(model: Model, disk: OnDisk) -> str | None:
    if disk.wrong:
        return disk.wrong
    if disk.changed:
        return f"{disk.changed.name} {disk.changed.why}"
    verification = model.verification
    # That of other files says nothing of these.
    return (verification.error or None) if verification and verification.fingerprint == disk.fingerprint else None


def manifest_of(node: Node, model_id: str, revision: str, place: ModelLocation | None) -> Manifest | None:
    """The manifest of these very files: of the same commit, where they are the hub's."""
    return manifests.kept(node.layout, model_id, revision, place.commit) if place else None


def digests(node: Node, instance: Instance) -> dict[str, str]:
    """SHA-256 of each file of an instance's model, by name; empty for a model that was never verified."""
    spec = instance.spec
    place = hub.locate(spec.model_id, spec.revision)
    manifest = manifest_of(node, spec.model_id, spec.revision or "", place)
    return {entry.name: entry.sha256 for entry in manifest.files} if manifest else {}


def progress_path(node: Node, job: Job) -> Path:
    return Path(node.layout.job_progress(job.number))


def progress(node: Node, job: Job) -> JobProgress:
    """What the job last wrote of itself."""
    try:
        written = json.loads(progress_path(node, job).read_text())
        return JobProgress(**{field.name: written[field.name] for field in fields(JobProgress)})
    except (OSError, ValueError, KeyError, TypeError):
        return JobProgress()
