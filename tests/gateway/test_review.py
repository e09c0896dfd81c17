"""What the review of the gateway found: one law a test."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pytest
import requests

from appliance.gateway.refusals import refusal_from_rpc
from appliance.gateway.slices import WIDEST, arrow_of, cut
from appliance.gateway.tei_embedding import cosines
from appliance.wire import arrow
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.engines import FAMILIES
from testing.running import MINILM, eventually
from testing.texts import mixed_texts
from tests.gateway.conftest import Http
from tests.gateway.test_arrow_and_limits import ARROW, ipc, memory, rows

M = "/instances/minilm"


def packed(column: pa.Array) -> bytes:
    """An Arrow stream whose own buffers are compressed."""
    batch = pa.record_batch([column], names=["text"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def test_a_header_that_grpc_cannot_carry_is_the_clients_mistake(zoo: Http) -> None:
    headers = {**ARROW, "x-arrow-on-error": "é".encode()}
    assert zoo.post(f"{M}/embed", data=ipc(["a"]), headers=headers).status_code == 422


def test_arrow_that_is_not_utf8_is_the_clients_mistake(zoo: Http) -> None:
    buffers = [None, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xff\xfe")]
    reply = zoo.post(f"{M}/embed", data=ipc(pa.Array.from_buffers(pa.string(), 1, buffers)), headers=ARROW)
    assert (reply.status_code, reply.headers["Content-Type"].partition(";")[0]) == (400, "text/plain"), reply.text


def test_arrow_that_expands_over_the_limit_is_413(zoo: Http) -> None:
    body = packed(pa.array(["x" * 1000] * 70_000))
    assert zoo.post(f"{M}/embed", data=body, headers=ARROW).status_code == 413


def test_dimensions_in_the_query_of_an_arrow_body_count(zoo: Http) -> None:
    reply = zoo.post(f"{M}/embed?dimensions=7", data=ipc(["a", "b"]), headers=ARROW)
    assert rows(reply.content).column(0).type.list_size == 7


@pytest.mark.parametrize("query", ["truncation_direction=up", "truncate=maybe", "dimensions=x", "normalize=2"])
def test_nonsense_in_the_query_is_refused_like_nonsense_in_json(zoo: Http, query: str) -> None:
    reply = zoo.post(f"{M}/embed?{query}", data=ipc(["a"]), headers=ARROW)
    assert reply.status_code == 422


@pytest.mark.parametrize("path", ["/health", f"{M}/health", f"{M}/info", "/v1/models"])
def test_head_answers_as_get_without_the_body(zoo: Http, path: str) -> None:
    """axum does so for TEI, HTTP asks for it, and load balancers use it."""
    reply = requests.head(zoo.url + path, timeout=20)
    assert (reply.status_code, reply.content) == (200, b"")


def test_an_unknown_path_is_not_an_unknown_model(zoo: Http) -> None:
    reply = zoo.get("/v1/no_such_route")
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] != "model_not_found"


@pytest.mark.parametrize("inputs", [["a", ""], ["", "a"], [["a", ""]]])
def test_a_pair_is_empty_only_when_both_its_texts_are(zoo: Http, inputs: Any) -> None:
    """So TEI has it (core/src/tokenization.rs), and our engine."""
    reply = zoo.post("/instances/classifier/predict", {"inputs": inputs})
    assert reply.status_code == 200, reply.text


def test_the_vectors_of_the_largest_slice_fit_into_a_message() -> None:
    """For the widest models, whose numbers do not compress."""
    limit = 1024 * 1024
    part = next(cut(arrow_of([f"text {at}" for at in range(1000)]), limit))
    vectors = np.random.default_rng(1).standard_normal((len(part), WIDEST)).astype(np.float32)
    reply = mux.EmbedArrowResponse(arrow_ipc=arrow.dense_reply(vectors, np.arange(len(part)), None).to_pybytes())
    assert reply.ByteSize() <= limit


def test_the_cosine_of_no_number_is_no_number() -> None:
    found = cosines(np.array([1, np.nan], np.float32), np.array([[1, 0], [0, 0]], np.float32))
    assert np.isnan(found[0])


class Failed(grpc.RpcError):
    """A failed call as grpc raises it."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self.status = code

    def code(self) -> grpc.StatusCode:
        return self.status

    def details(self) -> str:
        return "what was wrong"

    def trailing_metadata(self) -> tuple[()]:
        return ()


def test_a_text_is_named_only_when_it_is_at_fault() -> None:
    assert refusal_from_rpc(Failed(grpc.StatusCode.INVALID_ARGUMENT), 3, 0).message.endswith("(input 3)")
    for code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        assert "(input" not in refusal_from_rpc(Failed(code), 3, 0).message


@pytest.mark.parametrize("number", [10, 40])
def test_reranking_knows_no_limit_on_batches(zoo: Http, number: int) -> None:
    extra = ["--max-client-batch-size", "4"]
    zoo.running.create("little", model_id=str(FAMILIES / "bert-rerank"), extra_args=extra)
    try:
        zoo.running.wait_ready("little")
        texts = [f"text {at}" for at in range(number)]
        reply = zoo.post("/instances/little/rerank", {"query": "a", "texts": texts})
        assert reply.status_code == 200, reply.text
    finally:
        zoo.running.delete("/instances/little")


def computed(zoo: Http, name: str) -> float:
    """Texts that the engine of an instance has computed."""
    sums = f'te_batch_next_size_sum{{instance="{name}"'
    lines = [line for line in zoo.running.get("/metrics").text.splitlines() if line.startswith(sums)]
    return sum(float(line.split()[-1]) for line in lines)


@pytest.mark.parametrize("end", ["delete", "stop"])
def test_a_batch_does_not_outlive_its_instance(zoo: Http, end: str) -> None:
    """Nobody waits half a minute for replicas that nobody wants any more."""
    zoo.running.create("brief", model_id=MINILM, max_batch_tokens=512)
    try:
        zoo.running.wait_ready("brief")
        before = computed(zoo, "brief")
        texts = [f"{text} {at}" for at, text in enumerate(mixed_texts(5_000, seed=4))]
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(zoo.post, "/instances/brief/embed", {"inputs": texts})
            eventually(lambda: computed(zoo, "brief") > before + 8)
            if end == "delete":
                zoo.running.delete("/instances/brief")
            else:
                zoo.running.post("/instances/brief/stop")
            began = time.monotonic()
            assert reply.result().status_code in (404, 503)
            assert time.monotonic() - began < 10
    finally:
        zoo.running.delete("/instances/brief")


@pytest.mark.parametrize("rows", [10_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_a_small_body_with_a_large_content_takes_a_place_as_well(zoo: Http, rows: int) -> None:
    """What is bounded is the memory, not the bytes on the wire."""
    body = packed(pa.array(["x" * (60_000_000 // rows)] * rows))
    before, most, ended = memory(zoo), [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            most[0] = max(most[0], memory(zoo))

    def ask(_: int) -> int:
        path = f"{zoo.url}{M}/embed?truncate=true"
        with requests.post(path, data=body, headers=ARROW, timeout=100, stream=True) as reply:
            for _ in reply.iter_content(1024 * 1024):
                pass
            return reply.status_code

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(12) as pool:
            statuses = set(pool.map(ask, range(12)))
    finally:
        ended.set()
        watcher.join()
    assert len(body) < 1024 * 1024
    assert statuses <= {200, 429}
    assert most[0] - before < 1.2e9  # four of them at once


def test_slow_senders_of_large_bodies_do_not_keep_out_the_others(zoo: Http) -> None:
    head = (
        f"POST {M}/embed HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        'Content-Length: 60000000\r\n\r\n{"inputs": "'
    )
    ended = threading.Event()

    def trickle() -> None:
        with socket.create_connection(("127.0.0.1", zoo.running.http_port)) as client:
            client.sendall(head.encode() + b"a" * 1_100_000)
            while not ended.wait(0.2):
                try:
                    client.sendall(b"a" * 16_000)
                except OSError:
                    return

    with ThreadPoolExecutor(12) as pool:
        try:
            for _ in range(12):
                pool.submit(trickle)
            time.sleep(2)
            assert zoo.post(f"{M}/embed", {"inputs": ["a " * 700_000]}).status_code == 200
        finally:
            ended.set()
    eventually(lambda: zoo.get("/health").status_code == 200)
