"""Whether a model's files are still what they were when they were proved."""

from __future__ import annotations

from pathlib import Path

from appliance.core import models
from appliance.core.layout import Layout
from appliance.core.problems import Kind, Problem, quoted
from appliance.drivers import hub, manifests, modelfiles
from appliance.drivers.manifests import Change, Manifest

ADVICE = (
    "Download it again, or, if you changed it on purpose, forget the model and keep its files "
    "(DELETE /models/ID?keep_files=true), and load it anew"
)
CACHE_FLAG, CACHE_VARIABLE = "--huggingface-hub-cache", "HUGGINGFACE_HUB_CACHE"  # TEI's


def refuse_changed(data_dir: str, model_id: str, revision: str | None, cache: str | None = None) -> None:
    """Raises: Problem MODEL_CHANGED that names the file. A model without a manifest was never verified, and passes.

    cache: of the hub, where the replica reads another one than ours.
    """
    path = Path(Layout(data_dir).manifest(model_id, revision or ""))
    manifest = manifests.read(path)
    place = hub.locate(model_id, revision, cache) if manifest else None
    if manifest is None or place is None or manifest.commit != place.commit:
        return
    if change := difference(path, manifest, place.folder):
        raise Problem(
            Kind.CONFLICT,
            "MODEL_CHANGED",
            f"Model {quoted(model_id)} does not start: {change.name} {change.why}. {ADVICE}",
        )


def difference(path: Path, manifest: Manifest, folder: Path) -> Change | None:
    """The first file that is not as it was proved. Files whose time alone is another one are read; see `manifests`.

    path: of the manifest. Raises: OSError.
    """
    suspects = [*manifests.changes(manifest, folder), *added(path, manifest, folder)]
    return manifests.differing(manifest, folder, suspects)


def added(path: Path, manifest: Manifest, folder: Path) -> list[Change]:
    """Files that serving would read and that are newer than the manifest: a `modules.json` makes another model of the
    same weights. Older ones were known to those who wrote it, and TEI itself fetches what the hub has of a commit."""
    known = {entry.name for entry in manifest.files}
    names = [file.name for file in modelfiles.serving_files(folder)]
    try:
        others = set(models.needed(names, allow_pickle=False)) - known
        written = path.stat().st_mtime_ns
        newer = [name for name in sorted(others) if (folder / name).lstat().st_ctime_ns > written]
        ours = [name for name in newer if manifests.hub_digest(folder / name, 0) is None]
    except (OSError, Problem):
        return []  # it has just been replaced, or lacks what serving needs, which others say
    return [Change(name, "was added since it was verified: take it away", certain=True) for name in ours]
