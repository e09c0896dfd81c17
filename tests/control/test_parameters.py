"""A query parameter that a verb does not have is refused, and nothing happens."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import falcon.testing
import pytest

from appliance.control.app import create_app
from appliance.core import state
from appliance.core.instance import InstanceSpec
from appliance.drivers.supervisord import Supervisor
from appliance.node.authentication import Authenticator
from appliance.node.context import Node, now
from testing.running import TINY
from testing.specs import configured
from testing.stand_ins import QuietSupervisor


@pytest.fixture
def node(tmp_path: Path) -> Node:
    made = replace(Node.at(configured(data_dir=str(tmp_path))), supervisor=cast(Supervisor, QuietSupervisor()))
    spec = InstanceSpec.parse({"name": "a", "model_id": str(TINY)})
    made.state.update(lambda before: state.add(before, spec, made.settings, (), now()))
    return made


@pytest.fixture
def client(node: Node) -> falcon.testing.TestClient:
    return falcon.testing.TestClient(create_app(node, Authenticator.of(node.settings)))


VERBS = [("DELETE", ""), *(("POST", f"/{verb}") for verb in ("start", "stop", "sleep", "wake", "restart", "undo"))]


@pytest.mark.parametrize(("method", "verb"), VERBS, ids=lambda part: part.strip("/"))
def test_a_dry_run_of_a_verb_that_has_none_does_nothing(
    client: falcon.testing.TestClient, node: Node, method: str, verb: str
) -> None:
    """`DELETE /instances/NAME?dry_run=true` deleted it."""
    before = node.state.read()
    answer = client.simulate_request(method, f"/instances/a{verb}", params={"dry_run": "true"})
    assert (answer.status_code, answer.json["code"]) == (422, "VALIDATION_ERROR")
    assert 'Unknown query parameter "dry_run"' in answer.json["error"]
    assert node.state.read() == before
    assert node.journal.since(0) == []


@pytest.mark.parametrize("verb", ["stop", "sleep", "wake"])
def test_without_a_parameter_the_verb_is_done(client: falcon.testing.TestClient, verb: str) -> None:
    assert client.simulate_post(f"/instances/a/{verb}").status_code == 200


def test_without_a_parameter_an_instance_is_deleted(client: falcon.testing.TestClient, node: Node) -> None:
    assert client.simulate_delete("/instances/a").status_code == 200
    assert not node.state.read().instances
