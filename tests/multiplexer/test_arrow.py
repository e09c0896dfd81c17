"""Arrow batches against real engines: n rows in, n rows out, in order, equal to the one-by-one answers."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import numpy as np
import psutil
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.core.routing import Target
from appliance.multiplexer.arrow import job_of
from appliance.wire.quantization import CONVERSIONS
from appliance.wire.rowusage import RowUsage, unpacked
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.arrows import column, dense_request, ipc, rows, vectors
from testing.engines import FAMILIES, HEADS
from testing.running import RunningAppliance, eventually
from testing.texts import mixed_texts

pytestmark = pytest.mark.processes

CODES = grpc.StatusCode
TEXTS = mixed_texts(60, seed=21)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    with RunningAppliance(tmp_path_factory.mktemp("arrow"), seeds="") as appliance:
        appliance.create("small", model_id=str(FAMILIES / "bert-cls"), replicas=2, max_concurrent_requests=64)
        appliance.create("splade", model_id=str(FAMILIES / "bert-splade"), pooling="splade")
        appliance.create("labels", model_id=str(FAMILIES / "bert-classify"))
        appliance.create("colbert", model_id=str(HEADS / "colbert"), replicas=2)
        for name in ("small", "splade", "labels", "colbert"):
            appliance.wait_ready(name)
        yield appliance


@pytest.fixture(scope="module")
def alone(running: RunningAppliance) -> Any:
    """text -> its vector, asked for one by one."""
    known: dict[str, np.ndarray] = {}

    def vector(text: str) -> np.ndarray:
        if text not in known:
            request = tei.EmbedRequest(inputs=text, truncate=True, normalize=True)
            reply = running.stub().Embed(mux.EmbedRequest(target=target(), request=request), timeout=30)
            known[text] = np.array(reply.embeddings, np.float32)
        return known[text]

    return vector


def target(name: str = "small") -> mux.Target:
    return mux.Target(instance_name=name)


def refusal(call: Any) -> tuple[Any, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def check_rows(found: list[np.ndarray | None], texts: list[str | None], alone: Any) -> None:
    assert len(found) == len(texts)
    for row, text in zip(found, texts, strict=True):
        if text is None:
            assert row is None
        else:
            assert row is not None
            np.testing.assert_allclose(row, alone(text), atol=1e-5)


MIXES = st.lists(st.one_of(st.none(), st.sampled_from(TEXTS)), max_size=80)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    MIXES,
    st.sampled_from(["string", "large", "view", "dictionary"]),
    st.sampled_from([None, "lz4", "zstd", "frame"]),
    st.integers(1, 50),
)
def test_any_mix_comes_back_row_for_row(
    running: RunningAppliance, alone: Any, texts: list[str | None], kind: str, compression: str | None, cut: int
) -> None:
    table = pa.table({"n": pa.array(range(len(texts))), "text": column(texts, kind)})
    request = mux.EmbedArrowRequest(
        target=target(), arrow_ipc=ipc(table, compression, cut), truncate=True, normalize=True
    )
    check_rows(vectors(running.stub().EmbedArrow(request, timeout=60)), texts, alone)


def test_the_reply_has_the_promised_schema(running: RunningAppliance) -> None:
    for texts in (["a", None], [None], []):
        found = rows(running.stub().EmbedArrow(dense_request("small", texts), timeout=30))
        assert found.schema == pa.schema([pa.field("embeddings", pa.list_(pa.field("item", pa.float32(), False), 32))])
        assert found.num_rows == len(texts)


@pytest.mark.parametrize("dtype", list(CONVERSIONS))
def test_vectors_come_in_the_dtype_that_is_asked_for(running: RunningAppliance, alone: Any, dtype: str) -> None:
    texts = [*TEXTS[:5], None, TEXTS[0]]
    number = list(CONVERSIONS).index(dtype)
    found = rows(running.stub().EmbedArrow(dense_request("small", texts, output_dtype=number), timeout=30))
    wanted = [CONVERSIONS[dtype](alone(text)) if text else None for text in texts]
    first = CONVERSIONS[dtype](alone(texts[0]))
    assert found.schema.field(0).type == pa.list_(pa.field("item", pa.from_numpy_dtype(first.dtype), False), len(first))
    for row, vector in zip(found.column(0).to_pylist(), wanted, strict=True):
        assert (row is None) == (vector is None)
        if vector is not None:
            atol = 1 if dtype in ("int8", "uint8") else 1e-3  # at a half, batches may be rounded the other way
            np.testing.assert_allclose(np.array(row, np.float64), vector.astype(np.float64), atol=atol)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"output_dtype": 17}, "Unknown output_dtype 17"),
        ({"output_dtype": mux.OUTPUT_DTYPE_INT8, "normalize": False}, "is for vectors of length 1"),
    ],
)
def test_a_dtype_that_cannot_be_had_is_refused(running: RunningAppliance, options: Any, words: str) -> None:
    code, details = refusal(lambda: running.stub().EmbedArrow(dense_request("small", ["a"], **options), timeout=30))
    assert code is CODES.INVALID_ARGUMENT
    assert words in details


def test_the_first_string_column_serves_where_none_is_named_text(running: RunningAppliance, alone: Any) -> None:
    table = pa.table({"id": [1, 2], "body": ["one", "two"], "more": ["x", "y"]}).replace_schema_metadata({"k": "v"})
    request = mux.EmbedArrowRequest(target=target(), arrow_ipc=ipc(table), truncate=True, normalize=True)
    check_rows(vectors(running.stub().EmbedArrow(request, timeout=30)), ["one", "two"], alone)


def test_sparse_rows_equal_the_unary_answers(running: RunningAppliance) -> None:
    texts = [*TEXTS[:20], None, TEXTS[0]]
    request = mux.EmbedSparseArrowRequest(
        target=target("splade"), arrow_ipc=ipc(pa.table({"text": column(texts)})), truncate=True
    )
    found = rows(running.stub().EmbedSparseArrow(request, timeout=60)).column("sparse_embeddings")
    assert found.type == pa.list_(
        pa.field(
            "item", pa.struct([pa.field("index", pa.uint32(), False), pa.field("value", pa.float32(), False)]), False
        )
    )
    assert len(found) == len(texts)
    for row, text in zip(found.to_pylist(), texts, strict=True):
        if text is None:
            assert row is None
            continue
        inner = tei.EmbedSparseRequest(inputs=text, truncate=True)
        unary = running.stub().EmbedSparse(mux.EmbedSparseRequest(target=target("splade"), request=inner), timeout=30)
        wanted = {entry.index: entry.value for entry in unary.sparse_embeddings}
        assert {entry["index"]: entry["value"] for entry in row} == pytest.approx(wanted, abs=1e-5)


def tokens_request(texts: list[str | None], **options: Any) -> mux.EmbedAllArrowRequest:
    table = pa.table({"text": column(texts)})
    return mux.EmbedAllArrowRequest(target=target("colbert"), arrow_ipc=ipc(table), truncate=True, **options)


@pytest.mark.parametrize("role", ["query", "document"])
def test_token_vectors_equal_the_unary_answers(running: RunningAppliance, role: str) -> None:
    texts = [*TEXTS[:20], None, TEXTS[0]]
    found = rows(running.stub().EmbedAllArrow(tokens_request(texts, prompt_name=role), timeout=60))
    vector = pa.list_(pa.field("item", pa.float32(), False), 8)
    assert found.schema == pa.schema([pa.field("token_embeddings", pa.list_(pa.field("item", vector, False)))])
    for text, row in zip(texts, found.column(0).to_pylist(), strict=True):
        if text is None:
            assert row is None
            continue
        inner = tei.EmbedAllRequest(inputs=text, truncate=True, prompt_name=role)
        reply = running.stub().EmbedAll(mux.EmbedAllRequest(target=target("colbert"), request=inner), timeout=30)
        np.testing.assert_allclose(row, [token.embeddings for token in reply.token_embeddings], atol=1e-5)


def test_token_vectors_come_in_fewer_bytes_and_without_any_text(running: RunningAppliance) -> None:
    stub = running.stub()
    small = rows(stub.EmbedAllArrow(tokens_request(["a b c"], output_dtype=mux.OUTPUT_DTYPE_INT8), timeout=60))
    plain = rows(stub.EmbedAllArrow(tokens_request(["a b c"]), timeout=60))
    whole = np.array(plain.column(0).to_pylist()[0])
    np.testing.assert_allclose(np.array(small.column(0).to_pylist()[0]) / 127, whole, atol=0.5 / 127 + 1e-6)
    none = rows(stub.EmbedAllArrow(tokens_request([None]), timeout=60))
    assert none.column(0).to_pylist() == [None]
    assert none.schema == plain.schema
    raw = mux.EmbedAllArrowRequest(target=target("small"), arrow_ipc=ipc(pa.table({"text": ["a"]})))
    raw.output_dtype = mux.OUTPUT_DTYPE_INT8  # hidden states of any length
    code, details = refusal(lambda: stub.EmbedAllArrow(raw, timeout=30))
    assert (code, "int8 and uint8 hold -1 to 1" in details) == (CODES.INVALID_ARGUMENT, True)
    noop = rows(stub.EmbedAllArrow(tokens_request(["a", None, "b"], noop=True), timeout=30))
    assert [len(row) for row in noop.column(0).to_pylist()] == [1, 1, 1]


def test_noop_needs_no_instance(running: RunningAppliance) -> None:
    batch = ipc(pa.table({"text": ["a", None, "c"]}))
    dense = rows(running.stub().EmbedArrow(mux.EmbedArrowRequest(arrow_ipc=batch, noop=True), timeout=10))
    assert dense.column(0).to_pylist() == [[0.0] * 384] * 3
    sparse = rows(running.stub().EmbedSparseArrow(mux.EmbedSparseArrowRequest(arrow_ipc=batch, noop=True), timeout=10))
    assert [list(entry.values()) for entry in sparse.column(0).to_pylist()[2]] == [[2, 1.0], [102, 0.5], [202, 0.25]]


@pytest.mark.parametrize("said", ["zero", "NULL", ""])
def test_what_metadata_may_not_say_of_rows_that_fail_is_refused(running: RunningAppliance, said: str) -> None:
    metadata = (("x-arrow-on-error", said),)
    with pytest.raises(grpc.RpcError) as refused:
        running.stub().EmbedArrow(dense_request("small", ["text"]), metadata=metadata, timeout=10)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "x-arrow-on-error may be null, or left out" in refused.value.details()


BAD = {
    "nothing": (b"", "Invalid Arrow IPC"),
    "garbage": (b"garbage" * 9, "Invalid Arrow IPC"),
    "no string column": (ipc(pa.table({"n": [1]})), "No string column"),
    "image is of another type": (
        ipc(pa.table({"image": pa.array([b"x"], pa.binary_view())})),
        'Column "image" must hold binary or large_binary, not binary_view',
    ),
    "text is no string": (ipc(pa.table({"text": [1]})), 'Column "text" must hold strings'),
    "cut off": (ipc(pa.table({"text": TEXTS}))[:-300], "Invalid Arrow IPC"),
}


@pytest.mark.parametrize(("raw", "words"), BAD.values(), ids=BAD.keys())
def test_unreadable_arrow_is_an_invalid_argument(running: RunningAppliance, raw: bytes, words: str) -> None:
    code, details = refusal(
        lambda: running.stub().EmbedArrow(mux.EmbedArrowRequest(target=target(), arrow_ipc=raw), timeout=10)
    )
    assert code is CODES.INVALID_ARGUMENT
    assert words in details


def test_targets_are_checked_as_for_every_call(running: RunningAppliance) -> None:
    batch = ipc(pa.table({"text": ["a"]}))
    call = running.stub().EmbedArrow
    assert refusal(lambda: call(mux.EmbedArrowRequest(arrow_ipc=batch)))[0] is CODES.INVALID_ARGUMENT
    assert refusal(lambda: call(mux.EmbedArrowRequest(target=target("x"), arrow_ipc=batch)))[0] is CODES.NOT_FOUND
    wrong = refusal(lambda: call(mux.EmbedArrowRequest(target=target("labels"), arrow_ipc=batch)))
    assert wrong[0] is CODES.FAILED_PRECONDITION


def bomb(kind: str) -> bytes:
    million = "a" * 1_000_000
    if kind == "views":
        _, view, data = pa.array([million]).cast(pa.string_view()).buffers()
        many = pa.py_buffer(view.to_pybytes()[:16] * 2000)
        return ipc(pa.table({"text": pa.Array.from_buffers(pa.string_view(), 2000, [None, many, data])}))
    return ipc(pa.table({"text": [million] * 500}), kind)


@pytest.mark.parametrize("kind", ["zstd", "lz4", "frame", "views"])
def test_a_bomb_is_refused_before_memory_is_spent(running: RunningAppliance, kind: str) -> None:
    process = psutil.Process(running.processes_of("multiplexer")[0].pid)
    before = process.memory_info().rss
    request = mux.EmbedArrowRequest(target=target(), arrow_ipc=bomb(kind), truncate=True)
    code, details = refusal(lambda: running.stub().EmbedArrow(request, timeout=30))
    assert code is CODES.RESOURCE_EXHAUSTED
    assert "would expand" in details
    assert process.memory_info().rss - before < 500e6


def test_a_dictionary_that_many_rows_share_is_not_a_bomb(running: RunningAppliance, alone: Any) -> None:
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * 1000 + [None], pa.int32()), pa.array(["river " * 1000]))
    request = mux.EmbedArrowRequest(
        target=target(), arrow_ipc=ipc(pa.table({"text": shared})), truncate=True, normalize=True
    )
    check_rows(vectors(running.stub().EmbedArrow(request, timeout=30)), ["river " * 1000] * 1000 + [None], alone)


def test_a_failed_row_fails_the_call_with_its_own_code_and_number(running: RunningAppliance) -> None:
    texts = [*TEXTS[:10], "", *TEXTS[10:20]]
    with pytest.raises(grpc.RpcError) as caught:
        running.stub().EmbedArrow(dense_request("small", texts), timeout=30)
    assert caught.value.code() is CODES.INVALID_ARGUMENT
    assert caught.value.details().startswith("Row 10: Input validation error: `inputs` cannot be empty")
    assert ("x-arrow-error-row", "10") in caught.value.trailing_metadata()


def test_failed_rows_are_null_rows_with_their_error_when_asked(running: RunningAppliance, alone: Any) -> None:
    texts = ["", *TEXTS[:5], None, "", *TEXTS[5:9]]
    options = {"metadata": (("x-arrow-on-error", "null"),), "timeout": 30}
    reply = running.stub().EmbedArrow(dense_request("small", texts), **options)
    check_rows(vectors(reply), [text or None for text in texts], alone)
    errors = rows(reply).column("error").to_pylist()
    assert [error is not None for error in errors] == [text == "" for text in texts]
    assert errors[0].startswith("INVALID_ARGUMENT: ")
    only_bad = running.stub().EmbedArrow(dense_request("small", ["", ""]), **options)
    assert vectors(only_bad) == [None, None]


def test_short_texts_reach_the_engine_together(running: RunningAppliance) -> None:
    running.supervisorctl("stop", "monitor")  # its own questions would be counted, too
    try:
        before = batches_of(running)
        running.stub().EmbedArrow(dense_request("small", [f"text {number:03}" for number in range(400)]), timeout=60)
        computed, batches = (after - earlier for after, earlier in zip(batches_of(running), before, strict=True))
    finally:
        running.supervisorctl("start", "monitor")
    assert computed == 400
    assert batches < 100, "one by one they would be hardly less than 400"


def batches_of(running: RunningAppliance) -> tuple[float, float]:
    """Texts and batches that the engines of `small` have computed so far."""
    of_small = [line for line in running.get("/metrics").text.splitlines() if 'instance="small"' in line]
    texts, batches = (
        [line for line in of_small if line.startswith(f"te_batch_next_size_{part}")] for part in ("sum", "count")
    )
    return sum(float(line.split()[-1]) for line in texts), sum(float(line.split()[-1]) for line in batches)


COMBINED = (("x-tei-combined", "yes"),)


def combined(running: RunningAppliance, texts: list[str | None]) -> tuple[Any, list[RowUsage]]:
    """The reply to single texts of several callers, and what each cost."""
    reply, call = running.stub().EmbedArrow.with_call(dense_request("small", texts), timeout=30, metadata=COMBINED)
    return reply, unpacked(dict(call.trailing_metadata())["x-tei-row-usage"])


def test_texts_of_several_callers_tell_what_each_cost(running: RunningAppliance, alone: Any) -> None:
    texts: list[str | None] = ["a", "two words", "a", None, "eleven of the words here cost more than two of them"]
    reply, costs = combined(running, texts)
    check_rows(vectors(reply), texts, alone)
    requests = [mux.EmbedRequest(target=target(), request=tei.EmbedRequest(inputs=text)) for text in texts if text]
    own = [running.stub().Embed(request, timeout=30).metadata for request in requests]
    expected = [(each.compute_chars, each.compute_tokens, 0) for each in own]
    assert costs == [*expected[:3], (0, 0, 0), *expected[3:]]
    assert combined(running, [None])[1] == [(0, 0, 0)]


def test_texts_of_several_callers_are_refused_together_where_there_are_no_permits(
    running: RunningAppliance, alone: Any
) -> None:
    """Each of them may wait alone."""
    code, words = refusal(lambda: combined(running, ["a"] * 65))
    assert (code, "64 rows at most" in words) == (CODES.INVALID_ARGUMENT, True)
    running.create("narrow", model_id=str(FAMILIES / "bert-cls"), max_concurrent_requests=1)
    running.wait_ready("narrow")
    ask = running.stub().EmbedArrow
    (process,) = running.processes_of("narrow")
    single = mux.EmbedRequest(target=target("narrow"), request=tei.EmbedRequest(inputs="a"))
    process.suspend()
    try:
        held = running.stub().Embed.future(single, timeout=60)
        eventually(lambda: refused_at_once(ask, "narrow"), 5)
        assert not held.done()
    finally:
        process.resume()
    assert held.result().embeddings
    reply = eventually(lambda: ask(dense_request("narrow", ["b"]), timeout=30, metadata=COMBINED), 5)
    check_rows(vectors(reply), ["b"], alone)
    running.delete("/instances/narrow")


def refused_at_once(ask: Any, name: str) -> bool:
    """False while its permit is still free."""
    with pytest.raises(grpc.RpcError) as caught:
        ask(dense_request(name, ["a"]), timeout=0.5, metadata=COMBINED)
    return caught.value.code() is CODES.FAILED_PRECONDITION and "no room for single texts" in caught.value.details()


def test_streams_answer_each_message_in_order(running: RunningAppliance, alone: Any) -> None:
    parts: list[list[str | None]] = [[*TEXTS[:7]], [], [None, TEXTS[9]], [*TEXTS[20:40]]]
    replies = running.stub().EmbedArrowStream((dense_request("small", part) for part in parts), timeout=60)
    for reply, part in zip(replies, parts, strict=True):
        check_rows(vectors(reply), list(part), alone)
    assert refusal(lambda: list(running.stub().EmbedArrowStream(iter([]), timeout=10)))[0] is CODES.INVALID_ARGUMENT


def test_a_reply_over_the_message_limit_is_refused_by_name(tmp_path: Path) -> None:
    with RunningAppliance(tmp_path, seeds="", settings="grpc_max_message_size_mb = 1") as small:
        small.create("small", model_id=str(FAMILIES / "bert-cls"))
        small.wait_ready("small")
        texts: list[str | None] = [f"a {number}" for number in range(10_000)]
        code, details = refusal(lambda: small.stub().EmbedArrow(dense_request("small", texts), timeout=60))
        assert code is CODES.RESOURCE_EXHAUSTED
        assert "EmbedArrowStream" in details


def test_the_deadline_holds_over_a_large_batch(running: RunningAppliance) -> None:
    texts: list[str | None] = [f"{number} {text}" for number in range(60) for text in TEXTS]
    began = time.monotonic()
    code, _ = refusal(lambda: running.stub().EmbedArrow(dense_request("small", texts), timeout=0.3))
    print(f"deadline 0.3 s, ended after {time.monotonic() - began:.3f} s")
    assert code is CODES.DEADLINE_EXCEEDED
    assert time.monotonic() - began < 2
    eventually(lambda: vectors(running.stub().EmbedArrow(dense_request("small", ["still here"]), timeout=10)))


@pytest.mark.faults
def test_replicas_that_die_lose_no_row(running: RunningAppliance, alone: Any) -> None:
    """kill -9 of one of two replicas over and over, in the middle of batches and single calls: no client error.

    No call is hit twice: a second death with it alone in work would be its own doing, by all that can be seen.
    """
    ended = threading.Event()
    answered = threading.Event()  # a call, since the last kill
    kills = []

    def kill() -> None:
        turn = 0
        while not ended.wait(2.0) and turn < 6:  # the fifth death of a replica within ten minutes would be its last
            found = running.instance("small")
            if found["replicas_ready"] == 2 and answered.is_set():  # never the last one
                running.processes_of("small", turn % 2)[0].kill()
                answered.clear()
                kills.append(turn % 2)
                turn += 1

    killer = threading.Thread(target=kill)
    killer.start()
    stub = running.stub()
    try:
        for turn in range(40):
            texts: list[str | None] = [*TEXTS, None, *(f"{turn} {text}" for text in TEXTS[:30])]
            found = vectors(stub.EmbedArrow(dense_request("small", texts), timeout=60))
            check_rows(found[: len(TEXTS) + 1], texts[: len(TEXTS) + 1], alone)
            assert len(found) == len(texts)
            answered.set()
            for text in TEXTS[:20]:
                request = tei.EmbedRequest(inputs=text, truncate=True, normalize=True)
                reply = stub.Embed(mux.EmbedRequest(target=target(), request=request), timeout=30)
                answered.set()
                np.testing.assert_allclose(np.array(reply.embeddings), alone(text), atol=1e-5)
    finally:
        ended.set()
        killer.join()
    print(f"kills: {len(kills)}")
    assert kills
    running.wait_ready("small")


class OpenCall:
    """The context of a stream: what is added to it stays until it ends, so it has no `add_callback` here."""

    def __init__(self) -> None:
        self.active = True

    def is_active(self) -> bool:
        return self.active

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def time_remaining(self) -> None:
        return None


def test_a_message_of_a_stream_leaves_nothing_with_the_call() -> None:
    """Memory grew with each message for as long as the stream was open."""
    call = OpenCall()
    collector = SimpleNamespace(method="Embed", path="/tei.v1.Embed/Embed", accept=None)
    job = job_of(collector, Target("any"), (), cast(grpc.ServicerContext, call))
    assert not job.caller_left()
    call.active = False
    assert job.caller_left()
