"""The description of the management API is complete, and every answer to generated requests is one it declares."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from appliance.control.app import rest_app
from appliance.control.routes import ROUTES
from appliance.control.schemas import INSTANCE_FIELDS
from appliance.core.instance import CHECKS as FIELD_CHECKS
from testing.running import RunningAppliance

pytestmark = pytest.mark.processes

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
# A load of a model that is not downloaded, and a download that no hub answers, are 500 with a name, as documented.
EXPLAINED = ["500", "503"]
OPERATIONS = [(route.path, method.lower()) for route in ROUTES for method in route.operations]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    folder = tmp_path_factory.mktemp("described")
    environ = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(folder / "hf"), "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
    with RunningAppliance(folder, seeds="", settings="max_instances = 2", environ=environ) as running:
        yield running


@pytest.fixture(scope="module")
def schema(node: RunningAppliance) -> BaseSchema:
    loaded = schemathesis.openapi.from_url(f"{node.url}/openapi.json")
    loaded.config.checks.not_a_server_error.expected_statuses += EXPLAINED
    return loaded


def routes_of(node: Any, found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    if node.method_map:
        for verb, responder in node.method_map.items():
            if not isinstance(responder, type(None)) and "on_" in getattr(responder, "__name__", ""):
                found.add((node.uri_template, verb.lower()))
    for child in node.children:
        routes_of(child, found)
    return found


def test_it_describes_every_route_and_no_other(node: RunningAppliance) -> None:
    inner = rest_app(None, None).__closure__ or ()  # type: ignore[arg-type]
    app = next(cell.cell_contents for cell in inner if hasattr(cell.cell_contents, "_router"))
    found: set[tuple[str, str]] = set()
    for root in app._router._roots:
        routes_of(root, found)
    heads = {path for path, method in found if method == "head"}
    assert heads == {path for path, method in found if method == "get"}  # which need no words of their own
    assert {one for one in found if one[1] != "head"} == set(OPERATIONS)


def test_it_describes_every_field_of_an_instance() -> None:
    assert set(INSTANCE_FIELDS) == set(FIELD_CHECKS)


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(("path", "verb"), OPERATIONS)
def test_every_answer_is_declared(
    node: RunningAppliance, schema: BaseSchema, path: str, verb: str, mode: GenerationMode
) -> None:
    operation = schema[path][verb]
    several = bool(operation.body or operation.query or operation.path_parameters)
    if mode.is_negative and not (operation.body or operation.query):
        return  # nothing to get wrong
    if path == "/events/stream":
        return  # its answer has no end: test_streaming
    turn = itertools.count()

    @settings(
        max_examples=12 if several else 1,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def answers(case: schemathesis.Case) -> None:
        if "wait" in (case.query or {}):
            case.query["wait"] = "false"  # the hub of this test does not answer
        if "name" in (case.path_parameters or {}) and next(turn) % 2:  # one that exists, stopped or crashing
            node.post("/instances", {"name": "there", "model_id": "nobody/nothing"})
            case.path_parameters["name"] = "there"
        case.call_and_validate(checks=CHECKS, timeout=60)

    answers()
