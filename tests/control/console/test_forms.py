"""The fields of an instance as a form, and back: what a person types is what REST would be sent."""

from typing import Any

import pytest

from appliance.control.console.forms import LISTS, body_of, form_fields, in_words, value_of
from appliance.core.instance import CHECKS, InstanceSpec
from appliance.core.problems import Problem
from testing.specs import spec

FULL: dict[str, Any] = {
    "model_id": "org/m",
    "name": "a",
    "revision": "main",
    "replicas": 3,
    "gpu_ids": [0, "GPU-1a"],
    "port": 8200,
    "max_batch_tokens": 99,
    "pooling": "cls",
    "extra_args": ["--a b", "--c=d"],
    "aliases": ["x", "org/y"],
    "cache": False,
    "default": True,
    "start": "on_demand",
    "idle_unload_secs": 7,
    "prometheus_port": 0,
}


def test_each_field_is_there_once() -> None:
    names = [each.name for each in form_fields({})]
    assert sorted([*names, "gpu_id"]) == sorted(CHECKS)
    assert names[:2] == ["model_id", "name"]
    assert all(each.about for each in form_fields({}))


def test_what_stands_in_a_form_comes_back() -> None:
    fields = form_fields(InstanceSpec.parse(FULL).mapping())
    body = body_of({each.name: each.value for each in fields})
    assert InstanceSpec.parse(body) == InstanceSpec.parse(FULL)


def test_what_is_left_empty_has_its_default() -> None:
    assert body_of({"name": "a", "model_id": "m", "replicas": " ", "unknown": "x"}) == {"name": "a", "model_id": "m"}
    changed = body_of({"pooling": "", "replicas": "2", "token": "t"}, empty_is_default=True)
    assert changed == {"pooling": None, "replicas": 2}
    assert spec("a", pooling="cls").changed({"aliases": ["z"]}).aliases == ("z",)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("gpu_ids", "auto", "auto"),
        ("gpu_ids", "0, 1", [0, 1]),
        ("aliases", "one, two", ["one", "two"]),
        ("extra_args", "--flag 'a, b'", ["--flag", "a, b"]),
        ("replicas", "many", "many"),  # REST says what is wrong with it
        ("cache", "perhaps", "perhaps"),
        ("port", "0", 0),
    ],
)
def test_what_is_typed(name: str, text: str, value: Any) -> None:
    assert body_of({name: text}) == {name: value}


def test_a_quotation_that_does_not_end_is_named() -> None:
    with pytest.raises(Problem, match="extra_args"):
        body_of({"extra_args": "--flag 'a"})


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("parts", [["a,b", "c"], ["a, b"], ["it's, so"], [",", "-x='y,z'"], ['"', "#", "a#b"], ["\\"]])
def test_a_part_with_a_comma_stays_one(name: str, parts: list[str]) -> None:
    """Saved again without a change, a list had more parts than before."""
    assert value_of(name, in_words(parts)) == parts
    assert value_of(name, in_words(tuple(parts))) == parts
