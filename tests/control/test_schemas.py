"""Every field that the management API takes is documented with the limits of its check, and no other."""

from typing import Any

import jsonschema_rs
import pytest

from appliance.control.routes import document
from appliance.control.schemas import SCHEMAS
from appliance.core.access import NEW_KEY
from appliance.core.fields import Fields
from appliance.core.instance import FIELDS, InstanceSpec
from appliance.core.models import NEW_MODEL
from appliance.core.problems import Problem
from tests.core.limits import beyond, within

BODIES: dict[str, Fields] = {"NewInstance": FIELDS, "NewModel": NEW_MODEL, "NewKey": NEW_KEY}
CASES = [(body, name) for body, fields in BODIES.items() for name in fields.checks]
NO_LIMITS = ("description", "default")


def limits(schema: Any) -> Any:
    """Without words, and without the null of a field that may be left out."""
    schema = {key: value for key, value in schema.items() if key not in NO_LIMITS}
    if "enum" in schema:
        return {**schema, "enum": [value for value in schema["enum"] if value is not None]}
    if "anyOf" in schema:
        kept = [limits(each) for each in schema["anyOf"] if each != {"type": "null"}]
        return kept[0] if len(kept) == 1 else {**schema, "anyOf": kept}
    return schema


@pytest.mark.parametrize("body", BODIES)
def test_a_body_has_the_fields_that_its_validator_takes(body: str) -> None:
    schema = SCHEMAS[body]
    assert set(schema["properties"]) == set(BODIES[body].checks)
    assert tuple(schema["required"]) == BODIES[body].required
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize(("body", "name"), CASES)
def test_a_field_has_the_limits_of_its_check(body: str, name: str) -> None:
    documented = SCHEMAS[body]["properties"][name]
    assert limits(documented) == limits(BODIES[body].checks[name].schema)
    optional = BODIES[body].null_is_absent and name not in BODIES[body].required
    assert jsonschema_rs.is_valid(documented, None) == optional


@pytest.mark.parametrize(("body", "name"), CASES)
def test_a_whole_body_is_taken_at_each_limit_and_refused_beyond(body: str, name: str) -> None:
    fields = BODIES[body]
    right = {key: within(fields.checks[key].schema)[0] for key in fields.required}
    documented = SCHEMAS[body]["properties"][name]
    for value in within(documented):
        fields.values({**right, name: value})
    for value in beyond(documented):
        with pytest.raises(Problem):
            fields.values({**right, name: value})


def test_documented_defaults_are_those_of_an_instance() -> None:
    spec = InstanceSpec.parse({"name": "a", "model_id": "m"}).mapping()
    properties = SCHEMAS["NewInstance"]["properties"]
    told = {name: default_of(schema) for name, schema in properties.items() if default_of(schema) is not None}
    assert told == {name: value for name, value in spec.items() if name in told}
    assert set(told) == {
        *("replicas", "max_batch_tokens", "max_concurrent_requests", "token_ids", "download", "start", "undo_secs"),
    }


def default_of(schema: Any) -> Any:
    return schema.get("default") or next(
        (each["default"] for each in schema.get("anyOf", []) if "default" in each), None
    )


def test_the_document_is_made_of_these_schemas() -> None:
    assert document()["components"]["schemas"] is SCHEMAS
