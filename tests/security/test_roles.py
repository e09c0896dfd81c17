"""Every route and every RPC with every key, against a table by hand; and keys that change while the node runs."""

from __future__ import annotations

import base64
import itertools
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import requests
import urllib3
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from appliance.core import access
from appliance.drivers import keysfile
from testing.running import eventually
from tests.security import VERBS, Caller, Secured, routes, rpcs

pytestmark = pytest.mark.processes

SECS = 15.0
ROLES = ("admin", "operator", "inference", "read")
SOON_SECS = 5.0  # far less is promised; on a busy machine the asking alone takes a second

# The table at the top of core/access.py, by hand. "open" is not among them: open_health is not set here.
MEETS = {
    "any": ROLES,
    "read": ("admin", "operator", "read"),
    "inference": ("admin", "operator", "inference"),
    "operate": ("admin", "operator"),
    "admin": ("admin",),
}
STREAM = "/events/stream"
# What each route of the two Falcon applications needs. One that is missing here fails the first test.
NEEDS = {
    "rest": """
        GET /health any
        GET /ready any
        GET /metrics read
        GET /openapi.json read
        GET /models/{model_id}/archive operate
        POST /archives operate
        GET /keys admin
        POST /keys admin
        DELETE /keys/{name} admin
        GET /cache read
        DELETE /cache admin
        GET /compatibility read
        GET /gpus read
        GET /events read
        GET /events/stream read
        GET /doctor read
        GET /instances read
        POST /instances operate
        GET /instances/{name} read
        PATCH /instances/{name} operate
        PUT /instances/{name} operate
        DELETE /instances/{name} admin
        GET /instances/{name}/logs read
        GET /instances/{name}/series read
        GET /instances/{name}/bench read
        POST /instances/{name}/bench operate
        POST /instances/{name}/start operate
        POST /instances/{name}/stop operate
        POST /instances/{name}/restart operate
        POST /instances/{name}/undo operate
        POST /instances/{name}/sleep operate
        POST /instances/{name}/wake operate
        GET /models read
        POST /models operate
        GET /models/{model_id} read
        DELETE /models/{model_id} admin
        POST /models/{model_id}/download operate
        POST /models/{model_id}/load operate
        POST /models/{model_id}/cancel operate
    """,
    "gateway": """
        GET /health any
        GET /docs page
        GET /docs/{file} page
        GET /openapi.json any
        GET /info any
        GET /v1/models any
        GET /v1/models/{model:path} any
        POST / inference
        POST /embed inference
        POST /embed_sparse inference
        POST /embed_all inference
        POST /hybrid inference
        POST /search-rerank inference
        POST /rerank inference
        POST /predict inference
        POST /similarity inference
        POST /tokenize inference
        POST /decode inference
        POST /v1/embeddings inference
        POST /embeddings inference
        POST /v1/rerank inference
        POST /v2/rerank inference
        POST /v1/embed inference
        POST /v2/embed inference
        POST /openai/deployments/{deployment}/embeddings inference
        POST /openai/v1/embeddings inference
        GET /openai/v1/models any
        GET /openai/models any
        GET /models any
        GET /openai/v1/models/{model:path} any
        GET /openai/models/{model:path} any
        GET /api/ps any
        POST /api/show inference
        POST /score inference
        POST /v1/score inference
        POST /pooling inference
        POST /api/embed inference
        POST /api/embeddings inference
        GET /api/tags any
        GET /api/version any
        GET / any
        GET /ping any
        GET /metrics read
        GET /api-doc/openapi.json any
        GET /invocations any
        POST /invocations inference
        POST /vertex inference
    """,
}
WRITTEN = {
    (listener, verb, template): need
    for listener, rows in NEEDS.items()
    for verb, template, need in (row.split() for row in rows.strip().splitlines())
}
# Whoever may GET may ask with HEAD, too.
HEADS = {(listener, "HEAD", path): need for (listener, verb, path), need in WRITTEN.items() if verb == "GET"}
TABLE = WRITTEN | HEADS
# RPCs, of which there are many more than kinds: those that need any key; all others need inference.
ANY_RPC = (
    "/tei.v1.Info/Info",
    "/tei_multiplexer.v1.TeiMultiplexer/Info",
    "/tei_appliance.v1.Directory/List",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/List",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)
ABSENT = ("/nowhere", "/instances/none/nowhere/", "/%2e%2e/")
NO_RPC = ("/tei_multiplexer.v1.TeiMultiplexer/None", "/tei.v1.Embed/", "/a.b/C")

HELD_BY_NOBODY = {
    "no key": None,
    "an empty key": "Bearer ",
    "a wrong key": f"Bearer tei-{'x' * 43}",
    "a malformed header": "Basic YTpi",
}
CALLERS = (*HELD_BY_NOBODY, "a key without its scheme", "two keys", "the digest of a key", *ROLES)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """Started without a key; the first one, of an admin, turns authentication on."""
    with Secured(tmp_path_factory.mktemp("roles"), "", Caller()) as running:
        running.wait_ready("minilm", 60)
        assert all(let_in(running, None).values())
        running.caller = Caller(key=running.key("admin", "admin"))
        yield running


@pytest.fixture(scope="module")
def keys(node: Secured) -> dict[str, str]:
    """By role."""
    return {"admin": node.caller.key} | {role: node.key(role, role) for role in ROLES[1:]}


@pytest.fixture(scope="module")
def headers(keys: dict[str, str]) -> dict[str, str | None]:
    """What each of CALLERS sends."""
    return {
        **HELD_BY_NOBODY,
        "a key without its scheme": keys["admin"],
        "two keys": f"Bearer {keys['read']}, Bearer {keys['admin']}",
        "the digest of a key": f"Bearer {access.digest(keys['admin'])}",
        **{role: f"Bearer {key}" for role, key in keys.items()},
    }


# -- the tables -------------------------------------------------------------------------------------------------------


def test_every_route_is_in_the_table() -> None:
    assert set(TABLE) == {
        (route.listener, route.verb, route.template) for route in routes() if route.served and route.verb != "OPTIONS"
    }
    assert len(routes()) == len({(route.listener, route.template) for route in routes()}) * len(VERBS)


def test_every_rpc_is_in_the_table(node: Secured) -> None:
    """What the descriptors have is what the port says it has."""
    with node.channel() as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest

        def answer(request: Any) -> Any:
            return next(stub.ServerReflectionInfo(iter([request]), timeout=SECS))

        listed = {each.name for each in answer(ask(list_services="")).list_services_response.service}
        reflected = set()
        for service in listed:
            for raw in answer(ask(file_containing_symbol=service)).file_descriptor_response.file_descriptor_proto:
                file = descriptor_pb2.FileDescriptorProto.FromString(raw)
                reflected |= {
                    f"/{file.package}.{each.name}/{method.name}" for each in file.service for method in each.method
                }
    v1 = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"  # described by the messages of v1alpha
    assert {rpc.path for rpc in rpcs()} == reflected | {v1}
    assert {rpc.service for rpc in rpcs()} == listed
    assert set(ANY_RPC) <= {rpc.path for rpc in rpcs()}


def rest_rows() -> list[tuple[str, str, str, str | None]]:
    """(listener, verb, path, need); the gateway's once more for an instance. No need: nothing is served there."""
    rows: list[tuple[str, str, str, str | None]] = []
    for route in routes():
        need = TABLE.get((route.listener, route.verb, route.template))
        rows.append((route.listener, route.verb, route.path, need))
        if route.listener == "gateway":
            rows.append((route.listener, route.verb, f"/instances/none{route.path}", "any" if need == "page" else need))
    for listener, verb in itertools.product(("rest", "gateway"), VERBS):
        rows += [(listener, verb, path, None) for path in ABSENT]
    return rows


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("listener", ["rest", "gateway"])
def test_every_route_lets_in_whom_it_should(
    node: Secured, headers: dict[str, str | None], listener: str, caller: str
) -> None:
    url = {"rest": node.url, "gateway": node.gateway_url}[listener]
    wrong, count = [], 0
    header = headers[caller]
    sent = {} if header is None else {"Authorization": header}
    # Not `requests`: its own work for these 10,500 requests takes 3 s more, and it decodes what is in a path.
    with urllib3.PoolManager(timeout=SECS, retries=False) as pool:
        for _, verb, path, need in (row for row in rest_rows() if row[0] == listener):
            endless = path == STREAM and verb == "GET"
            answer = pool.request(verb, url + path, headers=sent, redirect=False, preload_content=not endless)
            count += 1
            if need == "page":  # into which a key is typed: for everybody
                right = answer.status in (200, 404)
            elif caller not in ROLES:
                right = answer.status == 401 and answer.headers.get("WWW-Authenticate") == "Bearer"
            elif need is None:
                absent = 404 if path in ABSENT else 405
                right = verb == "OPTIONS" or answer.status == absent
                right |= caller != "admin" and answer.status == 403  # to a role, the need comes first
            else:
                right = (answer.status == 403) == (caller not in MEETS[need]) and answer.status != 401
            if not right or answer.status == 500:
                wrong.append(f"{verb} {path}: {answer.status} {b'' if endless else answer.data[:200]!r}")
            if endless:
                answer.close()
    assert not wrong
    assert count >= {"rest": 20 * len(VERBS), "gateway": 40 * len(VERBS)}[listener]


def status_of(channel: grpc.Channel, path: str, header: str | None) -> grpc.StatusCode:
    """Of one empty message sent to any method; OK when it is answered."""
    metadata = [("authorization", header)] if header is not None else []
    call = channel.stream_stream(path)(iter([b""]), metadata=metadata, timeout=SECS)
    try:
        next(call, None)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    finally:
        call.cancel()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("caller", CALLERS)
def test_every_rpc_lets_in_whom_it_should(node: Secured, headers: dict[str, str | None], caller: str) -> None:
    wrong = []
    denials = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
    with node.channel(Caller()) as channel:
        for path in (*(rpc.path for rpc in rpcs()), *NO_RPC):
            code = status_of(channel, path, headers[caller])
            if caller not in ROLES:
                right = code is denials[0]
            elif caller in MEETS["any" if path in ANY_RPC else "inference"]:
                right = code not in (*denials, grpc.StatusCode.UNKNOWN)
                right = right and (code is grpc.StatusCode.UNIMPLEMENTED or path not in NO_RPC)
            else:
                right = code is denials[1]
            if not right:
                wrong.append(f"{path}: {code.name}")
    assert not wrong


def test_a_key_counts_once_whatever_else_is_said(node: Secured, keys: dict[str, str]) -> None:
    """Only its headers say who one is, and a second one never makes more of the first."""
    elsewhere: list[dict[str, Any]] = [
        {"params": {"authorization": f"Bearer {keys['admin']}", "key": keys["admin"]}},
        {"headers": {"X-Key": keys["admin"], "Proxy-Authorization": f"Bearer {keys['admin']}"}},
        {"headers": {"Cookie": f"authorization=Bearer {keys['admin']}"}},
        {"auth": (keys["admin"], "password")},
        {"params": {"api-key": keys["admin"]}},
        {"headers": {"HTTP_AUTHORIZATION": f"Bearer {keys['admin']}", "X_Authorization": f"Bearer {keys['admin']}"}},
    ]
    for options in elsewhere:
        for url in (f"{node.url}/instances", f"{node.gateway_url}/v1/models"):
            assert requests.get(url, timeout=SECS, **options).status_code == 401
    assert (
        requests.request(
            "GET",
            f"{node.url}/instances/none",
            headers={"Authorization": f"Bearer {keys['read']}", "X-HTTP-Method-Override": "DELETE", "X-Role": "admin"},
            timeout=SECS,
        ).status_code
        == 404
    )


# -- keys that change -------------------------------------------------------------------------------------------------


def ways(key: str) -> dict[str, dict[str, str]]:
    """In which a client may send it."""
    user, password = (base64.b64encode(pair.encode()).decode() for pair in (f"{key}:", f"me:{key}"))
    return {
        "bearer": {"authorization": f"Bearer {key}"},
        "as user": {"authorization": f"Basic {user}"},
        "as password": {"authorization": f"Basic {password}"},
        "Azure": {"api-key": key},
        "others": {"x-api-key": key},
        "twice": {"authorization": f"Bearer {key}", "api-key": key},
    }


def outcomes(node: Secured, sent: dict[str, str]) -> list[Any]:
    """What each listener says to these headers: 200 and OK, else the refusal and its words."""
    outcome: list[Any] = []
    for url in (f"{node.url}/instances", f"{node.gateway_url}/v1/models"):
        answer = requests.get(url, headers=sent, timeout=SECS)
        outcome += [answer.status_code, answer.text if answer.status_code != 200 else ""]
    with node.channel(Caller()) as channel:
        call = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            call(b"", metadata=list(sent.items()), timeout=SECS)
            return [*outcome, grpc.StatusCode.OK, ""]
        except grpc.RpcError as error:
            return [*outcome, error.code(), error.details()]


@pytest.mark.parametrize("way", ways(""))
def test_a_key_may_be_sent_as_clients_send_it(node: Secured, keys: dict[str, str], way: str) -> None:
    assert outcomes(node, ways(keys["read"])[way]) == [200, "", 200, "", grpc.StatusCode.OK, ""]
    refused = outcomes(node, ways("tei-unknown")[way])
    assert refused[::2] == [401, 401, grpc.StatusCode.UNAUTHENTICATED]


def test_two_different_keys_in_one_request_are_refused_by_name(node: Secured, keys: dict[str, str]) -> None:
    refused = outcomes(node, {"authorization": f"Bearer {keys['admin']}", "x-api-key": keys["read"]})
    assert refused[::2] == [401, 401, grpc.StatusCode.UNAUTHENTICATED]
    for words in refused[1::2]:
        assert "different keys in authorization and x-api-key" in words
        assert "tei-" not in words


def let_in(node: Secured, key: str | None) -> dict[str, bool]:
    """On each listener, by every process behind it, as far as some connections can tell."""
    header = None if key is None else f"Bearer {key}"
    headers = {} if header is None else {"Authorization": header}
    urls = {"rest": f"{node.url}/health", "gateway": f"{node.gateway_url}/v1/models"}
    statuses = {
        listener: {requests.get(url, headers=headers, timeout=SECS).status_code for _ in range(5)}
        for listener, url in urls.items()
    }
    assert all(len(codes) == 1 and codes <= {200, 401} for codes in statuses.values()), statuses
    with node.channel(Caller()) as channel:
        code = status_of(channel, "/grpc.health.v1.Health/Check", header)
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED)
    return {**{listener: codes == {200} for listener, codes in statuses.items()}, "grpc": code is grpc.StatusCode.OK}


def everywhere(wanted: bool) -> dict[str, bool]:
    return dict.fromkeys(("rest", "gateway", "grpc"), wanted)


def settles(node: Secured, key: str | None, wanted: bool) -> None:
    """Each process looks at the files when it is asked, and not more often than every LOOK_SECS."""
    eventually(lambda: let_in(node, key) == everywhere(wanted), SOON_SECS)


@pytest.fixture
def own_keys(node: Secured, keys: dict[str, str]) -> Iterator[Path]:
    """The file of `appliance keys`, which is put back."""
    path = node.folder / "keys.toml"
    before = path.read_bytes()
    yield path
    path.unlink(missing_ok=True)
    path.write_bytes(before)
    path.chmod(0o600)
    settles(node, keys["read"], True)


def test_a_key_is_made_and_revoked_while_the_box_runs(node: Secured, own_keys: Path) -> None:
    key = node.key("passing", "read")
    began = time.monotonic()
    assert let_in(node, key) == everywhere(True)
    assert "passing" in node.cli("keys", "list").stdout
    assert node.cli("keys", "create", "passing", "admin").returncode == 1
    revoked = node.cli("keys", "revoke", "passing")
    assert (revoked.returncode, revoked.stderr) == (0, "")
    assert let_in(node, key) == everywhere(False)
    assert time.monotonic() - began < 30  # no restart was waited for
    assert stat.S_IMODE(own_keys.stat().st_mode) == 0o600
    assert node.cli("keys", "revoke", "passing").returncode == 1


def test_a_key_in_the_configuration_counts_too(node: Secured, own_keys: Path) -> None:
    key = "tei-of-the-configuration"
    before = node.config.read_text()
    digest = access.digest(key)
    try:
        node.config.write_text(f'{before}\n[[keys]]\nname = "configured"\nsha256 = "{digest}"\nrole = "read"\n')
        settles(node, key, True)
        assert "configured" in node.cli("keys", "list").stdout
        own_keys.write_text("broken = [")  # takes nothing from the other file
        assert let_in(node, key) == everywhere(True)
    finally:
        node.config.write_text(before)
    settles(node, key, False)


def test_a_mistake_in_the_configuration_takes_no_key_away_and_is_told(node: Secured, keys: dict[str, str]) -> None:
    before = node.config.read_text()
    node.config.write_text(f"{before}\nbroken = \n")
    try:
        assert let_in(node, keys["read"]) == everywhere(True)
        assert let_in(node, None) == everywhere(False)
        told = eventually(lambda: (found := node.get("/health").json())["status"] == "degraded" and found, SOON_SECS)
        assert f"keys_unreadable: Cannot read the keys in {node.config}" in told["reason"]
        eventually(lambda: "keys_unreadable" in [entry["event"] for entry in node.get("/events").json()])
    finally:
        node.config.write_text(before)
    eventually(lambda: node.get("/health").json()["status"] == "healthy", SOON_SECS)


def revoke_the_last(node: Secured, path: Path) -> None:
    keysfile.write(path, keysfile.read(path)[:1])
    revoked = node.cli("keys", "revoke", "admin")
    assert "everybody is kept out" in revoked.stdout


def a_folder(node: Secured, path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_link_to_nowhere(node: Secured, path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


SHUT: dict[str, Callable[[Secured, Path], object]] = {
    "the last key is revoked": revoke_the_last,
    "an empty file": lambda node, path: path.write_text(""),
    "an empty list": lambda node, path: path.write_text("keys = []\n"),
    "no TOML": lambda node, path: path.write_text("[[keys]\n"),
    "half a file": lambda node, path: path.write_bytes(path.read_bytes()[:-20]),
    "no text": lambda node, path: path.write_bytes(b"\xff\xfe\x00"),
    "keys that are no tables": lambda node, path: path.write_text('keys = ["admin"]\n'),
    "a table that is none": lambda node, path: path.write_text("keys = 1\n"),
    "a role that is none": lambda node, path: path.write_text(path.read_text().replace('"read"', '"root"')),
    "an unknown field": lambda node, path: path.write_text(path.read_text().replace("role =", "rolle =")),
    "lists without end": lambda node, path: path.write_text("keys = " + "[" * 100_000),
    "a folder": a_folder,
    "a link to nowhere": a_link_to_nowhere,
    "no file": lambda node, path: path.unlink(),
}


@pytest.mark.parametrize("how", SHUT)
def test_a_key_file_that_goes_wrong_keeps_everybody_out(
    node: Secured, keys: dict[str, str], own_keys: Path, how: str
) -> None:
    SHUT[how](node, own_keys)
    try:
        settles(node, keys["admin"], False)
        for key in (None, "tei-x", keys["admin"], keys["read"]):
            assert let_in(node, key) == everywhere(False)
    finally:
        if own_keys.is_dir():
            own_keys.rmdir()


def test_a_worker_that_starts_anew_does_not_let_everybody_in(node: Secured, own_keys: Path) -> None:
    """The file is gone, and the process that knew of it, too."""
    own_keys.unlink()
    assert let_in(node, None) == everywhere(False)
    for program in ("control", "gateway", "multiplexer"):
        processes = node.processes_of(program)
        workers = [process for process in processes if process.ppid() in [each.pid for each in processes]] or processes
        for process in workers:
            process.kill()
        psutil.wait_procs(workers, timeout=SECS)
    eventually(lambda: let_in(node, None), SECS)  # they answer again
    time.sleep(0.5)
    assert let_in(node, None) == everywhere(False)


# -- files ------------------------------------------------------------------------------------------------------------


def test_what_is_of_the_box_alone_is_readable_for_it_alone(node: Secured) -> None:
    sockets = sorted(node.folder.glob("multiplexer-*.sock"))
    assert len(sockets) == 2 * len(node.processes_of("multiplexer")) >= 2
    for path in (*sockets, node.folder / "control.sock", node.folder / "keys.toml", node.folder / "supervisor.sock"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
