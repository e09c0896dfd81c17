"""Every bad input of a REST client gets its promised status and code as JSON, and changes nothing: not the state file,
not the include file, not a process."""

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from testing.agreement import supervised
from testing.running import MINILM, RunningAppliance

pytestmark = pytest.mark.e2e
RFC3339_UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
JSON = {"Content-Type": "application/json"}
GOOD = {"name": "fine", "model_id": MINILM}
WHOLE_NUMBERS = ("port", "prometheus_port", "replicas", "max_batch_tokens", "max_concurrent_requests", "gpu_id")
BAD_NUMBERS = ('"8080"', "-1", "1.5", "1e400", "1" + "0" * 400, "true", "[]", "{}", '"1; rm"', "99999999999999999999")


MONITORS = ("ready", "unhealthy", "recovered")


def untouched(running: RunningAppliance) -> dict[str, Any]:
    """Everything that a refused request must leave alone."""
    return {
        "state": (running.folder / "state.toml").read_bytes(),
        "sections": (running.folder / "instances.conf").read_bytes(),
        "supervisor": sorted((each["group"], each["name"], each["pid"]) for each in supervised(running)),
        # Not what the monitor sees by itself, at its own time.
        "events": [each for each in running.get("/events").json() if each["event"] not in MONITORS],
    }


@pytest.fixture(scope="module", autouse=True)
def nothing_changes(appliance: RunningAppliance) -> Iterator[None]:
    """Over the whole module; a single test that changes something fails in `refused` already."""
    before = untouched(appliance)
    yield
    assert untouched(appliance) == before


def check(response: requests.Response, status: int, code: str | None) -> str:
    """The shape of every error; returns its message."""
    assert response.status_code == status, response.text[:300]
    assert response.headers["Content-Type"].partition(";")[0] == "application/json"
    body = response.json()
    assert set(body) == {"error", "code", "timestamp"}
    assert code in (None, body["code"]), body
    assert RFC3339_UTC.fullmatch(body["timestamp"])
    assert len(body["error"]) < 1000
    message: str = body["error"]
    assert message.isprintable(), message
    return message


def post(running: RunningAppliance, body: Any, headers: dict[str, str] = JSON) -> requests.Response:
    return requests.post(f"{running.url}/instances", data=body, headers=headers, timeout=60)


def refused(running: RunningAppliance, body: Any, status: int = 422, code: str = "VALIDATION_ERROR") -> str:
    before = (running.folder / "state.toml").read_bytes()
    message = check(post(running, body if isinstance(body, (str, bytes)) else json.dumps(body)), status, code)
    assert (running.folder / "state.toml").read_bytes() == before
    return message


# -- bodies ----------------------------------------------------------------------------------------------------------

BAD_NAMES = {
    "path": "../../etc/passwd",
    "absolute path": "/etc/passwd",
    "dots": "..",
    "newline": "a\nb",
    "trailing newline": "fine\n",
    "section": "a]\n[program:evil]\ncommand=/bin/false",
    "percent": "%(x)s",
    "environment": "%(ENV_PATH)s",
    "semicolon": "a ;b",
    "quotes": "a'\"b",
    "dollar": "$(reboot)",
    "10 kB": "a" * 10_000,
    "65 letters": "a" * 65,
    "nothing": "",
    "blank": " ",
    "digit first": "1a",
    "colon": "a:b",
    "dot first": ".a",
    "name of a job": "job.1",
    "nul": "a\x00b",
    "not ASCII": "modèle",
    "digits of another script": "a\u0661",
    "lone surrogate": "a\ud800",
    "right to left": "a\u202eb",
    "number": 7,
    "list": ["a"],
    "object": {"a": 1},
    "null": None,
    "control": "control",
    "multiplexer": "multiplexer",
    "gateway": "gateway",
    "monitor": "monitor",
}


@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES.keys())
def test_a_bad_name_is_refused(appliance: RunningAppliance, name: Any) -> None:
    assert "name" in refused(appliance, {**GOOD, "name": name})


@pytest.mark.parametrize("number", BAD_NUMBERS, ids=lambda number: number[:20])
@pytest.mark.parametrize("field", WHOLE_NUMBERS)
def test_a_bad_number_is_refused_with_the_name_of_its_field(
    appliance: RunningAppliance, field: str, number: str
) -> None:
    assert field in refused(appliance, f'{{"name": "fine", "model_id": "x/y", "{field}": {number}}}')


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_are_bad_requests(appliance: RunningAppliance, constant: str) -> None:
    refused(appliance, f'{{"name": "fine", "model_id": "x/y", "replicas": {constant}}}', 400, "BAD_REQUEST")


def test_a_number_of_ten_thousand_digits_is_refused(appliance: RunningAppliance) -> None:
    response = post(appliance, f'{{"name": "fine", "model_id": "x/y", "replicas": {"9" * 10_000}}}')
    check(response, 400, "BAD_REQUEST")


BAD_VALUES = {
    "no name": ({"model_id": MINILM}, "name"),
    "no model": ({"name": "fine"}, "model_id"),
    "nothing": ({}, "name"),
    "empty model": ({**GOOD, "model_id": ""}, "model_id"),
    "flag as model": ({**GOOD, "model_id": "--port"}, "model_id"),
    "newline in model": ({**GOOD, "model_id": "a\n[program:evil]"}, "model_id"),
    "model of 10 kB": ({**GOOD, "model_id": "m" * 10_000}, "model_id"),
    "surrogate in model": ({**GOOD, "model_id": "\ud800"}, "model_id"),
    "nul in revision": ({**GOOD, "revision": "\x00"}, "revision"),
    "unknown pooling": ({**GOOD, "pooling": "maen"}, "mean"),
    "list as pooling": ({**GOOD, "pooling": ["mean"]}, "pooling"),
    "unknown dtype": ({**GOOD, "dtype": "int3"}, "float16"),
    "unknown engine": ({**GOOD, "engine": "vllm"}, "embedded"),
    "owned flag": ({**GOOD, "extra_args": ["--port", "1"]}, "--port"),
    "owned flag with =": ({**GOOD, "extra_args": ["--json-output=false"]}, "--json-output"),
    "owned short flag": ({**GOOD, "extra_args": ["-p9"]}, "-p"),
    "text as list": ({**GOOD, "extra_args": "--auto-truncate"}, "extra_args"),
    "newline in flag": ({**GOOD, "extra_args": ["a\nb"]}, "extra_args"),
    "numbers in list": ({**GOOD, "extra_args": [1]}, "extra_args"),
    "both gpu fields": ({**GOOD, "gpu_id": 0, "gpu_ids": [0]}, "gpu_ids"),
    "replicas 0": ({**GOOD, "replicas": 0}, "replicas"),
    "port 1": ({**GOOD, "port": 1}, "1024"),
    "port 0.0": ({**GOOD, "port": 0.0}, "port"),
    "port 80": ({**GOOD, "port": 80}, "1024"),
    "port 1023": ({**GOOD, "port": 1023}, "1024"),
    "port 65536": ({**GOOD, "port": 65536}, "65535"),
    "no room for replicas": ({**GOOD, "port": 65535, "replicas": 2}, "port"),
    "overlap": ({**GOOD, "port": 30000, "prometheus_port": 30001, "replicas": 2}, "overlap"),
    "unknown field": ({**GOOD, "replica": 2}, '"replicas"'),
    "field of other case": ({**GOOD, "Port": 2}, '"port"'),
    "hostile field": ({**GOOD, "%(x)s\n" * 2000: 2}, "nknown field"),
    "surrogate field": ({**GOOD, "\ud800": 2}, "nknown field"),
}


@pytest.mark.parametrize(("body", "hint"), BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_a_bad_value_is_refused_with_a_hint(appliance: RunningAppliance, body: dict[str, Any], hint: str) -> None:
    assert hint in refused(appliance, body)


@pytest.mark.parametrize("body", ["[]", '"text"', "null", "7", "true", "[" + json.dumps(GOOD) + "]"])
def test_json_that_is_no_object_is_refused(appliance: RunningAppliance, body: str) -> None:
    response = post(appliance, body)
    check(response, response.status_code, None)
    assert (response.status_code, response.json()["code"]) in ((422, "VALIDATION_ERROR"), (400, "BAD_REQUEST"))


UNREADABLE = {
    "empty": b"",
    "blank": b"  \n",
    "cut": b'{"name": "fine"',
    "two objects": b"{}{}",
    "single quotes": b"{'name': 'fine'}",
    "form": b"name=fine&model_id=x",
    "not UTF-8": b'{"name": "\xff\xfe"}',
    "UTF-16": json.dumps(GOOD).encode("utf-16"),
    "binary": bytes(range(256)),
    "nul bytes": b"\x00" * 1000,
    "10,000 lists deep": b"[" * 10_000 + b"]" * 10_000,
    "10,000 objects deep": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "deep inside a field": b'{"name": "fine", "extra_args": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "unclosed 1 MB deep": b"[" * 1_000_000,
    "control character in text": b'{"name": "a\nb"}',
}


@pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_body_that_is_not_json_is_a_bad_request(appliance: RunningAppliance, body: bytes) -> None:
    refused(appliance, body, 400, "BAD_REQUEST")


@pytest.mark.parametrize("size", [2 * 2**20 + 1, 3_000_000, 30_000_000])
def test_a_body_over_two_mebibytes_is_too_large(appliance: RunningAppliance, size: int) -> None:
    for _ in range(3):  # an answer that races with the unread body would be lost now and then
        check(post(appliance, b" " * size), 413, None)


def test_a_body_of_exactly_two_mebibytes_is_read(appliance: RunningAppliance) -> None:
    body = json.dumps({**GOOD, "name": "1"}).encode()
    refused(appliance, body + b" " * (2 * 2**20 - len(body)))


def test_a_chunked_body_is_read_like_any_other(appliance: RunningAppliance) -> None:
    response = requests.post(f"{appliance.url}/instances", data=iter([b'{"name": ', b'"1"}']), headers=JSON, timeout=60)
    assert "name" in check(response, 422, "VALIDATION_ERROR")


def test_a_chunked_body_of_3_mb_is_too_large(appliance: RunningAppliance) -> None:
    chunks = iter([b" " * 100_000] * 30)
    response = requests.post(f"{appliance.url}/instances", data=chunks, headers=JSON, timeout=60)
    check(response, 413, None)


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "application/xml", "multipart/form-data", "json", "", None],
)
def test_another_content_type_is_unsupported(appliance: RunningAppliance, kind: str | None) -> None:
    check(post(appliance, json.dumps(GOOD).encode(), {} if kind is None else {"Content-Type": kind}), 415, None)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/json ;x=1"])
def test_spellings_of_the_json_content_type_are_taken(appliance: RunningAppliance, kind: str) -> None:
    check(post(appliance, b"{}", {"Content-Type": kind}), 422, "VALIDATION_ERROR")


# -- this machine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{"gpu_id": 99}, {"gpu_ids": [98, 99]}, {"gpu_id": 1023}, {"gpu_id": 100_000}, {"gpu_ids": [100_000]}]
)
def test_a_gpu_that_does_not_exist_is_refused(appliance: RunningAppliance, fields: dict[str, Any]) -> None:
    refused(appliance, {**GOOD, **fields}, code="INVALID_GPU_ID")


@pytest.mark.parametrize("field", ["port", "prometheus_port"])
@pytest.mark.parametrize("owner", ["api_port", "grpc_port", "http_port"])
def test_our_own_ports_are_refused(appliance: RunningAppliance, field: str, owner: str) -> None:
    message = refused(appliance, {**GOOD, field: getattr(appliance, owner)}, code="PORT_CONFLICT")
    assert owner in message


@pytest.mark.parametrize("owner", ["port", "prometheus_port"])
@pytest.mark.parametrize("field", ["port", "prometheus_port"])
def test_ports_of_another_instance_are_refused(appliance: RunningAppliance, field: str, owner: str) -> None:
    taken = appliance.instance("minilm")[owner]
    assert "minilm" in refused(appliance, {**GOOD, field: taken}, code="PORT_CONFLICT")
    refused(appliance, {**GOOD, field: taken - 2, "replicas": 3}, code="PORT_CONFLICT")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("field", ["port", "prometheus_port"])
def test_ports_of_other_programs_are_refused(appliance: RunningAppliance, field: str, host: str) -> None:
    with socket.create_server((host, 0)) as listener:
        taken = listener.getsockname()[1]
        assert str(taken) in refused(appliance, {**GOOD, field: taken}, code="PORT_CONFLICT")
        refused(appliance, {**GOOD, field: taken - 1, "replicas": 2}, code="PORT_CONFLICT")


def test_a_name_that_exists_is_a_conflict(appliance: RunningAppliance) -> None:
    assert "minilm" in refused(appliance, {**GOOD, "name": "minilm"}, 409, "INSTANCE_EXISTS")


def test_an_engine_that_is_not_installed_is_refused(appliance: RunningAppliance) -> None:
    assert "text-embeddings-router" in refused(appliance, {**GOOD, "engine": "tei"})


# -- paths, verbs and queries ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "path", "allowed"),
    [
        ("PUT", "/instances", {"GET", "POST"}),
        ("DELETE", "/instances", {"GET", "POST"}),
        ("PATCH", "/instances", {"GET", "POST"}),
        ("POST", "/instances/minilm", {"GET", "DELETE", "PATCH", "PUT"}),
        ("GET", "/instances/minilm/start", {"POST"}),
        ("GET", "/instances/minilm/stop", {"POST"}),
        ("DELETE", "/instances/minilm/restart", {"POST"}),
        ("POST", "/instances/minilm/logs", {"GET"}),
        ("POST", "/health", {"GET"}),
        ("TRACE", "/instances", {"GET", "POST"}),
        ("DELETE", "/events", {"GET"}),
    ],
)
def test_a_wrong_verb_is_told_the_right_ones(
    appliance: RunningAppliance, verb: str, path: str, allowed: set[str]
) -> None:
    response = requests.request(verb, appliance.url + path, timeout=60)
    check(response, 405, "METHOD_NOT_ALLOWED")
    assert allowed <= {each.strip() for each in response.headers["Allow"].split(",")}


def test_a_verb_that_http_does_not_have_is_an_error_in_json(appliance: RunningAppliance) -> None:
    response = requests.request("BREW", f"{appliance.url}/instances", timeout=60)
    check(response, 400, "BAD_REQUEST")


@pytest.mark.parametrize(
    "path", ["/", "/nothing", "/instances/minilm/", "/instances/minilm/fly", "/instance", "/instances/minilm/stop/now"]
)
@pytest.mark.parametrize("verb", ["GET", "POST", "DELETE"])
def test_an_unknown_path_is_not_found(appliance: RunningAppliance, verb: str, path: str) -> None:
    check(requests.request(verb, appliance.url + path, timeout=60), 404, "NOT_FOUND")


HOSTILE_PATHS = [
    "%2F",
    "..%2F..%2Fetc%2Fpasswd",
    "%00",
    "%0A",
    "minilm%0A",
    "minilm%00",
    "%F0",
    "%F0%9F%98%80",
    "%25%28x%29s",
]


@pytest.mark.parametrize("name", [*HOSTILE_PATHS, "a" * 3000, "MINILM", "control", "%zz", "minilm%20", "m*", "..%5C"])
@pytest.mark.parametrize(("verb", "rest"), [("GET", ""), ("DELETE", ""), ("POST", "/stop"), ("GET", "/logs")])
def test_a_hostile_name_in_the_path_is_not_found(appliance: RunningAppliance, verb: str, rest: str, name: str) -> None:
    prepared = requests.Request(verb, appliance.url).prepare()
    prepared.url = f"{appliance.url}/instances/{name}{rest}"  # exactly these bytes
    response = requests.Session().send(prepared, timeout=60)
    check(response, 404, "NOT_FOUND" if "%2F" in name else "INSTANCE_NOT_FOUND")


@pytest.mark.parametrize(
    "query",
    ["start=x", "start=1.5", "start=", "end=1e3", "end=%00", "replica=%F0", "start=99999999999999999999", "replica=--1",
     "start=%D9%A1", "strat=1", "start=1&nothing=2", "replica=1", "replica=-1", "replica=64"],
)  # fmt: skip
def test_a_bad_query_of_the_logs_is_refused(appliance: RunningAppliance, query: str) -> None:
    check(appliance.get(f"/instances/minilm/logs?{query}"), 422, "VALIDATION_ERROR")


def test_an_unknown_query_parameter_gets_a_suggestion(appliance: RunningAppliance) -> None:
    assert '"start"' in check(appliance.get("/instances/minilm/logs?strat=1"), 422, "VALIDATION_ERROR")


@pytest.mark.parametrize("query", ["since=x", "since=1.5", "sinse=1"])
def test_a_bad_query_of_the_events_is_refused(appliance: RunningAppliance, query: str) -> None:
    check(appliance.get(f"/events?{query}"), 422, "VALIDATION_ERROR")


@pytest.mark.parametrize("path", ["/instances/", "/instances//stop"])
@pytest.mark.parametrize("verb", ["GET", "POST", "DELETE"])
def test_an_empty_part_of_a_path_is_an_error_in_json(appliance: RunningAppliance, verb: str, path: str) -> None:
    prepared = requests.Request(verb, appliance.url).prepare()
    prepared.url = appliance.url + path
    response = requests.Session().send(prepared, timeout=60)
    assert response.status_code in (404, 405)
    check(response, response.status_code, None)


def test_create_takes_no_query_parameters(appliance: RunningAppliance) -> None:
    response = requests.post(f"{appliance.url}/instances?dry_run=1", json=GOOD, timeout=60)
    check(response, 422, "VALIDATION_ERROR")


def test_logs_are_python_slices(appliance: RunningAppliance) -> None:
    path = "/instances/minilm/logs"
    everything = appliance.get(path).json()
    lines, total = everything["lines"], everything["total_lines"]
    assert everything == {"lines": lines, "start": 0, "end": total, "total_lines": total}
    assert total == len(lines) > 0
    far = 10**17
    for start, end in [
        (0, 1),
        (-1, None),
        (None, -1),
        (-2, -1),
        (1, 0),
        (total, None),
        (-far, far),
        (far, -far),
        (0, 0),
    ]:
        query = {key: value for key, value in (("start", start), ("end", end)) if value is not None}
        found = appliance.get(path, **query).json()
        assert found["lines"] == lines[start:end], query
        assert found["total_lines"] == total
        assert 0 <= found["start"] <= total
        assert 0 <= found["end"] <= total
    assert appliance.get(path, replica=0).json() == everything


# -- what gunicorn answers by itself ---------------------------------------------------------------------------------

RAW = {
    "bad request line": (b"HELLO\r\n\r\n", {400}),
    "no version": (b"GET /health\r\n\r\n", {400, 505}),
    "version 9": (b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n", {400, 505}),
    "binary": (bytes(range(128, 256)) + b"\r\n\r\n", {400}),
    "header without colon": (b"GET /health HTTP/1.1\r\nHost: x\r\nnonsense\r\n\r\n", {400}),
    "huge header": (b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 100_000 + b"\r\n\r\n", {400, 431}),
    "1,000 headers": (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-A: a\r\n" * 1000 + b"\r\n", {400, 431}),
    "huge path": (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", {400, 414}),
    "length is text": (b"POST /instances HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n", {400}),
    "length is negative": (b"POST /instances HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", {400}),
    "two lengths": (b"POST /instances HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", {400}),
    "bad chunk": (
        b"POST /instances HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        {400},
    ),
}


def raw_answer(running: RunningAppliance, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", running.api_port), timeout=20) as connection:
        try:
            connection.sendall(request)
            with contextlib.suppress(OSError):  # the server has answered and closed already
                connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65536), b""))
        except ConnectionError:
            return b""


@pytest.mark.parametrize(("request_bytes", "statuses"), RAW.values(), ids=RAW.keys())
def test_what_is_not_http_is_answered_in_json_too(
    appliance: RunningAppliance, request_bytes: bytes, statuses: set[int]
) -> None:
    head, _, body = raw_answer(appliance, request_bytes).partition(b"\r\n\r\n")
    print(head.decode("latin-1"), body[:300].decode("latin-1"), sep="\n\n")
    assert int(head.split()[1]) in statuses
    assert b"application/json" in head.lower()
    assert set(json.loads(body)) == {"error", "code", "timestamp"}
