"""Secrets with names of their own go in at every door; afterwards everything that can be read is searched for them."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import requests
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub
from testing.certificates import Authority
from testing.running import free_ports
from tests.security import Caller, Secured

pytestmark = pytest.mark.processes

SECS = 30.0
PATIENCE_SECS = 0.5  # with a listener that does not answer what is no HTTP
HF_TOKEN = "hf_CANARYcanaryCANARYcanary00001"
UNKNOWN = "tei-CANARYcanaryCANARYcanaryCANARYcanary00002"  # a key of somewhere else, which is a secret there
TEXT = "CANARYtextCANARYtext00003"  # of a customer, in calls that fail
PLANTED = "CANARYplantedCANARY00004"
MADE = ("TEI_APPLIANCE_KEY", "TEI_APPLIANCE_CERT", "TEI_APPLIANCE_CERT_KEY")
TARGET = mux.Target(instance_name="minilm")


@dataclass
class Changed:
    """One changing call, as the audit should have it."""

    event: str
    who: str
    status: int


@dataclass
class Run:
    """Everything that was done, and what was answered to it."""

    node: Secured
    secrets: dict[str, bytes]
    answers: list[str] = field(default_factory=list)
    changes: list[Changed] = field(default_factory=list)
    codes: list[grpc.StatusCode] = field(default_factory=list)

    def http(self, who: str, caller: Caller, verb: str, url: str, path: str, **options: Any) -> requests.Response:
        answer = self.node.call(verb, url + path, caller, **options)
        self.answers.append(f"{answer.headers} {answer.text}")
        if url == self.node.url and verb not in ("GET", "HEAD", "OPTIONS"):
            self.changes.append(Changed(f"{verb} {path.partition('?')[0]}", who, answer.status_code))
        return answer

    def call(self, channel: grpc.Channel, request: mux.EmbedRequest, metadata: Mapping[str, str]) -> None:
        try:
            TeiMultiplexerStub(channel).Embed(request, metadata=list(metadata.items()), timeout=SECS)
        except grpc.RpcError as error:
            self.codes.append(error.code())
            self.answers.append(f"{error.details()} {error.trailing_metadata()} {error}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One node in which all of it was used, which still runs."""
    folder = tmp_path_factory.mktemp("canary")
    ca = Authority(tmp_path_factory.mktemp("ca"), "Canary")
    server, client = (ca.issue(name, ["DNS:localhost", "IP:127.0.0.1"]) for name in ("node", "client"))
    shutil.copy(server.key_path, key_file := folder.parent / "canary-server.key")
    settings = f'[tls]\ncert_file = "{server.chain}"\nkey_file = "{key_file}"\n'
    caller = Caller(key=UNKNOWN, trusts=ca, shows=client)
    environ = {**caller.environ, "HF_TOKEN": HF_TOKEN, "HF_ENDPOINT": f"http://127.0.0.1:{free_ports(1)[0]}"}
    node = Secured(folder, settings, replace(caller, key=""), environ=environ)
    keys = {role: node.key(f"the-{role}", role) for role in ("admin", "inference", "read")}
    node.caller = Caller(keys["admin"], ca)
    node.environ.update(node.caller.environ)  # what `up` is started with
    secrets = {f"the key of {role}": key.encode() for role, key in keys.items()}
    secrets |= {"HF_TOKEN": HF_TOKEN.encode(), "an unknown key": UNKNOWN.encode(), "a text": TEXT.encode()}
    for name, issued in (("the server", server), ("the client", client)):
        pem = issued.key_path.read_bytes()
        der = load_pem_private_key(pem, None).private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
        secrets |= {f"the key file of {name}": pem.splitlines()[2], f"the key of {name}, as DER": der[36:68]}
    with node:
        node.wait_ready("minilm", 60)
        found = Run(node, secrets)
        use(found, keys)
        yield found


def use(run: Run, keys: dict[str, str]) -> None:
    by = {role: Caller(key, run.node.caller.trusts) for role, key in keys.items()}
    manage(run, by)
    ask(run, by)
    be_wrong(run, by)
    over_grpc(run, by)
    speak_badly(run, keys)
    for arguments in (["status"], ["doctor"], ["keys", "list"], ["embed", "hello"]):
        done = run.node.cli(*arguments)
        run.answers.append(done.stdout + done.stderr)
    refused = run.node.cli("status", caller=Caller(UNKNOWN, run.node.caller.trusts))
    assert refused.returncode == 1
    run.answers.append(refused.stdout + refused.stderr)


def manage(run: Run, by: Mapping[str, Caller]) -> None:
    """The life of an instance and of a model, by those who may and those who may not."""
    url, admin = run.node.url, by["admin"]
    model = {"name": "second", "model_id": "sentence-transformers/all-MiniLM-L6-v2"}
    for role, expected in (("read", 403), ("inference", 403), ("admin", 201), ("admin", 409)):
        assert run.http(f"the-{role}", by[role], "POST", url, "/instances", json=model).status_code == expected
    for verb in ("stop", "stop", "start"):
        run.http("the-admin", admin, "POST", url, f"/instances/second/{verb}")
    run.http("the-read", by["read"], "DELETE", url, "/instances/second")
    assert run.http("the-admin", admin, "DELETE", url, "/instances/second").status_code == 200
    run.http("the-admin", admin, "DELETE", url, "/instances/second")
    run.http("the-admin", admin, "POST", url, "/models", json={"model_id": "canary/none"})
    run.http(
        "the-admin", admin, "POST", url, "/models/canary%2Fnone/download?wait=false"
    )  # asks a hub that is not there
    run.http("the-admin", admin, "DELETE", url, "/models/canary%2Fnone")
    run.http("the-admin", admin, "PUT", url, "/instances")
    run.http("the-admin", admin, "POST", url, "/nowhere")
    for path in ("/instances", "/instances/minilm/logs", "/events", "/metrics", "/health", "/gpus", "/models"):
        run.http("the-read", by["read"], "GET", url, path)


def ask(run: Run, by: Mapping[str, Caller]) -> None:
    """Texts that are answered, and texts that fail."""
    caller, url = by["inference"], run.node.gateway_url
    long = f"{TEXT} " * 2000
    bodies: list[Any] = [
        {"inputs": "hello"},
        {"inputs": long, "truncate": False},
        {"inputs": [TEXT, ""]},
        {"inputs": {"a": TEXT}},
        {TEXT[:5]: TEXT},
        {"model": "none", "input": TEXT},
        {"query": TEXT, "texts": [TEXT]},
        [TEXT],
    ]
    for path in ("/embed", "/v1/embeddings", "/rerank", "/predict", "/v1/rerank", "/tokenize", "/nowhere"):
        for body in bodies:
            run.http("", caller, "POST", url, path, json=body)
        run.http(
            "", caller, "POST", url, path, data=f'{{"inputs": "{TEXT}"', headers={"Content-Type": "application/json"}
        )
        run.http("", caller, "POST", url, path, data=TEXT)
        run.http("", by["read"], "POST", url, path, json={"inputs": TEXT})


def be_wrong(run: Run, by: Mapping[str, Caller]) -> None:
    """Keys that are unknown, or right and at the wrong place."""
    nobody, stranger = replace(by["admin"], key=""), replace(by["admin"], key=UNKNOWN)
    for url in (run.node.url, run.node.gateway_url):
        for verb, path in (("GET", "/health"), ("POST", "/instances"), ("DELETE", "/instances/minilm"), ("GET", "/x")):
            for caller in (nobody, stranger):
                assert run.http("anonymous", caller, verb, url, path).status_code == 401
            for header in ("X-Api-Key", "Api-Key", "Cookie", "Referer", "User-Agent", "X-TEI-Instance", "Accept"):
                run.http("anonymous", nobody, verb, url, path, headers={header: UNKNOWN})
            run.http("anonymous", nobody, verb, url, path, headers={"Authorization": UNKNOWN})
            run.http("anonymous", nobody, verb, url, path, headers={"Authorization": f"Bearer  {UNKNOWN} x"})
            run.http("anonymous", nobody, verb, url, path, headers={"Authorization": f"Basic {UNKNOWN}"})
            run.http("anonymous", nobody, verb, url, f"{path}?api_key={UNKNOWN}&key={UNKNOWN}")
        # Also of somebody who may come in: the query is no place for a key, and is written nowhere.
        for path in ("/health", "/events", "/metrics", "/instances", "/docs", "/v1/models"):
            run.http("the-admin", by["admin"], "GET", url, f"{path}?api_key={UNKNOWN}")
    run.http("the-admin", by["admin"], "POST", run.node.url, "/instances", json={"name": "third", "api_key": UNKNOWN})
    run.http("the-admin", by["admin"], "POST", run.node.url, f"/instances?api_key={UNKNOWN}", json={"name": "third"})


def over_grpc(run: Run, by: Mapping[str, Caller]) -> None:
    good = mux.EmbedRequest(target=TARGET, request=tei.EmbedRequest(inputs=TEXT))
    bad = mux.EmbedRequest(target=TARGET, request=tei.EmbedRequest(inputs=f"{TEXT} " * 2000, truncate=False))
    lost = mux.EmbedRequest(target=mux.Target(instance_name="none"), request=tei.EmbedRequest(inputs=TEXT))
    with run.node.channel(replace(by["admin"], key="")) as channel:
        for authorization in (f"Bearer {UNKNOWN}", UNKNOWN, f"Basic {UNKNOWN}", f"Bearer {UNKNOWN} x"):
            run.call(channel, good, {"authorization": authorization})
        for key in ("x-api-key", "api-key", "user-agent", "x-tei-instance", "cookie"):
            run.call(channel, good, {key: UNKNOWN})
        run.call(channel, good, {"authorization": f"Bearer {by['read'].key}"})
        for request in (bad, lost, mux.EmbedRequest(request=tei.EmbedRequest(inputs=TEXT))):
            run.call(channel, request, {"authorization": f"Bearer {by['inference'].key}"})
        nowhere = channel.unary_unary("/tei_multiplexer.v1.TeiMultiplexer/None")
        with pytest.raises(grpc.RpcError):
            nowhere(TEXT.encode(), metadata=[("authorization", f"Bearer {UNKNOWN}")], timeout=SECS)
    assert len(run.codes) == 13


def speak_badly(run: Run, keys: dict[str, str]) -> None:
    """What is no HTTP, with a secret in it, through TLS and in the clear."""
    bearer = f"Authorization: Bearer {keys['admin']}"
    sent = f"{bearer}\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked"
    heads = [
        f"GET /health HTTP/1.1\r\nHost: x\r\n{bearer}\r\n\r\n",
        f"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization Bearer {UNKNOWN}\r\n\r\n",
        f"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization : Bearer {UNKNOWN}\r\n\r\n",
        f"GET /health HTTP/1.1\r\nHost: x\r\nA: b\r\n Bearer {UNKNOWN}\r\n\r\n",
        f"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {UNKNOWN}\0\r\n\r\n",
        f"GET /health HTTP/1.1\r\nHost: x\r\nBearer {UNKNOWN}: x\r\n\r\n",
        f"GET /health?key={UNKNOWN} HTTP/9.9\r\n{bearer}\r\n\r\n",
        f"GET {UNKNOWN}\r\n\r\n",
        f"{UNKNOWN} / HTTP/1.1\r\n\r\n",
        f"POST /embed HTTP/1.1\r\nHost: x\r\n{bearer}\r\nTransfer-Encoding: {UNKNOWN}\r\n\r\n",
        f"POST /embed HTTP/1.1\r\nHost: x\r\n{bearer}\r\nContent-Length: {UNKNOWN}\r\n\r\n",
        f"POST /embed HTTP/1.1\r\nHost: x\r\n{sent}\r\n\r\n{TEXT}\r\n",
        f"POST /models HTTP/1.1\r\nHost: x\r\n{sent}\r\n\r\n{TEXT}\r\n",
        f"POST /models HTTP/1.1\r\nHost: x\r\n{sent}\r\n\r\n2\r\n{TEXT}\r\n",
        f"GET /health HTTP/1.1\r\nHost: x\r\nExpect: {UNKNOWN}\r\n\r\n",
        f"GET /health HTTP/1.1\r\nHost: x\r\n{bearer}{'x' * 20000}\r\n\r\n",
        f"GET /{UNKNOWN}{'x' * 20000} HTTP/1.1\r\n\r\n",
    ]
    heard = {
        f"POST /{path} HTTP/1.1\r\nHost: x\r\n{sent}": status for path, status in (("embed", 404), ("models", 400))
    }
    assert run.node.caller.trusts
    context = ssl.create_default_context(cafile=str(run.node.caller.trusts.pem))
    for port in (run.node.api_port, run.node.http_port, run.node.grpc_port):
        for head in heads:
            run.answers.append(said(port, context, head.encode()))
            status = heard.get(head.partition("\r\n\r\n")[0])
            if status and port == run.node.api_port:  # HTTP enough to be asked who sent it
                run.changes.append(Changed(" ".join(head.split()[:2]), "the-admin", status))
            run.answers.append(said(port, None, head.encode()))


def said(port: int, context: ssl.SSLContext | None, sent: bytes) -> str:
    """The answer, whose head and body come in one piece; nothing when there is none."""
    answer = b""
    with contextlib.ExitStack() as stack:
        connection: socket.socket = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=SECS))
        try:
            if context:
                connection = stack.enter_context(context.wrap_socket(connection, server_hostname="localhost"))
            connection.sendall(sent)
            connection.settimeout(PATIENCE_SECS)
            while b"\r\n\r\n" not in answer and (part := connection.recv(65536)):
                answer += part
        except OSError:
            pass
    return answer.decode(errors="replace")


# -- the search -------------------------------------------------------------------------------------------------------


def leaked(secrets: Mapping[str, bytes], found: Iterable[tuple[str, bytes]]) -> list[str]:
    return [f"{name} in {place}" for place, content in found for name, secret in secrets.items() if secret in content]


def files(run: Run) -> Iterator[tuple[str, bytes]]:
    """All below the folder of configuration, data and logs, and what was printed."""
    for path in sorted(run.node.config.parent.rglob("*")):
        if path.is_file():
            yield str(path), path.read_bytes()


def cast(run: Run) -> list[psutil.Process]:
    assert run.node.process
    up = psutil.Process(run.node.process.pid)
    return [up, *up.children(recursive=True)]


def test_no_file_has_a_secret(run: Run) -> None:
    names = {Path(place).name for place, _ in files(run)}
    assert {"state.toml", "models.toml", "audit.jsonl", "events.jsonl", "keys.toml", "up.txt", "control.log"} <= names
    assert {"multiplexer-0.log", "gateway.log", "monitor.log", "minilm-0.log", "instances.conf"} <= names
    assert leaked(run.secrets, files(run)) == []


def test_the_search_would_find_one(run: Run) -> None:
    planted = run.node.folder / "logs" / "planted.log"
    planted.write_bytes(b"\xff" * 100_000 + PLANTED.encode())
    try:
        assert leaked({"it": PLANTED.encode()}, files(run)) == [f"it in {planted}"]
    finally:
        planted.unlink()
    assert leaked(
        run.secrets,
        [("an answer", f"x{secret.decode('latin-1')}y".encode("latin-1")) for secret in run.secrets.values()],
    ) == [f"{name} in an answer" for name in run.secrets]


def test_no_command_line_has_a_secret(run: Run) -> None:
    lines = [(f"the arguments of {process.pid}", "\0".join(process.cmdline()).encode()) for process in cast(run)]
    assert len(lines) >= 7  # up, supervisord, control, multiplexer, gateway, monitor, minilm
    assert leaked(run.secrets, lines) == []


def test_no_answer_has_a_secret(run: Run) -> None:
    assert len(run.answers) > 300
    assert leaked(run.secrets, ((answer, answer.encode()) for answer in run.answers)) == []


def test_nothing_that_can_be_asked_has_a_secret(run: Run) -> None:
    asked = [(path, run.node.get(path).content) for path in ("/metrics", "/events", "/instances", "/models", "/health")]
    asked += [(path, run.node.call("GET", run.node.gateway_url + path).content) for path in ("/v1/models", "/info")]
    logs = run.node.get("/instances/minilm/logs")
    asked.append(("logs", logs.content))
    for arguments in (["status"], ["avail"], ["pid"], ["tail", "control"], ["tail", "minilm:minilm-0"], ["maintail"]):
        asked.append((f"supervisorctl {arguments}", run.node.supervisorctl(*arguments).encode()))
    assert all(content for _, content in asked)
    assert leaked(run.secrets, asked) == []


def test_who_the_operator_is_stays_with_him(run: Run) -> None:
    """`up` was started with a key and a certificate in its environment, and nothing below it has them."""
    assert run.node.process
    up, *below = cast(run)
    assert set(MADE[:1]) <= set(up.environ())
    assert len(below) >= 6
    for process in below:
        assert not set(MADE) & set(process.environ()), process.cmdline()
        content = "\n".join(process.environ().values()).encode()
        assert leaked({name: each for name, each in run.secrets.items() if name != "HF_TOKEN"}, [("it", content)]) == []
    (replica,) = run.node.processes_of("minilm")
    assert replica.environ()["HF_TOKEN"] == HF_TOKEN  # this it needs


# -- the audit --------------------------------------------------------------------------------------------------------


def audit(run: Run, ring: str = "audit") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.node.folder / f"{ring}.jsonl").read_text().splitlines()]


def test_each_changing_call_has_one_line(run: Run) -> None:
    for ring, strangers in (("audit", False), ("audit-401", True)):
        expected = [(each.event, each.who, each.status) for each in run.changes if (each.status == 401) is strangers]
        assert [(each["event"], each["who"], each["status"]) for each in audit(run, ring)] == expected
        assert len(expected) > 5
    assert {each.status for each in run.changes} >= {200, 201, 401, 403, 404, 405, 409, 422}
    assert len(run.changes) > 40


def test_each_line_says_who_from_where_and_when(run: Run) -> None:
    rings = audit(run), audit(run, "audit-401")
    assert all([each["seq"] for each in ring] == list(range(1, len(ring) + 1)) for ring in rings)
    lines = [line for ring in rings for line in ring]
    for each in lines:
        assert each["origin"] == "127.0.0.1"
        assert each["time"].endswith("Z")
        assert each["who"] in ("the-admin", "the-read", "the-inference", "anonymous")
        assert each["message"] == f"{each['who']} from 127.0.0.1: {each['status']}"
    assert not [each for each in lines if each["event"].split()[0] in ("GET", "HEAD", "OPTIONS")]
