"""Whether a model's files are still what they were when they were proved."""

from __future__ import annotations

from pathlib import Path

from appliance.core.layout import Layout
from appliance.core.problems import Kind, Problem, quoted
from appliance.drivers import hub, manifests

CACHE_FLAG, CACHE_VARIABLE = "--huggingface-hub-cache", "HUGGINGFACE_HUB_CACHE"  # TEI's


def refuse_changed(data_dir: str, model_id: str, revision: str | None, cache: str | None = None) -> None:
    """Raises: Problem MODEL_CHANGED that names the file. A model without a manifest was never verified, and passes.

    cache: of the hub, where the replica reads another one than ours.
    """
    manifest = manifests.read(Path(Layout(data_dir).manifest(model_id, revision or "")))
    place = hub.locate(model_id, revision, cache) if manifest else None
    if manifest is None or place is None or manifest.commit != place.commit:
        return
    if change := manifests.differing(manifest, place.folder, manifests.changes(manifest, place.folder)):
        raise Problem(
            Kind.CONFLICT,
            "MODEL_CHANGED",
            f"Model {quoted(model_id)} does not start: {change.name} {change.why}. Download it again, or, if you "
            "changed it on purpose, delete the model (DELETE /models/ID?keep_files=true) and load it anew",
        )
