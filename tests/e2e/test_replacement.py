"""Another spec for an instance in place: calls wait for its new processes, and no batch has vectors of two models."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from testing.calling import WAYS, calling_all_the_time
from testing.random_models import random_model
from testing.running import TINY, TINY_WIDTH, RunningAppliance, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300)]
OTHER_WIDTH = 64


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    with RunningAppliance(tmp_path_factory.mktemp("box"), seeds="") as running:
        yield running


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose vectors have another width."""
    return str(random_model(tmp_path_factory.mktemp("other") / "other", width=OTHER_WIDTH, layers=1, positions=64))


def patch(box: RunningAppliance, name: str, body: Any, **query: Any) -> Any:
    query = {"strategy": "in_place", **query}
    return requests.patch(f"{box.url}/instances/{name}", json=body, params=query, timeout=60)


def events(box: RunningAppliance, name: str) -> list[str]:
    return [each["event"] for each in box.get("/events").json() if each["instance"] == name]


def test_other_vectors_have_to_be_allowed(box: RunningAppliance, other: str) -> None:
    box.create("careful")
    before = box.wait_ready("careful")
    refused = patch(box, "careful", {"model_id": other})
    assert (refused.status_code, refused.json()["code"]) == (409, "INCOMPATIBLE")
    assert f"model {TINY} becomes {other}" in refused.json()["error"]
    assert box.instance("careful")["pid"] == before["pid"]
    would = patch(box, "careful", {"model_id": other}, allow_incompatible="true", dry_run="true")
    assert (would.status_code, would.json()["model_id"], would.json()["generation"]) == (200, other, 2)
    assert box.instance("careful")["model_id"] == TINY


def test_a_replacement_and_back(box: RunningAppliance, other: str) -> None:
    box.create("swapped")
    box.wait_ready("swapped")
    widths = []
    for body in ({"model_id": other}, {"model_id": TINY}):
        assert patch(box, "swapped", body, allow_incompatible="true").status_code == 200
        widths += [way(box, "swapped") for way in WAYS]
    assert widths == [OTHER_WIDTH] * len(WAYS) + [TINY_WIDTH] * len(WAYS)
    assert box.post("/instances/swapped/undo?strategy=in_place").json()["model_id"] == other
    assert WAYS[0](box, "swapped") == OTHER_WIDTH
    assert box.instance("swapped")["generation"] == 4
    assert events(box, "swapped").count("replaced") == 3
    assert not {"quarantined", "unhealthy", "fell_back"} & set(events(box, "swapped"))


def test_what_does_not_start_is_taken_back(box: RunningAppliance, tmp_path: Path) -> None:
    box.create("safe")
    box.wait_ready("safe")
    folder = tmp_path / "damaged"
    shutil.copytree(TINY, folder)
    (folder / "tokenizer.json").write_text("{}")  # found by the engine alone
    assert patch(box, "safe", {"model_id": str(folder)}, allow_incompatible="true").status_code == 200
    assert WAYS[0](box, "safe") == TINY_WIDTH  # which waits
    eventually(lambda: "fell_back" in events(box, "safe"), 90)
    assert WAYS[0](box, "safe") == TINY_WIDTH
    assert box.instance("safe")["model_id"] == TINY


def test_a_model_that_is_not_here_is_downloaded_first(box: RunningAppliance) -> None:
    box.create("hasty")
    refused = patch(box, "hasty", {"model_id": "nobody/nothing"}, allow_incompatible="true")
    assert (refused.status_code, refused.json()["code"]) == (409, "MODEL_NOT_DOWNLOADED")
    assert box.post("/instances/hasty/undo").json()["code"] == "NOTHING_TO_UNDO"


def test_no_call_fails_and_no_batch_is_mixed(box: RunningAppliance, other: str) -> None:
    """Six replacements under load: each reply is of one model as a whole."""
    box.create("mixed")
    box.wait_ready("mixed")
    with calling_all_the_time(box, "mixed") as widths:
        for model in (other, TINY) * 3:
            assert patch(box, "mixed", {"model_id": model}, allow_incompatible="true").status_code == 200
            box.wait_ready("mixed")
    assert set(widths) == {TINY_WIDTH, OTHER_WIDTH}


def test_an_unfit_model_is_refused_before_anything_ends(box: RunningAppliance, tmp_path: Path) -> None:
    box.create("kept")
    before = box.wait_ready("kept")
    folder = tmp_path / "half"
    shutil.copytree(TINY, folder)
    (folder / "model.safetensors").unlink()
    refused = patch(box, "kept", {"model_id": str(folder)}, allow_incompatible="true")
    assert refused.status_code == 422, refused.text
    assert box.instance("kept")["pid"] == before["pid"]


def test_of_many_who_change_it_at_once_none_undoes_what_another_has_done(box: RunningAppliance) -> None:
    """Each takes effect, or is told that another came first."""
    box.create("contended")
    box.wait_ready("contended")
    bodies: list[dict[str, Any]] = [{"max_concurrent_requests": 100 + number} for number in range(3)]
    bodies += [{"max_batch_tokens": 4096}, {"aliases": ["wanted"]}, {"idle_unload_secs": 7000}]
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(lambda body: patch(box, "contended", body), bodies))
    done = [body for body, answer in zip(bodies, answers, strict=True) if answer.status_code == 200]
    refused = [answer.json()["code"] for answer in answers if answer.status_code != 200]
    assert set(refused) <= {"CHANGED_MEANWHILE"}
    found = box.instance("contended")
    for body in done:
        for field, value in body.items():
            if field != "max_concurrent_requests":  # of which the last one counts
                assert found[field] == value
    assert found["generation"] - 1 == sum("aliases" not in each and "idle_unload_secs" not in each for each in done)
