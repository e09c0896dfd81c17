"""`open_health`: a stranger learns whether all is well, and nothing else; who shows a key learns why not."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import falcon.testing
import grpc
import pytest

from appliance.control.app import create_app as control_app
from appliance.core import access, state
from appliance.core.access import Key
from appliance.core.settings import Settings, parse
from appliance.drivers import keysfile
from appliance.drivers.memory import Reserve
from appliance.drivers.metrics import Meters
from appliance.gateway.app import create_app as gateway_app
from appliance.gateway.client_watch import ClientWatch
from appliance.gateway.multiplexer_channels import MultiplexerChannels
from appliance.gateway.resource import Gateway
from appliance.gateway.selection import InstanceSelector
from appliance.node.authentication import Authenticator, keys_path
from appliance.node.context import Node, now
from appliance.node.directory import Directory, StateSource
from appliance.wire.envelope import CODE_KEY
from testing.specs import spec

SECRET = {"Authorization": "Bearer tei-right"}
STRANGERS: list[dict[str, str]] = [{}, {"Authorization": "Bearer tei-wrong"}]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of an appliance that asks for keys, with one instance, whose supervisord is away."""
    settings = parse({"open_health": True}, {}, {}, str(tmp_path))
    keysfile.write(keys_path(settings), (Key("right", access.digest("tei-right"), "read"),))
    Node.at(settings).state.update(lambda before: state.add(before, spec("whisper"), settings, (), now()))
    return settings


@pytest.fixture
def control(settings: Settings) -> falcon.testing.TestClient:
    return falcon.testing.TestClient(control_app(Node.at(settings), Authenticator.of(settings)))


class Refusing(grpc.GenericRpcHandler):
    """A multiplexer whose every answer names the instance."""

    def service(self, details: Any) -> Any:
        def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
            context.set_trailing_metadata(((CODE_KEY, "UNAVAILABLE"),))
            context.abort(grpc.StatusCode.UNAVAILABLE, 'Instance "whisper" is gone')
            raise AssertionError

        return grpc.unary_unary_rpc_method_handler(refuse)


@pytest.fixture
def gateway(settings: Settings, meters: Meters) -> Iterator[falcon.testing.TestClient]:
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((Refusing(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    node = Node.at(settings)
    channels = MultiplexerChannels([f"127.0.0.1:{port}"], 10**6, 5.0)
    selector, reserve = (
        InstanceSelector(Directory(StateSource(node.state, "embedded"))),
        Reserve(settings.memory_budget_bytes),
    )
    parts = Gateway(node, selector, channels, ClientWatch(), meters, Authenticator.of(settings), reserve)
    yield falcon.testing.TestClient(gateway_app(parts))
    channels.close()
    server.stop(None)


@pytest.mark.parametrize("headers", STRANGERS)
def test_a_stranger_is_told_the_status_alone(control: falcon.testing.TestClient, headers: dict[str, str]) -> None:
    health = control.simulate_get("/health", headers=headers)
    assert (health.status_code, health.json["status"], set(health.json)) == (200, "degraded", {"status", "timestamp"})
    ready = control.simulate_get("/ready", headers=headers)
    assert (ready.status_code, ready.json["code"]) == (503, "NOT_READY")
    assert "supervisor" not in ready.text


def test_who_shows_a_key_is_told_all(control: falcon.testing.TestClient, tmp_path: Path) -> None:
    health = control.simulate_get("/health", headers=SECRET).json
    assert {"version", "instances", "reason"} < set(health)
    assert str(tmp_path) in health["reason"]
    ready = control.simulate_get("/ready", headers=SECRET)
    assert (ready.status_code, ready.json["code"]) == (503, "BACKEND_UNAVAILABLE")
    assert str(tmp_path) in ready.json["error"]


@pytest.mark.parametrize("headers", STRANGERS)
def test_the_gateway_tells_a_stranger_of_no_instance(
    gateway: falcon.testing.TestClient, headers: dict[str, str]
) -> None:
    answer = gateway.simulate_get("/health", headers=headers)
    assert answer.status_code == 503
    assert "whisper" not in f"{answer.text} {answer.headers}"
    known = gateway.simulate_get("/health", headers=SECRET)
    assert (known.status_code, "whisper" in known.text) == (503, True)
