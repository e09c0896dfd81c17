"""Bad and huge input: each gets TEI's status, memory stays bounded, and the server lives on."""

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import psutil
import pytest
import requests
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from appliance.wire.tei.v1 import tei_pb2 as tei
from testing.engines import FAMILIES, Engine

pytestmark = pytest.mark.processes

CODES = grpc.StatusCode


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    flags = ("--max-concurrent-requests", "16")
    with Engine(tmp_path_factory.mktemp("limits"), FAMILIES / "bert-cls", *flags) as running:
        yield running


def refusal(call: Any) -> tuple[Any, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


NONE: Any = 7  # no direction of theirs
LEFT = tei.TRUNCATION_DIRECTION_LEFT
REFUSED = {
    "empty": (tei.EmbedRequest(inputs=""), CODES.INVALID_ARGUMENT, "cannot be empty"),
    "too long": (tei.EmbedRequest(inputs="word " * 80), CODES.INVALID_ARGUMENT, "must have less than 64 tokens"),
    "10 MB of one character": (
        tei.EmbedRequest(inputs="a" * 10_000_000),
        CODES.INVALID_ARGUMENT,
        "must have less than 16000 characters",
    ),
    "no dimensions": (tei.EmbedRequest(inputs="a", dimensions=0), CODES.INVALID_ARGUMENT, "between 1 and 32"),
    "too many dimensions": (tei.EmbedRequest(inputs="a", dimensions=33), CODES.INVALID_ARGUMENT, "between 1 and 32"),
    "unknown prompt": (tei.EmbedRequest(inputs="a", prompt_name="nope"), CODES.INVALID_ARGUMENT, "query"),
    "unknown direction": (
        tei.EmbedRequest(inputs="a", truncation_direction=NONE),
        CODES.INVALID_ARGUMENT,
        "direction",
    ),
}


@pytest.mark.parametrize(("request_", "code", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_refused_by_name(engine: Engine, request_: Any, code: Any, words: str) -> None:
    status = refusal(lambda: engine.stub("Embed").Embed(request_))
    assert status[0] is code
    assert words in status[1]
    assert len(engine.stub("Embed").Embed(tei.EmbedRequest(inputs="still here")).embeddings) == 32


def test_tasks_that_the_model_does_not_do_are_failed_preconditions(engine: Engine) -> None:
    for call in (
        lambda: engine.stub("Embed").EmbedSparse(tei.EmbedSparseRequest(inputs="a")),
        lambda: engine.stub("Predict").Predict(tei.PredictRequest(inputs="a")),
        lambda: engine.stub("Predict").PredictPair(tei.PredictPairRequest(inputs=["a", "b"])),
        lambda: engine.stub("Rerank").Rerank(tei.RerankRequest(query="a", texts=["b"])),
    ):
        assert refusal(call)[0] is CODES.FAILED_PRECONDITION


def test_huge_text_is_cut_when_asked_and_nul_is_a_character(engine: Engine) -> None:
    stub = engine.stub("Embed")
    assert len(stub.Embed(tei.EmbedRequest(inputs="a" * 10_000_000, truncate=True), timeout=30).embeddings) == 32
    assert len(stub.Embed(tei.EmbedRequest(inputs="nul\0inside"), timeout=30).embeddings) == 32


def test_bytes_that_are_no_message_or_no_utf8_are_invalid(engine: Engine) -> None:
    call = engine.channel.unary_unary("/tei.v1.Embed/Embed")
    for raw in (b"\xff\xff\xff", b"\x0a\x03\xed\xa0\x80"):  # garbage; a lone surrogate
        assert refusal(lambda raw=raw: call(raw))[0] is CODES.INVALID_ARGUMENT


def test_truncation_side_is_respected(engine: Engine) -> None:
    stub = engine.stub("Embed")
    text = "river " * 70 + "violin " * 70
    right = stub.Embed(tei.EmbedRequest(inputs=text, truncate=True)).embeddings
    left = stub.Embed(tei.EmbedRequest(inputs=text, truncate=True, truncation_direction=LEFT)).embeddings
    assert list(right) != list(left)


@pytest.mark.parametrize("count", [5_000, pytest.param(20_000, marks=pytest.mark.long)])
def test_many_texts_on_one_stream_come_back_in_order_with_bounded_memory(engine: Engine, count: int) -> None:
    before = psutil.Process(engine.process.pid).memory_info().rss
    lengths = [number % 37 + 1 for number in range(count)]
    requests = (tei.EmbedRequest(inputs="a " * length, truncate=True) for length in lengths)
    replies = engine.stub("Embed").EmbedStream(requests)
    assert [reply.metadata.compute_tokens for reply in replies] == [length + 2 for length in lengths]
    grown = (psutil.Process(engine.process.pid).memory_info().rss - before) / 1e6
    print(f"memory grown over {count} texts: {grown:.0f} MB")
    assert grown < 100


def test_a_stream_ends_with_its_first_error_after_the_replies_before_it(engine: Engine) -> None:
    texts = ["one", "two", "", "four"]
    replies = engine.stub("Embed").EmbedStream(tei.EmbedRequest(inputs=text) for text in texts)
    assert len(next(replies).embeddings) == 32
    assert len(next(replies).embeddings) == 32
    assert refusal(lambda: next(replies))[0] is CODES.INVALID_ARGUMENT


def test_unary_calls_over_the_limit_are_refused_and_permits_come_back(engine: Engine) -> None:
    codes: list[Any] = []

    def one() -> None:
        try:
            engine.stub("Embed").Embed(tei.EmbedRequest(inputs="violin " * 60, truncate=True), timeout=60)
            codes.append(CODES.OK)
        except grpc.RpcError as error:
            codes.append(error.code())

    threads = [threading.Thread(target=one) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(codes) <= {CODES.OK, CODES.RESOURCE_EXHAUSTED}
    assert CODES.OK in codes
    again = [engine.stub("Embed").Embed(tei.EmbedRequest(inputs="x"), timeout=10) for _ in range(40)]
    assert len(again) == 40


def test_a_client_that_disappears_leaves_no_permit_behind(engine: Engine) -> None:
    for _ in range(30):
        channel = grpc.insecure_channel(f"127.0.0.1:{engine.port}")
        call = channel.stream_stream("/tei.v1.Embed/EmbedStream")
        message = tei.EmbedRequest(inputs="violin " * 50, truncate=True).SerializeToString()
        replies = call(iter([message] * 500))
        next(replies)
        channel.close()
    deadline = time.monotonic() + 20
    while True:
        stream = engine.stub("Embed").EmbedStream(iter([tei.EmbedRequest(inputs="x")] * 32), timeout=20)
        if len(list(stream)) == 32:
            break
        assert time.monotonic() < deadline


def test_rerank_limits(tmp_path: Any) -> None:
    with Engine(tmp_path, FAMILIES / "bert-rerank", "--max-client-batch-size", "4") as reranker:
        stub = reranker.stub("Rerank")
        code, words = refusal(lambda: stub.Rerank(tei.RerankRequest(query="a", texts=["b"] * 5)))
        assert (code, words) == (CODES.INVALID_ARGUMENT, "batch size 5 > maximum allowed batch size 4")
        assert refusal(lambda: stub.Rerank(tei.RerankRequest(query="a")))[0] is CODES.INVALID_ARGUMENT
        assert refusal(lambda: stub.RerankStream(iter([])))[0] is CODES.INVALID_ARGUMENT
        health = health_pb2_grpc.HealthStub(reranker.channel)
        said = {
            service: health.Check(health_pb2.HealthCheckRequest(service=service)).status
            for service in ("", "tei.v1.Info", "tei.v1.Embed", "tei.v1.Predict", "tei.v1.Rerank", "tei.v1.Tokenize")
        }
        assert said == {
            "": 1,
            "tei.v1.Info": 1,
            "tei.v1.Embed": 2,
            "tei.v1.Predict": 1,
            "tei.v1.Rerank": 1,
            "tei.v1.Tokenize": 1,
        }


def test_metrics_have_teis_names_types_and_labels(engine: Engine) -> None:
    engine.stub("Embed").Embed(tei.EmbedRequest(inputs="count me"))
    refusal(lambda: engine.stub("Embed").Embed(tei.EmbedRequest(inputs="")))
    url = f"http://127.0.0.1:{engine.metrics_port}"
    assert requests.get(f"{url}/health", timeout=5).text == "OK"
    text = requests.get(url, timeout=5).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    counters = ("te_request_count", "te_request_success", "te_request_failure", "te_embed_count", "te_embed_success")
    for name in counters:
        assert families[name].type == "counter", name
    for kind in ("request", "embed"):
        for part in ("", "_tokenization", "_queue", "_inference"):
            assert families[f"te_{kind}{part}_duration"].type == "histogram"
    assert "te_predict_duration" not in families  # of what an embedding model never does
    assert {"te_request_input_length", "te_batch_next_size", "te_batch_next_tokens", "te_queue_size"} <= set(families)
    assert re.search(r'^te_request_count{method="single"} [1-9]', text, re.M)
    errors = {sample.labels["err"] for sample in families["te_request_failure"].samples}
    assert "validation" in errors
    bounds = [sample.labels["le"] for sample in families["te_request_input_length"].samples if "le" in sample.labels]
    assert bounds[-2:] == ["64.0", "+Inf"]


def test_sigterm_finishes_what_runs_and_refuses_the_rest(tmp_path: Any) -> None:
    with Engine(tmp_path, FAMILIES / "bert-cls") as engine:
        requests = (tei.EmbedRequest(inputs="violin " * 50, truncate=True) for _ in range(2000))
        replies = engine.stub("Embed").EmbedStream(requests)
        first = next(replies)
        engine.process.terminate()
        assert len([first, *replies]) == 2000
        assert engine.process.wait(timeout=20) == 0
