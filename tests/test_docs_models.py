"""The page of models has every family that the engine builds, with the tasks that its heads give."""

import json
import re

import pytest

from appliance.core.families import FAMILIES, architecture_of
from testing.engines import FAMILIES as FOLDERS
from testing.engines import IMAGES
from tests.pages import PAGES, planted, rows, section

HEADS = {"SPLADE": "language_head", "reranker": "score_head", "classifier": "score_head"}


def listed(page: str) -> dict[str, list[str]]:
    """model type -> tasks; the first row that has it counts."""
    found: dict[str, list[str]] = {}
    for row in rows(section(page, "## Families")):
        for kind in re.findall(r"`([\w-]+)`", row.cells[1]):
            found.setdefault(kind, row.cells[3].partition(":")[0].split(", "))
    return found


def able(kind: str) -> list[str]:
    """The tasks of a model type, by its first reference model."""
    folders = [*sorted(FOLDERS.iterdir()), IMAGES / "clip", IMAGES / "siglip"]
    configs = (json.loads((folder / "config.json").read_text()) for folder in folders)
    architecture = architecture_of(
        next(config for config in configs if FAMILIES[config["model_type"]] is FAMILIES[kind])
    )
    return ["dense", *(task for task, head in HEADS.items() if getattr(architecture, head))]


def wrong_families(page: str) -> list[str]:
    told = listed(page)
    missing = [f"{kind} is missing" for kind in FAMILIES if kind not in told]
    missing += [f"{kind} is unknown" for kind in told if kind not in FAMILIES]
    return missing or [f"{kind}: {tasks}" for kind, tasks in told.items() if tasks != able(kind)]


def test_every_family_has_a_row_with_its_tasks() -> None:
    assert wrong_families(PAGES["models.md"]) == []


@pytest.mark.parametrize(("old", "new"), [("`nomic_bert`", "`nomic`"), ("embeddinggemma | dense", "x | dense, SPLADE")])
def test_a_wrong_row_is_found(old: str, new: str) -> None:
    assert wrong_families(planted("models.md", old, new))
