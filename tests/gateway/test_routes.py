"""What a request of the gateway needs, and the dialect of its errors, by the table of its routes."""

from typing import Any

import pytest

from appliance.core import access
from appliance.core.access import Need
from appliance.gateway.routes import COHERE, OLLAMA, OPENAI, ROUTES, TEI, dialect_of, need_of, router
from tests.core.test_access import TABLE

NOTHING: Any = None
PATHS = router(NOTHING)
READING = ("GET", "HEAD", "OPTIONS")
METHODS = [*READING, "POST", "PUT", "PATCH", "DELETE", "TRACE", "get", "delete"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", ["/health/", "//health", "/Health", "/health/x", "/instances", "/ready?", "/", ""])
def test_only_the_very_path_of_the_probe_can_be_open(method: str, path: str) -> None:
    need = need_of(PATHS, method, path)
    assert need is not Need.OPEN
    if method not in READING:
        assert "read" not in TABLE[need].split()


@pytest.mark.parametrize("open_health", [True, False])
def test_the_probe_is_open_only_where_it_is_set(open_health: bool) -> None:
    needed = Need.OPEN if open_health else Need.ANY
    assert access.effective(need_of(PATHS, "GET", "/health"), open_health) is needed
    assert need_of(PATHS, "GET", "/ready") is not Need.OPEN


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_reading_needs_any_key_and_the_rest_one_for_inference(route: Any, method: str) -> None:
    by_method = Need.ANY if method in READING else Need.INFERENCE
    path = route.path.replace("{model:path}", "org/none")
    assert need_of(PATHS, method, path) is {"/health": Need.OPEN, "/ping": Need.OPEN, "/metrics": Need.READ}.get(
        path, by_method
    )


DIALECTS = {
    "/v1/embeddings": OPENAI,
    "/embeddings": OPENAI,
    "/v1/models/org/none": OPENAI,
    "/v1/nowhere": OPENAI,
    "/v1/rerank": COHERE,
    "/v2/rerank": COHERE,
    "/v2/nowhere": TEI,
    "/v2/embed": COHERE,
    "/openai/deployments/minilm/embeddings": OPENAI,
    "/score": OPENAI,
    "/api/embed": OLLAMA,
    "/api/tags": OLLAMA,
    "/vertex": TEI,
    "/rerank": TEI,
    "/health": TEI,
    "/docs": TEI,
    "/docs/{file}": TEI,
    "/nowhere": TEI,
    "/": TEI,
}


@pytest.mark.parametrize("path", DIALECTS)
def test_errors_speak_the_dialect_of_their_path(path: str) -> None:
    assert dialect_of(PATHS, path) is DIALECTS[path]
