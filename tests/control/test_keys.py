"""The routes of API keys: whom they let in, what they tell and what is written down; and who says where keys count."""

import http.server
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from falcon.testing import Result, simulate_request

from appliance.cli import key_check
from appliance.control.app import create_app
from appliance.core import access
from appliance.core.problems import Problem
from appliance.core.settings import Settings
from appliance.node.authentication import Authenticator
from appliance.node.context import Node
from appliance.operations import keys

HERE, ELSEWHERE = "127.0.0.1", "192.0.2.7"


class Box:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.settings = Settings(data_dir=str(folder), state_file=f"{folder}/state.toml", **settings)
        self.authenticator = Authenticator.of(self.settings)
        self.app: Any = create_app(Node.at(self.settings), self.authenticator)

    def call(self, verb: str, path: str, key: str = "", peer: str = HERE, **options: Any) -> Result:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.authenticator.keys.looked_at = 0  # every call looks
        return simulate_request(self.app, verb, path, headers=headers, remote_addr=peer, **options)

    def make(self, name: str, role: str, key: str = "", **options: Any) -> str:
        created = self.call("POST", "/keys", key, json={"name": name, "role": role}, **options)
        assert created.status_code == 201, created.text
        return str(created.json["key"])


@pytest.fixture
def node(tmp_path: Path) -> Box:
    return Box(tmp_path)


def test_a_key_lives_from_its_making_to_its_end(node: Box) -> None:
    admin = node.make("admin", "admin")
    assert node.call("GET", "/instances").status_code == 401
    created = node.call("POST", "/keys", admin, json={"name": "reader", "role": "read"}, peer=ELSEWHERE)
    assert (created.status_code, created.headers["cache-control"], created.headers["location"]) == (
        *(201, "no-store"),
        "/keys/reader",
    )
    reader = created.json["key"]
    assert node.call("GET", "/openapi.json", reader).status_code == 200
    listed = node.call("GET", "/keys", admin).json
    assert [(each["name"], each["role"]) for each in listed] == [("admin", "admin"), ("reader", "read")]
    assert all(set(each) == {"name", "role", "from"} for each in listed)
    assert node.call("POST", "/keys", admin, json={"name": "reader", "role": "read"}).json["code"] == "KEY_EXISTS"
    revoked = node.call("DELETE", "/keys/reader", admin)
    listeners = {"bind": "127.0.0.1", "api_port": 9000, "grpc_port": 9001, "http_port": 9002}
    listeners |= {"cert_file": "", "require_client_cert": False}
    assert revoked.status_code == 200
    assert revoked.json == {"name": "reader", "role": "read", "left": 1, "listeners": listeners}
    assert node.call("GET", "/openapi.json", reader).status_code == 401
    assert node.call("DELETE", "/keys/reader", admin).json["code"] == "KEY_NOT_FOUND"
    for secret in (admin, reader):
        assert not [path for path in node.folder.rglob("*") if path.is_file() and secret in path.read_text()]
    changes = [json.loads(line) for line in (node.folder / "audit.jsonl").read_text().splitlines()]
    assert [(each["event"], each["who"], each["status"]) for each in changes] == [
        ("POST /keys", "anonymous", 201),
        ("POST /keys", "admin", 201),
        ("POST /keys", "admin", 409),
        ("DELETE /keys/reader", "admin", 200),
        ("DELETE /keys/reader", "admin", 404),
    ]


def test_what_comes_by_the_socket_is_written_down_but_for_the_wakes_of_multiplexers(node: Box) -> None:
    by_socket = {"REMOTE_ADDR": ""}
    node.call("DELETE", "/keys/wake", extras=by_socket)
    node.call("POST", "/instances/nobody/wake", extras=by_socket)
    node.call("POST", "/instances/nobody/wake")
    changes = [json.loads(line) for line in (node.folder / "audit.jsonl").read_text().splitlines()]
    assert [each["event"] for each in changes] == ["DELETE /keys/wake", "POST /instances/nobody/wake"]


def test_the_first_key_is_made_on_this_machine_only(node: Box) -> None:
    first = {"name": "first", "role": "admin"}
    for peer in (ELSEWHERE, "10.0.0.1", "2001:db8::1", "::ffff:192.0.2.7", "", "nonsense"):
        refused = node.call("POST", "/keys", peer=peer, json=first)
        assert (refused.status_code, refused.json["code"], "own machine" in refused.json["error"]) == (
            *(403, "FORBIDDEN"),
            True,
        )
    assert not (node.folder / "keys.toml").exists()
    node.make("first", "admin", peer="::ffff:127.0.0.1")
    assert node.call("POST", "/keys", peer=HERE, json={**first, "name": "second"}).status_code == 401


def test_only_admins_have_to_do_with_keys(node: Box) -> None:
    admin = node.make("admin", "admin")
    for role in ("operator", "inference", "read"):
        key = node.make(role, role, admin)
        for verb, path in (("GET", "/keys"), ("POST", "/keys"), ("DELETE", "/keys/admin"), ("HEAD", "/keys")):
            assert node.call(verb, path, key, json={"name": "x", "role": "admin"}).status_code == 403
    assert len(node.call("GET", "/keys", admin).json) == 4


WRONG = [
    [],
    {},
    {"name": "a"},
    {"role": "read"},
    {"name": "a", "role": "root"},
    {"name": "", "role": "read"},
    {"name": "a/b", "role": "read"},
    {"name": "a", "role": "read", "sha256": "0" * 64},
]


@pytest.mark.parametrize("body", WRONG)
def test_a_wrong_body_is_refused_by_name(node: Box, body: Any) -> None:
    refused = node.call("POST", "/keys", json=body)
    assert (refused.status_code, refused.json["code"]) == (422, "VALIDATION_ERROR")
    assert not (node.folder / "keys.toml").exists()


def test_keys_made_at_once_are_all_kept(node: Box) -> None:
    admin = node.make("admin", "admin")
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda number: node.make(f"key-{number}", "read", admin), range(24)))
    assert len(set(keys)) == 24
    assert len(node.call("GET", "/keys", admin).json) == 25


def test_a_file_that_cannot_be_read_is_a_problem_with_words(node: Box) -> None:
    node.make("admin", "admin")
    (node.folder / "keys.toml").unlink()
    (node.folder / "keys.toml").mkdir()
    appliance = Node.at(node.settings)
    with pytest.raises(Problem, match=r"Cannot read .*keys\.toml"):
        keys.create(appliance, {"name": "b", "role": "read"})


# -- where a key counts -----------------------------------------------------------------------------------------------


class Listener(http.server.BaseHTTPRequestHandler):
    """Answers 401 unless the key is the one of its server; an open one has none."""

    def do_GET(self) -> None:
        key = self.server.key  # type: ignore[attr-defined]
        self.send_response(200 if key in ("", self.headers.get("Authorization", "").removeprefix("Bearer ")) else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class Refusing(grpc.GenericRpcHandler):
    """A gRPC server that knows one key."""

    def __init__(self, key: str) -> None:
        self.key = key

    def service(self, details: Any) -> Any:
        known = dict(details.invocation_metadata).get("authorization") == f"Bearer {self.key}"
        code = grpc.StatusCode.INVALID_ARGUMENT if known else grpc.StatusCode.UNAUTHENTICATED
        return grpc.unary_unary_rpc_method_handler(lambda request, context: context.abort(code, "no"))


KEY = "tei-right"


@pytest.fixture
def appliance_of() -> Iterator[Any]:
    """A function that makes listeners with these keys and gives the settings of an appliance that has them."""
    ending: list[Any] = []

    def listening(rest: str, rpc: str, gateway: str) -> Settings:
        servers = [http.server.ThreadingHTTPServer((HERE, 0), Listener) for _ in range(2)]
        for server, key in zip(servers, (rest, gateway), strict=True):
            server.key = key  # type: ignore[attr-defined]
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            ending.append(lambda server=server: (server.shutdown(), server.server_close()))
        grpc_server = grpc.server(ThreadPoolExecutor(2), handlers=[Refusing(rpc)])
        port = grpc_server.add_insecure_port(f"{HERE}:0")
        grpc_server.start()
        ending.append(lambda: grpc_server.stop(0).wait())
        return Settings(api_port=servers[0].server_port, grpc_port=port, http_port=servers[1].server_port)

    yield listening
    for end in ending:
        end()


def test_each_port_is_asked_whether_the_key_counts(appliance_of: Any) -> None:
    settings = appliance_of(KEY, KEY, KEY)
    assert key_check.check_ports(settings, KEY) == key_check.PortCheck(sorted(settings.own_ports), {})
    open_gateway = appliance_of(KEY, KEY, "")
    checked = key_check.check_ports(open_gateway, KEY, patience_secs=0)
    assert checked.wrong == {open_gateway.http_port: "it asks for no key"}
    stale = appliance_of(KEY, "tei-other", KEY)
    assert key_check.check_ports(stale, KEY, patience_secs=0).wrong == {stale.grpc_port: "it does not know the key"}
    gone = Settings(api_port=settings.api_port, grpc_port=settings.grpc_port, http_port=1024)
    (fault,) = key_check.check_ports(gone, KEY, patience_secs=0).wrong.values()
    assert "does not answer" in fault


@pytest.mark.parametrize(
    ("peer", "ours"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True), ("::ffff:10.0.0.1", False)]
    + [(peer, False) for peer in ("10.0.0.1", "0.0.0.0", "::", "", "localhost", "127.0.0.1.example.com")],
)
def test_loopback_is_this_machine_alone(peer: str, ours: bool) -> None:
    assert access.loopback(peer) is ours
