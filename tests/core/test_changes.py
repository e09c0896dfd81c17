"""Fields that change while the processes of an instance stay."""

from dataclasses import replace
from typing import Any

import pytest

from appliance.core import generations, state
from appliance.core.instance import CHANGEABLE, InstanceSpec
from appliance.core.problems import Problem
from appliance.core.program import programs_of
from appliance.core.state import State
from testing.specs import configured

SETTINGS = configured()
OTHER: dict[str, Any] = {
    "aliases": ["embedder"],
    "cache": False,
    "default": True,
    "download": "never",
    "express": True,
    "idle_unload_secs": 60,
    "start": "on_demand",
    "startup_timeout_secs": 7,
    "token_ids": "refuse",
    "undo_secs": 5,
}


def existing() -> State:
    return state.add(State(), InstanceSpec.parse({"name": "a", "model_id": "org/m"}), SETTINGS, (), "now")


def test_every_field_that_may_change_is_tried() -> None:
    assert sorted(OTHER) == sorted(CHANGEABLE)


@pytest.mark.parametrize("field", CHANGEABLE)
def test_a_field_changes_and_the_programs_are_the_same(field: str) -> None:
    before = existing().get("a")
    after = generations.change(existing(), "a", {field: OTHER[field]}).get("a")
    assert after.spec.mapping()[field] == OTHER[field]
    assert replace(after, spec=before.spec) == before
    assert programs_of(after, SETTINGS, "python", "id") == programs_of(before, SETTINGS, "python", "id")
    again = generations.change(generations.change(existing(), "a", {field: OTHER[field]}), "a", {field: None})
    assert again.get("a") == before


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"replicas": 2}, 'Field "replicas" needs new processes'),
        ({"model_id": "org/other", "cache": False}, 'Field "model_id" needs new processes'),
        ({"name": "b"}, 'Field "name" needs new processes'),
        ({"nonsense": 1}, "nonsense"),
        ({"start": "tomorrow"}, "start"),
        ({"express": True, "start": "on_demand"}, "nobody counts"),
        ([], "must be an object"),
    ],
)
def test_what_cannot_change_is_named(body: Any, words: str) -> None:
    with pytest.raises(Problem, match=words):
        generations.change(existing(), "a", body)


def test_what_stays_as_it_is_may_be_named() -> None:
    whole = existing().get("a").spec.mapping()
    assert generations.change(existing(), "a", whole) == existing()


def test_an_alias_of_another_instance_is_refused() -> None:
    both = state.add(existing(), InstanceSpec.parse({"name": "b", "model_id": "org/m"}), SETTINGS, (), "now")
    with pytest.raises(Problem) as refused:
        generations.change(both, "a", {"aliases": ["b"]})
    assert refused.value.code == "INSTANCE_EXISTS"


def test_an_instance_that_is_not_there_is_not_changed() -> None:
    with pytest.raises(Problem) as refused:
        generations.change(State(), "a", {})
    assert refused.value.code == "INSTANCE_NOT_FOUND"
