"""Hybrid against real engines and a TEI that obeys: each leg's vectors are those of its own call, one pass where that
can be, one deadline, and a failure that is told."""

import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import numpy as np
import pyarrow as pa
import pytest

from appliance.core.problems import Problem
from appliance.drivers.memory import Reserve
from appliance.multiplexer.attempts import UnaryReply
from appliance.multiplexer.hybrid import THREADS, HybridCall, HybridHandler, fill, readable_parts
from appliance.multiplexer.joined_call import may_block
from appliance.multiplexer.metering import CallRecord
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.vectors import length_delimited
from testing.arrows import ipc
from testing.engines import FAMILIES, HEADS
from testing.running import RunningAppliance, eventually

pytestmark = pytest.mark.processes

CODES = grpc.StatusCode
DENSE, SPARSE, TOKENS = mux.HYBRID_OUTPUT_DENSE, mux.HYBRID_OUTPUT_SPARSE, mux.HYBRID_OUTPUT_TOKENS
MODELS = {
    "m3": {"model_id": str(HEADS / "bge-m3")},
    "dense": {"model_id": str(FAMILIES / "bert-cls")},
    "splade": {"model_id": str(FAMILIES / "bert-splade"), "pooling": "splade"},
    "colbert": {"model_id": str(HEADS / "colbert")},
}
TEXT = "rain over the harbour"
VECTOR = tei.EmbedResponse(embeddings=[0.5, -0.25, 2], metadata=tei.Metadata(compute_tokens=3))
METADATA = length_delimited(2, VECTOR.metadata.SerializeToString())


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    with RunningAppliance(tmp_path_factory.mktemp("hybrid"), seeds="") as appliance:
        for name, fields in MODELS.items():
            appliance.create(name, **fields)
        for name in MODELS:
            appliance.wait_ready(name)
        yield appliance


def leg(name: str, output: Any, **options: Any) -> mux.HybridLeg:
    return mux.HybridLeg(target=mux.Target(instance_name=name), output=output, **options)


def hybrid(running: RunningAppliance, *legs: mux.HybridLeg, timeout: float = 30, **fields: Any) -> mux.HybridResponse:
    request = mux.HybridRequest(**{"inputs": TEXT, "truncate": True, **fields}, legs=legs)
    reply: mux.HybridResponse = running.stub().Hybrid(request, timeout=timeout)
    return reply


def alone(running: RunningAppliance, name: str, output: int, **options: Any) -> Any:
    """What the leg's own call answers."""
    calls: tuple[tuple[str, Any, Any], ...] = (
        ("Embed", tei.EmbedRequest, mux.EmbedRequest),
        ("EmbedSparse", tei.EmbedSparseRequest, mux.EmbedSparseRequest),
        ("EmbedAll", tei.EmbedAllRequest, mux.EmbedAllRequest),
    )
    call, message, request = calls[output]
    normalize = {"normalize": True} if output == DENSE else {}
    inner = message(inputs=TEXT, truncate=True, **{**normalize, **options})
    return getattr(running.stub(), call)(
        request(target=mux.Target(instance_name=name), request=inner), timeout=30, metadata=(("x-tei-cache", "bypass"),)
    )


def check(running: RunningAppliance, result: mux.HybridResult, name: str, output: int, **options: Any) -> None:
    wanted = alone(running, name, output, **options)
    assert (result.instance, result.HasField("error")) == (name, False)
    assert result.metadata.compute_tokens == wanted.metadata.compute_tokens
    if output == DENSE:
        np.testing.assert_allclose(result.embeddings, wanted.embeddings, atol=1e-6)
    elif output == SPARSE:
        assert [each.index for each in result.sparse_embeddings] == [each.index for each in wanted.sparse_embeddings]
        values = [each.value for each in wanted.sparse_embeddings]
        np.testing.assert_allclose([each.value for each in result.sparse_embeddings], values, atol=1e-6)
    else:
        rows = [each.embeddings for each in wanted.token_embeddings]
        np.testing.assert_allclose([each.embeddings for each in result.token_embeddings], rows, atol=1e-6)


def test_one_model_with_all_heads_takes_one_pass(running: RunningAppliance) -> None:
    reply = hybrid(running, *(leg("m3", output) for output in (DENSE, SPARSE, TOKENS)))
    assert reply.passes == 1
    for output, result in zip((DENSE, SPARSE, TOKENS), reply.results, strict=True):
        check(running, result, "m3", output)


def test_each_leg_is_answered_by_its_own_instance(running: RunningAppliance) -> None:
    legs: tuple[tuple[str, Any, dict[str, Any]], ...] = (
        ("colbert", TOKENS, {"prompt_name": "query"}),
        ("dense", DENSE, {"dimensions": 8}),
        ("splade", SPARSE, {}),
    )
    reply = hybrid(running, *(leg(name, output, **options) for name, output, options in legs))
    assert reply.passes == 3
    for result, (name, output, options) in zip(reply.results, legs, strict=True):
        check(running, result, name, output, **options)


def test_two_widths_of_one_vector_are_two_passes(running: RunningAppliance) -> None:
    reply = hybrid(running, leg("m3", DENSE), leg("m3", SPARSE), leg("m3", DENSE, dimensions=4, normalize=False))
    assert (reply.passes, [len(result.embeddings) for result in reply.results]) == (2, [32, 0, 4])


@pytest.mark.parametrize("partial", [False, True])
def test_a_leg_that_fails_ends_the_call_or_says_why(running: RunningAppliance, partial: bool) -> None:
    legs = (leg("dense", DENSE), leg("splade", DENSE), leg("nobody", DENSE), leg("colbert", SPARSE))
    if not partial:
        for wrong in legs[1:]:
            with pytest.raises(grpc.RpcError) as failed:
                hybrid(running, legs[0], wrong)
            assert failed.value.code() in (CODES.FAILED_PRECONDITION, CODES.NOT_FOUND)
        return
    reply = hybrid(running, *legs, partial=True)
    check(running, reply.results[0], "dense", DENSE)
    unfit, unknown = CODES.FAILED_PRECONDITION.value[0], CODES.NOT_FOUND.value[0]
    assert [result.error.code for result in reply.results] == [0, unfit, unknown, unfit]
    assert "nobody" in reply.results[2].error.message
    assert "multivector" in reply.results[3].error.message
    assert not any(result.embeddings for result in reply.results[1:])


def test_where_all_legs_fail_the_call_fails(running: RunningAppliance) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        hybrid(running, leg("nobody", DENSE), leg("nothing", SPARSE), partial=True)
    assert failed.value.code() is CODES.NOT_FOUND
    assert "nobody" in str(failed.value.details())
    assert ("x-tei-code", "INSTANCE_NOT_FOUND") in failed.value.trailing_metadata()


def test_a_target_of_several_legs_that_nobody_has_costs_no_other(running: RunningAppliance) -> None:
    reply = hybrid(running, leg("nobody", DENSE), leg("nobody", SPARSE), leg("dense", DENSE), partial=True)
    unknown = CODES.NOT_FOUND.value[0]
    assert [result.error.code for result in reply.results] == [unknown, unknown, 0]
    check(running, reply.results[2], "dense", DENSE)


class Aborted(Exception):
    """How a call was ended."""


class Caller:
    """Of a call that nobody ends."""

    def add_callback(self, callback: Any) -> bool:
        return True

    def invocation_metadata(self) -> Any:
        return ()

    def is_active(self) -> bool:
        return True

    def time_remaining(self) -> float:
        return 60.0

    def set_trailing_metadata(self, trailing: Any) -> None:
        pass

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise Aborted(f"{code.name}: {details}")


class Waiting:
    """What a HybridHandler uses of a relay. Its instance `starting` is ready when ``over`` is set."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.metering = SimpleNamespace(counting=lambda *_: nullcontext(CallRecord()))
        self.pool = SimpleNamespace(generations=lambda _: ())
        self.cached = SimpleNamespace(unary=self.unary)
        self.reserve = Reserve(2**30)
        handler: Any = self
        self.handler = HybridHandler(handler, 2**20)

    def unary(self, method: Any, target: Any, inner: bytes, context: Any, record: CallRecord) -> UnaryReply:
        if target.instance_name != "ready":
            may_block(context)
        if target.instance_name == "starting":
            assert self.over.wait(60)
        return UnaryReply(VECTOR.SerializeToString(), [], ())

    def call(self, *names: str, partial: bool = False) -> Any:
        request = mux.HybridRequest(inputs=TEXT, legs=[leg(name, DENSE) for name in names], partial=partial)
        caller: Any = Caller()
        return mux.HybridResponse.FromString(self.handler.handle(request.SerializeToString(), caller))


def test_legs_that_wait_for_a_replica_take_no_thread_from_others() -> None:
    waiting = Waiting()
    with ThreadPoolExecutor(300) as callers:
        slow = [callers.submit(waiting.call, "ready", "starting") for _ in range(300)]
        eventually(lambda: waiting.handler.permits._value == THREADS - 300, 30)
        began = time.monotonic()
        assert len(waiting.call("ready", "unconnected").results) == 2
        assert time.monotonic() - began < 5
        waiting.over.set()
        assert all(len(each.result().results) == 2 for each in slow)
    eventually(lambda: waiting.handler.permits._value == THREADS)


def test_a_leg_without_a_thread_is_refused_at_once_and_alone() -> None:
    waiting = Waiting()
    waiting.handler.permits = threading.BoundedSemaphore(1)
    with ThreadPoolExecutor(1) as callers:
        slow = callers.submit(waiting.call, "ready", "starting")
        eventually(lambda: not waiting.handler.permits._value)
        found = waiting.call("ready", "unconnected", partial=True).results
        assert list(found[0].embeddings) == [0.5, -0.25, 2]
        assert found[1].error.code == CODES.RESOURCE_EXHAUSTED.value[0]
        with pytest.raises(Aborted, match="RESOURCE_EXHAUSTED"):
            waiting.call("ready", "unconnected")
        waiting.over.set()
        assert len(slow.result().results) == 2


def test_the_memory_of_all_legs_is_booked_and_has_an_end() -> None:
    with Reserve(2**20).reservation() as reservation:
        whole = HybridCall(Caller(), False, reservation, largest=1000)
        whole.book(bytes(600))
        assert reservation.size == 4 * 600
        with pytest.raises(Problem, match="about 1200 bytes"):
            whole.book(bytes(600))


@pytest.mark.parametrize(
    "raw",
    [
        VECTOR.SerializeToString() + length_delimited(9, b"of another version"),
        b"".join(b"\x0d" + struct.pack("<f", number) for number in VECTOR.embeddings) + METADATA,  # not packed
        METADATA + tei.EmbedResponse(embeddings=VECTOR.embeddings).SerializeToString(),
    ],
)
def test_a_leg_s_reply_is_understood_in_whatever_way_it_was_encoded(raw: bytes) -> None:
    result = mux.HybridResult()
    record = CallRecord(instance="dense")
    fill(result, b"".join(readable_parts(tei.EmbedResponse, raw, record).values()), record)
    expected = mux.HybridResult(instance="dense", embeddings=VECTOR.embeddings, metadata=VECTOR.metadata)
    assert result == expected


@pytest.mark.parametrize("raw", [b"\xff", length_delimited(2, b"\xff") + VECTOR.SerializeToString()])
def test_a_leg_s_reply_that_cannot_be_read_is_a_wrong_answer(raw: bytes) -> None:
    record = CallRecord(instance="dense")
    with pytest.raises(Problem, match='of "dense" answered, but it cannot be read') as refused:
        fill(mux.HybridResult(), b"".join(readable_parts(tei.EmbedResponse, raw, record).values()), record)
    assert refused.value.code == "WRONG_ANSWER"


def test_one_of_a_model_s_heads_that_it_has_not_costs_no_other(running: RunningAppliance) -> None:
    reply = hybrid(running, leg("dense", DENSE), leg("dense", SPARSE), leg("dense", TOKENS), partial=True)
    check(running, reply.results[0], "dense", DENSE)
    check(running, reply.results[2], "dense", TOKENS)
    assert "embed_sparse" in reply.results[1].error.message


def test_what_one_leg_asks_for_in_vain_costs_no_other(running: RunningAppliance) -> None:
    reply = hybrid(running, leg("m3", DENSE, dimensions=99), leg("m3", SPARSE), partial=True)
    assert reply.results[0].error.code == CODES.INVALID_ARGUMENT.value[0]
    check(running, reply.results[1], "m3", SPARSE)


def test_a_leg_that_hangs_costs_only_itself_before_the_deadline(running: RunningAppliance) -> None:
    (process,) = running.processes_of("splade", 0)
    process.suspend()
    try:
        began = time.monotonic()
        reply = hybrid(running, leg("splade", SPARSE), leg("dense", DENSE), partial=True, timeout=2)
        assert time.monotonic() - began < 2
        assert reply.results[0].error.code in (CODES.DEADLINE_EXCEEDED.value[0], CODES.UNAVAILABLE.value[0])
        check(running, reply.results[1], "dense", DENSE)
        with pytest.raises(grpc.RpcError) as failed:
            hybrid(running, leg("dense", DENSE), leg("splade", SPARSE), timeout=1)
        assert failed.value.code() is CODES.DEADLINE_EXCEEDED
    finally:
        process.resume()
    running.wait_ready("splade")


@pytest.mark.parametrize("hanging_first", [True, False])
def test_a_leg_that_fails_ends_one_that_hangs_at_once(running: RunningAppliance, hanging_first: bool) -> None:
    (process,) = running.processes_of("splade", 0)
    hanging, unfit = leg("splade", SPARSE), leg("dense", SPARSE)
    process.suspend()
    try:
        began = time.monotonic()
        with pytest.raises(grpc.RpcError) as failed:
            hybrid(running, *([hanging, unfit] if hanging_first else [unfit, hanging]), timeout=30)
        assert failed.value.code() is CODES.FAILED_PRECONDITION
        assert time.monotonic() - began < 15
    finally:
        process.resume()
    running.wait_ready("splade")


def test_legs_that_wait_in_a_queue_are_answered_too(running: RunningAppliance) -> None:
    running.create("narrow", **MODELS["dense"], max_concurrent_requests=1)
    running.wait_ready("narrow")
    legs = (leg("narrow", DENSE), leg("splade", SPARSE), leg("narrow", DENSE, dimensions=8))

    def called(number: int) -> mux.HybridResponse:
        request = mux.HybridRequest(inputs=f"{TEXT} {number % 4}", truncate=True, legs=legs)
        reply: mux.HybridResponse = running.stub().Hybrid(request, timeout=60)
        return reply

    def bypassed() -> float:
        lines = running.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if "cache_lookups_total" in line and '"bypass"' in line)

    before = bypassed()
    expected = [called(number) for number in range(4)]
    with ThreadPoolExecutor(12) as callers:
        replies = list(callers.map(called, range(96)))
    assert bypassed() - before == 3 * (4 + 96)  # the cache is off: each leg once, also one that began anew
    for number, reply in enumerate(replies):
        assert (reply.passes, [result.instance for result in reply.results]) == (3, ["narrow", "splade", "narrow"])
        for result, wanted in zip(reply.results, expected[number % 4].results, strict=True):
            np.testing.assert_allclose(result.embeddings, wanted.embeddings, atol=1e-5)
            assert [each.index for each in result.sparse_embeddings] == [
                each.index for each in wanted.sparse_embeddings
            ]
    running.delete("/instances/narrow")


@pytest.mark.parametrize(
    ("legs", "words"),
    [
        ((), "needs 1 to 16 legs, not 0"),
        ([leg("dense", DENSE)] * 17, "needs 1 to 16 legs, not 17"),
        ([mux.HybridLeg(output=DENSE)], "target"),
        ([leg("dense", 9)], "unknown output 9"),
        ([leg("dense", DENSE), leg("dense", DENSE)], "asks for what another leg asks for"),
    ],
)
def test_what_cannot_be_asked_is_refused(running: RunningAppliance, legs: Any, words: str) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        hybrid(running, *legs)
    assert failed.value.code() is CODES.INVALID_ARGUMENT
    assert words in str(failed.value.details())


def test_vectors_of_another_model_than_expected_are_refused(running: RunningAppliance) -> None:
    metadata = (("x-tei-expect-fingerprint", "0" * 32),)
    legs = [leg("m3", DENSE), leg("m3", SPARSE)]
    request = mux.HybridRequest(inputs=TEXT, truncate=True, legs=legs)
    with pytest.raises(grpc.RpcError) as failed:
        running.stub().Hybrid(request, timeout=30, metadata=metadata)
    assert failed.value.code() in (CODES.FAILED_PRECONDITION, CODES.ABORTED, CODES.ALREADY_EXISTS)
    tokens = mux.EmbedAllArrowRequest(target=legs[0].target, truncate=True)
    tokens.arrow_ipc = ipc(pa.table({"text": ["a"]}))
    with pytest.raises(grpc.RpcError) as failed:
        running.stub().EmbedAllArrow(tokens, timeout=30, metadata=metadata)
    assert failed.value.code() in (CODES.FAILED_PRECONDITION, CODES.ABORTED, CODES.ALREADY_EXISTS)


def test_an_empty_text_is_refused_as_everywhere(running: RunningAppliance) -> None:
    for legs in ([leg("m3", DENSE), leg("m3", SPARSE)], [leg("dense", DENSE)]):
        with pytest.raises(grpc.RpcError) as failed:
            hybrid(running, *legs, inputs="")
        assert failed.value.code() is CODES.INVALID_ARGUMENT


def test_a_call_is_counted_once(running: RunningAppliance) -> None:
    def counted() -> float:
        lines = running.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if 'method="Hybrid"' in line and "requests_total" in line)

    before = counted()
    hybrid(running, leg("m3", DENSE), leg("m3", SPARSE), leg("dense", DENSE))
    assert counted() == before + 1
