"""Generated requests, some as the schema has them and some not: every answer is one that `/openapi.json` declares."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from appliance.gateway.routes import ROUTES
from tests.gateway.conftest import Http

INSTANCE = {"/embed_sparse": "sparse", "/predict": "classifier"}
RERANKS = ("/rerank", "/v1/rerank", "/v2/rerank", "/score")
EXPLAINED = ["503", "504"]  # refusals with a reason; a 500 is none
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="session")
def schema(zoo: Http) -> BaseSchema:
    loaded = schemathesis.openapi.from_url(f"{zoo.url}/openapi.json")
    loaded.config.checks.not_a_server_error.expected_statuses += EXPLAINED
    return loaded


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(
    ("path", "method"), [(route.path, route.operation.method) for route in ROUTES if route.operation]
)
def test_every_answer_is_declared(schema: BaseSchema, path: str, method: str, mode: GenerationMode) -> None:
    operation = schema[path][method]
    if mode.is_negative and not operation.body:
        return  # nothing to get wrong
    instance = "reranker" if path in RERANKS else INSTANCE.get(path, "minilm")

    @settings(
        max_examples=25 if operation.body else 1,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def answers(case: schemathesis.Case) -> None:
        case.call_and_validate(headers={"X-TEI-Instance": instance}, checks=CHECKS, timeout=60)

    answers()
