"""Checks: what a check's schema says is what it accepts, at each limit and beyond it; mappings are checked field by
field, and an error names the first wrong one."""

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core import access, instance, models, settings
from appliance.core import fields as check
from appliance.core.fields import Check, Fields
from appliance.core.problems import Kind, Problem
from testing.specs import LAW
from tests.core.limits import beyond, within

# By mapping and field; of settings those with a schema: the others are tables, with checks of their own.
CHECKS: dict[str, Check] = {
    **{f"instance.{name}": each for name, each in instance.CHECKS.items()},
    **{f"key.{name}": each for name, each in access.KEY_CHECKS.items()},
    **{f"model.{name}": each for name, each in models.NEW_MODEL.checks.items()},
    **{name: knob.metadata["check"] for name, knob in settings.KNOBS.items() if knob.metadata["check"].schema},
}
TABLES = {"instances", "queue", "cache", "tls", "remote_tls", "keys"}


def refused(checked: Check, value: Any) -> bool:
    try:
        checked(value)
    except ValueError:
        return True
    return False


def test_every_field_has_a_schema() -> None:
    assert all(each.schema for each in CHECKS.values())
    assert set(settings.KNOBS) - set(CHECKS) == TABLES


@pytest.mark.parametrize("name", CHECKS)
def test_a_value_at_each_limit_is_accepted(name: str) -> None:
    values = within(CHECKS[name].schema)
    assert values
    assert [value for value in values if refused(CHECKS[name], value)] == []


@pytest.mark.parametrize("name", CHECKS)
def test_a_value_beyond_each_limit_is_refused(name: str) -> None:
    values = beyond(CHECKS[name].schema)
    assert values
    assert [value for value in values if not refused(CHECKS[name], value)] == []


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4),
)


@LAW
@given(ANY | st.sampled_from([value for each in CHECKS.values() for value in within(each.schema)]))
def test_what_a_check_accepts_its_schema_allows(value: Any) -> None:
    for name, each in CHECKS.items():
        if not refused(each, value):
            assert jsonschema_rs.is_valid(each.schema, value), name


# -- whole mappings ---------------------------------------------------------------------------------------------------

LOOSE = Fields({"size": check.whole(1, 9), "name": check.text(5)}, required=("name",), null_is_absent=True)
STRICT = Fields({"name": check.text(5), "size": check.whole(1, 9)}, required=("name", "size"))
# What is refused by one of them, and the words.
REFUSED: list[tuple[Fields, dict[str, Any], str]] = [
    (LOOSE, {}, 'Field "name" is required'),
    (LOOSE, {"name": None}, 'Field "name" is required'),
    (LOOSE, {"name": "a", "sise": 1}, 'Unknown field "sise" (did you mean "size"?)'),
    (LOOSE, {"name": "a", "sise": None}, 'Unknown field "sise" (did you mean "size"?)'),
    (LOOSE, {"name": "a", "zzz": 1}, 'Unknown field "zzz"'),
    (LOOSE, {"size": 0, "zzz": 1}, 'Field "size" must be a whole number between 1 and 9, not 0'),
    (LOOSE, {"zzz": 1, "size": 0}, 'Unknown field "zzz"'),
    (LOOSE, {"size": 0}, 'Field "size" must be a whole number between 1 and 9, not 0'),
    (STRICT, {"size": 0, "zzz": 1}, 'Unknown field "zzz"'),
    (STRICT, {"size": 0}, 'Field "name" is required'),
    (STRICT, {"size": 0, "name": "a"}, 'Field "size" must be a whole number between 1 and 9, not 0'),
    (STRICT, {"size": 1, "name": None}, 'Field "name" must be text, not null'),
]


@pytest.mark.parametrize(("fields", "body", "words"), REFUSED)
def test_the_first_wrong_field_is_named(fields: Fields, body: dict[str, Any], words: str) -> None:
    with pytest.raises(Problem) as caught:
        fields.values(body)
    assert (caught.value.kind, caught.value.message) == (Kind.INVALID, words)


def test_what_is_right_comes_back_checked() -> None:
    assert LOOSE.values({"size": None, "name": "a"}) == {"name": "a"}
    assert LOOSE.values({"size": 2, "name": "a"}) == STRICT.values({"size": 2, "name": "a"})


def test_an_error_within_a_field_names_the_field() -> None:
    inner = Fields({"port": check.whole(1, 2)}, name='"queue.{}"')
    outer = Fields({"queue": Check(lambda value: inner.values(check.table(value)))}, name='Configuration key "{}"')
    with pytest.raises(Problem, match=r'^Configuration key "queue": "queue.port" must be a whole number'):
        outer.values({"queue": {"port": 3}})
    with pytest.raises(Problem, match=r'^Configuration key "queue" must be a table, not 3$'):
        outer.values({"queue": 3})


@pytest.mark.parametrize("body", [None, [], "name", 7, True])
def test_what_is_no_mapping_is_refused(body: Any) -> None:
    with pytest.raises(Problem, match=r"^A thing must be an object, not "):
        check.required_object(body, "A thing must be an object")


@pytest.mark.parametrize(("written", "number"), [("0", 0), ("18", 18), ("9" * 18, int("9" * 18))])
def test_digits_are_a_number(written: str, number: int) -> None:
    assert check.decimal(written) == number


@pytest.mark.parametrize("written", ["", "-1", "+1", "1_0", " 1", "1.0", "٣", "²", "9" * 19])
def test_nothing_but_digits_is(written: str) -> None:
    assert check.decimal(written) is None
