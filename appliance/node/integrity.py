"""Whether a model's files are still what they were when they were proved."""

from __future__ import annotations

from pathlib import Path

from appliance.core import models
from appliance.core.layout import Layout
from appliance.core.problems import Kind, Problem, quoted
from appliance.drivers import hub, manifests, modelfiles
from appliance.drivers.manifests import Manifest

FORGET = (
    "if you changed it on purpose, forget the model and keep its files (DELETE /models/ID?keep_files=true), add it "
    "again (POST /models), and load it"
)
ADVICE, ADVICE_ADDED = f"Download it again, or, {FORGET}", f"Take it away, or, {FORGET}"
WAS_ADDED = "was added since it was verified"
CACHE_FLAG, CACHE_VARIABLE = "--huggingface-hub-cache", "HUGGINGFACE_HUB_CACHE"  # TEI's


def refuse_changed(data_dir: str, model_id: str, revision: str | None, cache: str | None = None) -> None:
    """Raises: Problem MODEL_CHANGED that names the file. A model without a manifest was never verified, and passes.

    cache: of the hub, where the replica reads another one than ours.
    """
    place = hub.locate(model_id, revision, cache)
    manifest = manifests.kept(Layout(data_dir), model_id, revision or "", place.commit) if place else None
    if manifest is None or place is None:
        return
    words = ""
    if change := manifests.differing(manifest, place.folder, manifests.changes(manifest, place.folder)):
        words = f"{change.name} {change.why}. {ADVICE}"
    elif names := added(manifest, place.folder):
        words = f"{names[0]} {WAS_ADDED}. {ADVICE_ADDED}"
    if words:
        raise Problem(Kind.CONFLICT, "MODEL_CHANGED", f"Model {quoted(model_id)} does not start: {words}")


def added(manifest: Manifest, folder: Path) -> list[str]:
    """Files that serving would read and that were not there when the model was verified: a `modules.json` makes another
    model of the same weights. TEI itself fetches what the hub has of a commit, as links to its blobs."""
    if manifest.others is None:
        return []
    known = {entry.name for entry in manifest.files}.union(manifest.others)
    try:
        needed = models.needed([file.name for file in modelfiles.serving_files(folder)], allow_pickle=True)
    except Problem:
        return []  # it lacks what serving needs, which others say
    return [name for name in needed if name not in known and manifests.hub_digest(folder / name) is None]
