"""Download a model: list, choose, make room, fetch file by file, prove each digest, and only then let it be seen."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from appliance.core import models as registry
from appliance.core.events import Event
from appliance.core.models import Job, Model
from appliance.core.problems import Problem, invalid, quoted
from appliance.drivers import hub, hubfetch, manifests
from appliance.drivers.hubfetch import Listing, RemoteFile, Repository
from appliance.drivers.manifests import Manifest
from appliance.files.checksum import sha256_of
from appliance.jobs.progress import ProgressFile
from appliance.node import model_overview
from appliance.node.context import Node
from appliance.operations import supply

log = logging.getLogger(__name__)


def download(node: Node, model: Model, job: Job) -> None:
    """Raises: Problem, when the hub, the way there, the disk or the model itself refuses."""
    revision = model.revision or "main"
    with ProgressFile(model_overview.progress_path(node, job), "listing") as progress:
        listing = hubfetch.listing(model.model_id, revision)
        files = chosen(model.model_id, node.settings.allow_pickle, listing)
        repository = Repository(model.model_id, hub.repository_folder(model.model_id))
        repository.refuse_without_room(files)
        progress.total, progress.step = sum(file.size for file in files), "downloading"
        for file in files:
            fetch(repository, listing.commit, file, progress)
        progress.step = "publishing"
        snapshot = repository.publish(revision, listing.commit, files)
        others = tuple(sorted({file.name for file in listing.files} - {file.name for file in files}))
        keep_manifest(node, model, listing.commit, snapshot, files, others)
        supply.supplied(node, model.model_id)
    node.models.update(partial(registry.downloaded, number=job.number))
    message = f"Model {model.model_id} downloaded: {len(files)} files, {progress.total} bytes, commit {listing.commit}"
    node.journal.record(Event.MODEL_DOWNLOADED, None, message, model=model.model_id)


def chosen(model_id: str, allow_pickle: bool, listing: Listing) -> list[RemoteFile]:
    """What serving needs. Raises: Problem."""
    try:
        names = set(registry.needed([file.name for file in listing.files], allow_pickle))
    except Problem as problem:
        raise invalid(f"Model {quoted(model_id)} cannot be served: {problem.message}", problem.code) from problem
    return [file for file in listing.files if file.name in names]


def fetch(repository: Repository, commit: str, file: RemoteFile, progress: ProgressFile) -> None:
    def watch(growing: Path | None) -> None:
        progress.measure = (lambda: size_of(growing)) if growing else (lambda: 0)

    log.info("%s: %s bytes", file.name, file.size)
    repository.fetch(commit, file, watch)
    progress.done += file.size


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # it has just become the blob


def keep_manifest(
    node: Node, model: Model, commit: str, snapshot: Path, files: list[RemoteFile], others: tuple[str, ...]
) -> None:
    """Of files whose digests were just compared with the hub's; small ones are listed there with another kind. others:
    what the hub has besides."""
    entries = []
    for file in sorted(files, key=lambda file: file.name):
        sha256 = file.digest if len(file.digest) == 64 else sha256_of(snapshot / file.name)
        entries.append(manifests.entry_of(snapshot, file.name, sha256))
    manifests.keep(node.layout, Manifest(model.model_id, model.revision, commit, tuple(entries), others))
