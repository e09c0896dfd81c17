"""What the pages tell of statuses, headers, metadata and fields, asked of a running appliance."""

import http.client
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest
import requests

from appliance.control.schemas import SCHEMAS
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei.v1.tei_pb2_grpc import EmbedStub
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.engines import FAMILIES
from testing.running import MINILM, RunningAppliance
from tests.pages import PAGES
from tests.test_docs_proved import GONE, INFERENCE, JSON, MANAGEMENT, MODEL, OWN, STORY, Asked

OF_EVENTS = {
    "replica",
    "cause",
    "last_lines",
    "model",
    "entries",
    "fingerprint",
    "generation",
}  # what some events have besides


@pytest.fixture(scope="module")
def told(appliance: RunningAppliance) -> Iterator[RunningAppliance]:
    """The shared appliance with a reranker besides."""
    appliance.create(**OWN)
    appliance.wait_ready("told")
    yield appliance
    assert appliance.delete("/instances/told").status_code == 200


def answered(running: RunningAppliance, asked: Asked) -> tuple[int, str]:
    """The status, and the beginning of the answer.

    Not with `requests`, which would set the length of a body that says another one.
    """
    port = {9000: running.api_port, 9002: running.http_port}[asked.port]
    body = asked.body if isinstance(asked.body, bytes | None) else json.dumps(asked.body)
    headers = {**(JSON if isinstance(body, str) else {}), **(asked.headers or {})}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(asked.method, asked.path, body, headers)
        response = connection.getresponse()
        return response.status, response.read(1000).decode(errors="replace")
    finally:
        connection.close()


def name_of(asked: Asked) -> str:
    return f"{asked.method} {asked.path} {asked.status}"


@pytest.mark.parametrize("asked", [*MANAGEMENT, *INFERENCE], ids=name_of)
def test_a_request_gets_the_status_that_is_told(told: RunningAppliance, asked: Asked) -> None:
    status, words = answered(told, asked)
    assert status == asked.status, words


def test_an_instance_gets_the_statuses_that_are_told(appliance: RunningAppliance) -> None:
    for asked in STORY:
        assert answered(appliance, asked)[0] == asked.status, asked
        if asked.status == 201 and asked.path == "/instances":
            appliance.wait_ready("story")


def test_an_instance_without_its_model_gets_the_statuses_that_are_told(
    appliance: RunningAppliance, tmp_path: Path
) -> None:
    shutil.copytree(FAMILIES / "bert-cls", tmp_path / "model")
    appliance.create("gone", model_id=str(tmp_path / "model"))
    appliance.wait_ready("gone")
    assert appliance.post("/instances/gone/stop").status_code == 200
    shutil.rmtree(tmp_path / "model")
    for asked in GONE:
        assert answered(appliance, asked)[0] == asked.status, asked


@pytest.mark.parametrize(
    ("name", "path"), [("Instance", "/instances/minilm"), ("Model", MODEL), ("Event", "/events"), ("Gpu", "/gpus")]
)
def test_every_field_of_an_answer_is_told(appliance: RunningAppliance, name: str, path: str) -> None:
    found = appliance.get(path).json()
    answers = found if isinstance(found, list) else [found]
    told = set(SCHEMAS[name]["properties"])
    assert [
        key for answer in answers for key in answer if key not in told | (OF_EVENTS if name == "Event" else set())
    ] == []


HEADERS = [
    ("/v1/embeddings", {"input": "hello"}, "X-TEI-Instance", "minilm"),
    ("/v1/embeddings", {"input": "hello"}, "Server-Timing", "inference;dur="),
    ("/v1/embeddings", {"input": "hello"}, "x-compute-tokens", "3"),
    ("/v1/embeddings", {"input": [7592]}, "X-TEI-Token-Ids", "decoded"),
]


@pytest.mark.parametrize(("path", "body", "header", "value"), HEADERS)
def test_an_answer_has_the_header_that_is_told(
    told: RunningAppliance, path: str, body: Any, header: str, value: str
) -> None:
    answer = requests.post(
        f"http://127.0.0.1:{told.http_port}{path}", json=body, headers={"X-TEI-Instance": "minilm"}, timeout=60
    )
    assert value in answer.headers[header]


# -- gRPC -------------------------------------------------------------------------------------------------------------


def arrow(*texts: str | None, column: str = "text") -> bytes:
    batch = pa.record_batch({column: pa.array(texts, pa.string() if column == "text" else pa.null())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


THERE, NOBODY = mux.Target(instance_name="minilm"), mux.Target(instance_name="nobody")
HELLO = tei.EmbedRequest(inputs="hello")
REFUSED = [
    ("Embed", mux.EmbedRequest(request=HELLO), "INVALID_ARGUMENT", "x-tei-code"),
    ("Embed", mux.EmbedRequest(target=THERE), "INVALID_ARGUMENT", "x-tei-code"),
    ("EmbedArrow", mux.EmbedArrowRequest(target=THERE, arrow_ipc=b"none"), "INVALID_ARGUMENT", "x-tei-code"),
    (
        "EmbedArrow",
        mux.EmbedArrowRequest(target=THERE, arrow_ipc=arrow("a", "")),
        "INVALID_ARGUMENT",
        "x-arrow-error-row",
    ),
    ("Embed", mux.EmbedRequest(target=NOBODY, request=HELLO), "NOT_FOUND", "x-tei-code"),
    ("Embed", mux.EmbedRequest(target=mux.Target(model_id="none"), request=HELLO), "NOT_FOUND", "x-tei-code"),
]


@pytest.mark.parametrize(("name", "message", "status", "key"), REFUSED)
def test_a_call_ends_with_the_status_and_the_metadata_that_are_told(
    told: RunningAppliance, name: str, message: Any, status: str, key: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        getattr(told.stub(), name)(message, timeout=30)
    assert caught.value.code().name == status
    assert key in dict(caught.value.trailing_metadata())
    assert f"`{status}`" in PAGES["grpc.md"]
    assert f"`{key}`" in PAGES["grpc.md"]


UNARY = [
    ("Embed", mux.EmbedRequest(target=THERE, request=HELLO), True),
    ("Info", mux.InfoRequest(target=THERE), True),
    ("Tokenize", mux.EncodeRequest(target=THERE, request=tei.EncodeRequest(inputs="hello")), True),
    ("EmbedArrow", mux.EmbedArrowRequest(target=THERE, arrow_ipc=arrow("a")), False),
]


@pytest.mark.parametrize(("name", "message", "named"), UNARY)
def test_a_unary_reply_names_its_instance(told: RunningAppliance, name: str, message: Any, named: bool) -> None:
    """Replies to Arrow, which several replicas answer together, do not."""
    _, call = getattr(told.stub(), name).with_call(message, timeout=30)
    assert (dict(call.initial_metadata()).get("x-tei-instance") == "minilm") is named


def test_rows_that_fail_become_null_where_that_is_asked_for(told: RunningAppliance) -> None:
    message = mux.EmbedArrowRequest(target=THERE, arrow_ipc=arrow("a", ""))
    reply = told.stub().EmbedArrow(message, metadata=[("x-arrow-on-error", "null")], timeout=30)
    table = pa.ipc.open_stream(reply.arrow_ipc).read_all()
    assert table.column("embeddings").null_count == 1
    assert table.column("error").null_count == 1


@pytest.mark.parametrize(("key", "value"), [("x-tei-instance", "minilm"), ("x-tei-model", MINILM)])
def test_tei_itself_takes_the_target_from_the_metadata(told: RunningAppliance, key: str, value: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{told.grpc_port}") as channel:
        assert len(EmbedStub(channel).Embed(HELLO, metadata=[(key, value)], timeout=30).embeddings) == 384
