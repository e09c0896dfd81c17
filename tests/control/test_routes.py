"""What a request of the management API needs, by the table of its routes."""

from pathlib import Path
from typing import Any

import falcon.testing
import pytest

from appliance.control.app import create_app
from appliance.control.routes import METHOD_NEEDS, OTHERS_NEED, ROUTES, need_of, router
from appliance.core import access
from appliance.core.access import Key, Need
from appliance.core.settings import parse
from appliance.drivers import keysfile
from appliance.node.authentication import Authenticator, keys_path
from appliance.node.context import Node
from tests.core.test_access import TABLE

NOTHING: Any = None
PATHS = router(NOTHING, NOTHING)
READING = ("GET", "HEAD", "OPTIONS")
METHODS = [*READING, "POST", "PUT", "PATCH", "DELETE", "TRACE", "get", "delete"]
# What all methods of a path need, by hand; other paths need what their methods need.
WHOLE = {
    "/health": Need.OPEN,
    "/ready": Need.OPEN,
    "/keys": Need.ADMIN,
    "/keys/{name}": Need.ADMIN,
    "/models/{model_id}/archive": Need.OPERATE,
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", ["/health/", "//health", "/Health", "/health/x", "/instances", "/ready?", "/", ""])
def test_only_the_very_paths_of_probes_can_be_open(method: str, path: str) -> None:
    need = need_of(PATHS, method, path)
    assert need is not Need.OPEN
    if method not in READING:
        assert "read" not in TABLE[need].split()
    assert "inference" not in TABLE[need].split()


@pytest.mark.parametrize("open_health", [True, False])
@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_are_open_only_where_it_is_set(path: str, open_health: bool) -> None:
    needed = Need.OPEN if open_health else Need.ANY
    assert access.effective(need_of(PATHS, "GET", path), open_health) is needed


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_a_route_needs_what_the_table_by_hand_says(route: Any, method: str) -> None:
    by_method = {**dict.fromkeys(READING, Need.READ), "DELETE": Need.ADMIN}.get(method, Need.OPERATE)
    path = route.path.replace("{name}", "none").replace("{model_id}", "org%2Fnone")
    assert need_of(PATHS, method, path) is WHOLE.get(route.path, by_method)


@pytest.mark.parametrize("path", ["//keys", "///keys/none", "/keys/", "//models/none/archive"])
def test_a_path_that_falcon_takes_for_another_needs_what_that_needs(path: str) -> None:
    assert PATHS.find(path)
    assert need_of(PATHS, "GET", path) in (Need.ADMIN, Need.OPERATE)


@pytest.mark.parametrize("path", ["/nowhere", "/instances/none/nowhere", "/keys/none/nowhere"])
def test_what_is_on_no_route_needs_what_its_method_needs(path: str) -> None:
    assert PATHS.find(path) is None
    for method in METHODS:
        assert need_of(PATHS, method, path) is METHOD_NEEDS.get(method, OTHERS_NEED)


def test_an_operator_makes_no_key_under_another_spelling_of_the_path(tmp_path: Path) -> None:
    settings = parse({}, {}, {}, str(tmp_path))
    keysfile.write(keys_path(settings), (Key("op", access.digest("tei-right"), "operator"),))
    client = falcon.testing.TestClient(create_app(Node.at(settings), Authenticator.of(settings)))
    for path in ("/keys", "//keys", "///keys"):
        answer = client.simulate_post(path, json={"name": "evil", "role": "admin"}, headers={"X-Api-Key": "tei-right"})
        assert answer.status_code == 403
    assert [key.name for key in keysfile.read(keys_path(settings))] == ["op"]
