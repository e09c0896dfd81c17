"""The registry of models as a value: what is added, the job at work, how a verification counts, and the file of it."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from appliance.core import models
from appliance.core.models import Model, Models, Verification
from appliance.core.problems import Kind, Problem

NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
PROVED = Verification(at=NOW, fingerprint="f", dimensions=384, load_secs=1.5, memory=7)
FAILED = Verification(at=LATER, fingerprint="f", error="it crashed")


def registry(*ids: str) -> Models:
    known = Models()
    for model_id in ids:
        known = models.add(known, Model(model_id), NOW)
    return known


def refused(kind: Kind, code: str, change: Any) -> str:
    with pytest.raises(Problem) as caught:
        change()
    assert (caught.value.kind, caught.value.code) == (kind, code)
    return caught.value.message


# -- what somebody asks to add ----------------------------------------------------------------------------------------

RIGHT: list[tuple[dict[str, Any], Model]] = [
    ({"model_id": "a"}, Model("a")),
    ({"model_id": "org/name"}, Model("org/name")),
    ({"model_id": "/models/one"}, Model("/models/one")),
    ({"model_id": "a", "revision": None}, Model("a")),
    ({"model_id": "a", "revision": "refs/pr/1"}, Model("a", "refs/pr/1")),
]
WRONG: list[tuple[Any, str]] = [
    (7, "A model must be an object with its fields, not 7"),
    ({}, 'Field "model_id" is required'),
    ({"model_id": None}, 'Field "model_id" is required'),
    ({"modelid": "a"}, 'Unknown field "modelid" (did you mean "model_id"?)'),
    ({"model_id": 7}, 'Field "model_id" must be text, not 7'),
    ({"model_id": "-x"}, 'Field "model_id" must be a hub id ("org/name") or the absolute path of a folder, not "-x"'),
    (
        {"model_id": "/a/../b"},
        "Field \"model_id\" must be a plain absolute path, without '.' and '..', not \"/a/../b\"",
    ),
    ({"model_id": "a", "revision": ""}, 'Field "revision" must have 1 to 256 characters, not 0'),
    ({"model_id": "a", "revision": "a..b"}, 'Field "revision" must be a branch, tag or commit, not "a..b"'),
]


@pytest.mark.parametrize(("body", "model"), RIGHT)
def test_a_model_that_is_asked_for(body: dict[str, Any], model: Model) -> None:
    assert models.parse(body) == model


@pytest.mark.parametrize(("body", "words"), WRONG)
def test_what_is_no_model_is_refused_by_its_field(body: Any, words: str) -> None:
    assert refused(Kind.INVALID, "VALIDATION_ERROR", lambda: models.parse(body)) == words


# -- adding and removing ----------------------------------------------------------------------------------------------


def test_models_are_sorted_and_keep_the_moment_of_their_first_addition() -> None:
    known = models.add(registry("b", "a"), Model("a"), LATER)
    assert list(known.models) == ["a", "b"]
    assert known.get("a").added_at == NOW


def test_another_revision_makes_a_model_unproved() -> None:
    known = models.with_model(registry("a"), Model("a", "main", NOW, "no net", None, PROVED, NOW))
    assert models.add(known, Model("a", "main"), LATER) is known
    assert models.add(known, Model("a"), LATER) is known
    other = models.add(known, Model("a", "v2"), LATER).get("a")
    assert (other.revision, other.verification, other.download_error) == ("v2", None, "")


def test_what_is_not_there_is_named_with_its_nearest() -> None:
    for change in (registry("org/one").get, lambda name: models.remove(registry("org/one"), name)):
        words = refused(Kind.NOT_FOUND, "MODEL_NOT_FOUND", lambda change=change: change("org/on"))
        assert '"org/on"' in words
        assert 'did you mean "org/one"' in words
    assert models.remove(registry("a", "b"), "a").models.keys() == {"b"}


# -- jobs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "verb"), [("download", "downloaded"), ("load", "loaded")])
def test_a_model_has_one_job_at_a_time(kind: str, verb: str) -> None:
    busy = models.begin(registry("a"), "a", kind, NOW, "{}")
    found = busy.job(1)
    assert found is not None
    assert (found[0].model_id, found[1].kind, found[1].fields) == ("a", kind, "{}")
    assert busy.running == [found[1]]
    words = refused(Kind.CONFLICT, "MODEL_BUSY", lambda: models.begin(busy, "a", "load", LATER))
    assert f"is being {verb} since {NOW}" in words
    refused(Kind.CONFLICT, "MODEL_BUSY", lambda: models.add(busy, Model("a", "v2"), LATER))
    assert models.add(busy, Model("a"), LATER) is busy


def test_job_numbers_rise_for_ever_and_an_ended_job_ends_once() -> None:
    first = models.begin(registry("a"), "a", "download", NOW)
    ended = models.end(first, 1, download_error="x" * 5000)
    assert (ended.get("a").job, len(ended.get("a").download_error)) == (None, models.LONGEST_ERROR)
    second = models.begin(ended, "a", "load", LATER)
    assert second.jobs == 2
    assert second.get("a").download_error == ""
    assert models.end(second, 1, download_error="late") is second  # it was cancelled meanwhile


def test_the_last_load_that_worked_is_remembered() -> None:
    proved = models.end(models.begin(registry("a"), "a", "load", NOW), 1, verification=PROVED)
    failed = models.end(models.begin(proved, "a", "load", LATER), 2, verification=FAILED)
    assert (proved.get("a").last_verified, failed.get("a").last_verified) == (NOW, NOW)
    assert failed.get("a").verification == FAILED


def test_a_download_ends_what_a_load_that_failed_has_said() -> None:
    """A load that worked was of the files that a download finds whole."""
    for verification, left in ((FAILED, None), (PROVED, PROVED)):
        loaded = models.end(models.begin(registry("a"), "a", "load", NOW), 1, verification=verification)
        ended = models.downloaded(models.begin(loaded, "a", "download", LATER), 2)
        assert (ended.get("a").job, ended.get("a").verification) == (None, left)
        assert models.downloaded(ended, 2) is ended


# -- status: the table at the top of core/models.py, by hand ----------------------------------------------------------


@pytest.mark.parametrize("job", [None, "download", "load"])
@pytest.mark.parametrize(("complete", "wrong"), itertools.product([False, True], repeat=2))
@pytest.mark.parametrize(
    ("verification", "proved"),
    [(None, "downloaded"), (PROVED, "verified"), (FAILED, "failed"), (replace(PROVED, fingerprint="g"), "downloaded")],
)
def test_the_status_is_that_of_the_table(
    job: str | None, complete: bool, wrong: bool, verification: Verification | None, proved: str
) -> None:
    model = Model("a", verification=verification)
    if job:
        model = models.begin(models.with_model(Models(), model), "a", job, NOW).get("a")
    on_disk = "available" if not complete else "failed" if wrong else proved
    expected = {"download": "downloading", "load": "loading"}[job] if job else on_disk
    assert models.status(model, complete, wrong, "f") == expected


# -- which files serving needs ----------------------------------------------------------------------------------------

CONFIG = ["config.json", "tokenizer.json"]
NEEDED: list[tuple[list[str], bool, list[str]]] = [
    (["model.safetensors"], False, ["model.safetensors"]),
    (["model.safetensors", "onnx/model.onnx", "pytorch_model.bin"], True, ["model.safetensors"]),
    (["onnx/model.onnx", "pytorch_model.bin"], True, ["onnx/model.onnx"]),
    (["pytorch_model.bin"], True, ["pytorch_model.bin"]),
    (
        ["model.safetensors", "2_Dense/model.safetensors", "flax/model.safetensors"],
        False,
        ["2_Dense/model.safetensors", "model.safetensors"],
    ),
    (["model.safetensors", "modules.json", "README.md", "modeling.py"], False, ["model.safetensors", "modules.json"]),
    (["model.safetensors", "processor_config.json"], False, ["model.safetensors", "processor_config.json"]),
    *(
        (["onnx/model.onnx", "onnx/model_int8.onnx", beside], False, ["onnx/model.onnx", beside])
        for beside in ("onnx/model.onnx_data", "onnx/Constant_7_attr__value", "onnx/onnx__MatMul_12")
    ),
    *(
        (["model.onnx", "LICENSE", beside], False, ["model.onnx", beside])
        for beside in ("model.onnx_data", "model.onnx.data", "model.onnx_data_1", "Constant_7_attr__value")
    ),
    (  # of a graph that is not taken
        ["model.safetensors", "onnx/model.onnx", "onnx/model.onnx_data", "onnx/Constant_7_attr__value"],
        False,
        ["model.safetensors"],
    ),
]


@pytest.mark.parametrize(("names", "allow_pickle", "expected"), NEEDED)
def test_safetensors_come_before_onnx_before_pickles(names: list[str], allow_pickle: bool, expected: list[str]) -> None:
    assert models.needed([*CONFIG, *names], allow_pickle) == sorted([*CONFIG, *expected])
    assert all(models.may_be_served(name) for name in [*CONFIG, *expected])


UNSUITABLE: list[tuple[list[str], str]] = [
    (["tokenizer.json", "model.safetensors"], "no config.json"),
    (["config.json", "model.safetensors"], "no tokenizer.json"),
    ([*CONFIG, "pytorch_model.bin"], "allow_pickle"),
    ([*CONFIG, "2_Dense/model.safetensors"], "no weights"),
    (CONFIG, "no weights"),
]


@pytest.mark.parametrize(("names", "words"), UNSUITABLE)
def test_a_repository_that_cannot_be_served_says_what_it_lacks(names: list[str], words: str) -> None:
    assert words in refused(Kind.INVALID, "MODEL_UNSUITABLE", lambda: models.needed(names, allow_pickle=False))


@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "modeling.py", "flax/model.safetensors", "onnx/model_quantized.onnx"),
        *("onnx/w\udcff", "onnx/a\nb"),  # no text: of a byte that is no UTF-8, or several lines
    ],
)
def test_what_serving_does_not_read_is_not_wanted(name: str) -> None:
    assert not models.may_be_served(name)


def test_missing_files_are_those_that_serving_needs() -> None:
    assert models.missing([*CONFIG, "model.onnx"], [], []) == []
    assert models.missing([], [], []) == [*CONFIG, "model.safetensors"]
    assert models.missing([*CONFIG, "a"], ["a", "b"], ["1_Pooling"]) == ["b", "1_Pooling/config.json"]


# -- the file ---------------------------------------------------------------------------------------------------------


def whole_registry() -> Models:
    known = models.with_model(registry("a", "b"), Model("c", "v1", NOW, "gone", None, PROVED, NOW, {"color": "red"}))
    return models.begin(replace(known, generation=9, extra={"newer": {"x": 1}}), "b", "load", LATER, '{"dtype": 1}')


def test_a_registry_comes_back_from_its_file_with_what_a_newer_release_wrote() -> None:
    known = whole_registry()
    plain = models.dump(known)
    assert models.load(plain) == known
    assert plain["newer"] == {"x": 1}
    assert plain["models"][2]["color"] == "red"


def test_what_is_no_registry_is_refused() -> None:
    plain = models.dump(whole_registry())
    cut = {**plain, "models": plain["models"][:-1]}
    twice = {**plain, "models": [plain["models"][0]] * 3}
    hostile = {**plain, "models": [{**each, "model_id": "/a/../b"} for each in plain["models"]]}
    old = {key: value for key, value in plain.items() if key != "generation"}
    for broken in (cut, twice, hostile, old, {**plain, "models": "none"}, {**plain, "jobs": -1}):
        with pytest.raises((ValueError, KeyError, Problem)):
            models.load(broken)
