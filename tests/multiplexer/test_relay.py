"""The relay of a real multiplexer process, proved with a TEI that obeys the test: who is reached, what arrives, what
comes back, how calls end, and that routes follow the state file without a restart."""

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from appliance.core.access import CREDENTIALS
from appliance.core.instance import InstanceSpec
from appliance.core.layout import Layout
from appliance.core.state import Instance
from appliance.drivers.grpcserver import HANDSHAKE_SECS
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.arrows import dense_request, vectors
from testing.background import PAUSE_SECS
from testing.fake_tei import Call, FakeTei, reply_to
from testing.half_sender import HalfSender
from testing.relay import ALPHA, LIMIT_MB, SERVICE, TIMEOUT_SECS, Relay, code_of, instance, message, refused
from testing.running import eventually

pytestmark = pytest.mark.processes

SLACK_SECS = 1.5  # the node is busy; the measured number is printed
UNARY = {
    "Info": "Info/Info",
    "Embed": "Embed/Embed",
    "EmbedSparse": "Embed/EmbedSparse",
    "EmbedAll": "Embed/EmbedAll",
    "Predict": "Predict/Predict",
    "PredictPair": "Predict/PredictPair",
    "Rerank": "Rerank/Rerank",
    "Tokenize": "Tokenize/Tokenize",
    "Decode": "Tokenize/Decode",
}
STREAMS = {
    "EmbedStream": "Embed/EmbedStream",
    "EmbedSparseStream": "Embed/EmbedSparseStream",
    "EmbedAllStream": "Embed/EmbedAllStream",
    "PredictStream": "Predict/PredictStream",
    "PredictPairStream": "Predict/PredictPairStream",
    "TokenizeStream": "Tokenize/TokenizeStream",
    "DecodeStream": "Tokenize/DecodeStream",
}


@pytest.fixture(scope="module", params=["multiplexer", "express"])
def relay(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Relay]:
    """The same answers on both ways."""
    running = Relay(tmp_path_factory.mktemp("relay"), express=request.param == "express")
    yield running
    running.close()


# -- who is reached, and with what -----------------------------------------------------------------------------------

INNER = b"\x0a\x05hello\xf8\x3e\x01 not even \xff\xfe protobuf"


@pytest.mark.parametrize("method", UNARY)
def test_every_unary_call_reaches_its_method_with_the_same_bytes(relay: Relay, method: str) -> None:
    assert relay.unary(message(INNER), method) == reply_to(INNER)
    assert relay.last().path == f"/tei.v1.{UNARY[method]}"
    assert relay.last().requests == [INNER]


def test_info_needs_no_inner_request(relay: Relay) -> None:
    assert relay.unary(message(), "Info") == reply_to(b"")


def test_an_inner_request_of_no_bytes_is_a_request(relay: Relay) -> None:
    assert relay.unary(message(b"")) == reply_to(b"")


@pytest.mark.parametrize("method", STREAMS)
def test_every_stream_reaches_its_method_and_keeps_the_order(relay: Relay, method: str) -> None:
    texts = [INNER + str(number).encode() for number in range(100)]
    # Only the first message must name the target.
    raws = [message(text, ALPHA if at % 2 == 0 else None) for at, text in enumerate(texts)]
    assert list(relay.stream(raws, method)) == [reply_to(text) for text in texts]
    assert relay.last().path == f"/tei.v1.{STREAMS[method]}"
    assert relay.last().requests == texts


def test_rerank_stream_gathers_all_messages_into_one_reply(relay: Relay) -> None:
    texts = [str(number).encode() for number in range(50)]
    assert relay.gather(message(b"t" + text) for text in texts) == b"|".join(reply_to(b"t" + text) for text in texts)
    assert relay.last().path == "/tei.v1.Rerank/Rerank"


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        (mux.Target(instance_name="beta"), "beta"),
        (mux.Target(model_id="org/beta"), "beta"),
        (mux.Target(instance_index=1), "beta"),
        (mux.Target(instance_index=0), "alpha"),
    ],
)
def test_name_model_and_index_find_their_instance(relay: Relay, target: mux.Target, wanted: str) -> None:
    before = len(getattr(relay, wanted).calls)
    relay.unary(message(b"find me", target))
    assert getattr(relay, wanted).calls[before:][0].requests == [b"find me"]


def test_metadata_of_the_caller_and_of_the_reply_pass(relay: Relay) -> None:
    relay.unary(message(b"x"), metadata=(("traceparent", "00-abc-def-01"), ("x-data-bin", b"\x00\xff")))
    assert relay.last().metadata["traceparent"] == "00-abc-def-01"
    assert relay.last().metadata["x-data-bin"] == b"\x00\xff"


def test_keys_end_at_the_multiplexer(relay: Relay) -> None:
    relay.unary(message(b"x"), metadata=[(name, "SECRET") for name in CREDENTIALS])
    assert "SECRET" not in str(relay.last().metadata)


@pytest.fixture
def patient(tmp_path: Path, relay: Relay) -> Iterator[Relay]:
    """One that gives each call time: on a busy machine some take a second."""
    running = Relay(tmp_path, relay.express, timeout_secs=60)
    yield running
    running.close()


def test_a_thousand_calls_from_32_threads_all_get_their_own_answer(patient: Relay) -> None:
    began = time.monotonic()

    def one(number: int) -> bool:
        text = f"call {number}".encode()
        target = ALPHA if number % 2 else mux.Target(instance_index=1)
        return patient.unary(message(text, target), timeout=60) == reply_to(text)

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(one, range(1000)))
    print(f"1,000 unary calls from 32 threads: {time.monotonic() - began:.2f} s")


def test_parallel_streams_do_not_mix(relay: Relay) -> None:
    def one(number: int) -> bool:
        texts = [f"stream {number} text {at}".encode() for at in range(50)]
        return list(relay.stream((message(text) for text in texts), timeout=60)) == [reply_to(text) for text in texts]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(16)))


# -- the error table -------------------------------------------------------------------------------------------------

BAD_TARGETS = {
    "no target": (None, "INVALID_ARGUMENT", "target"),
    "empty target": (mux.Target(), "INVALID_ARGUMENT", "target"),
    "empty name": (mux.Target(instance_name=""), "INVALID_ARGUMENT", "instance_name"),
    "empty model": (mux.Target(model_id=""), "INVALID_ARGUMENT", "model_id"),
    "unknown instance": (mux.Target(instance_name="alhpa"), "NOT_FOUND", "alpha"),
    "unknown instance lists all": (mux.Target(instance_name="zzz"), "NOT_FOUND", "beta"),
    "hostile name": (mux.Target(instance_name="\x00\n%(x)s" + "y" * 10_000), "NOT_FOUND", "alpha"),
    "unknown model": (mux.Target(model_id="org/none"), "NOT_FOUND", "org/alpha"),
    "index out of range": (mux.Target(instance_index=4), "NOT_FOUND", "alpha"),
    "index at the limit": (mux.Target(instance_index=2**32 - 1), "NOT_FOUND", "alpha"),
    "stopped": (mux.Target(instance_name="halted"), "FAILED_PRECONDITION", "halted"),
    "stopped, by model": (mux.Target(model_id="org/halted"), "FAILED_PRECONDITION", "halted"),
    "stopped, by index": (mux.Target(instance_index=3), "FAILED_PRECONDITION", "halted"),
    "not connected": (mux.Target(instance_name="closed"), "UNAVAILABLE", "closed"),
    "not connected, by model": (mux.Target(model_id="org/closed"), "UNAVAILABLE", "closed"),
}
SHAPES: dict[str, Callable[[Relay, list[bytes]], Any]] = {
    "unary": lambda relay, raws: relay.unary(raws[0]),
    "stream": lambda relay, raws: list(relay.stream(raws)),
    "gather": lambda relay, raws: relay.gather(raws),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("target", "code", "hint"), BAD_TARGETS.values(), ids=BAD_TARGETS.keys())
def test_a_target_that_cannot_answer_is_refused_at_once_with_a_hint(
    relay: Relay, target: mux.Target | None, code: str, hint: str, shape: str
) -> None:
    taken: list[float] = []
    while len(taken) < 3 and (not taken or taken[-1] >= 1):  # now and then a busy machine takes a second for anything
        began = time.monotonic()
        error = refused(lambda: SHAPES[shape](relay, [message(b"x", target)]))
        taken.append(time.monotonic() - began)
        assert (error.code().name, hint in error.details()) == (code, True), error
        assert len(error.details()) < 2000
    assert min(taken) < 1, taken


@pytest.mark.parametrize("shape", SHAPES)
def test_a_message_without_inner_request_is_refused(relay: Relay, shape: str) -> None:
    error = refused(lambda: SHAPES[shape](relay, [message(None)]))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "request" in error.details()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x0a\x7f", b"\x0a\x02\x0a\xff"])
def test_bytes_that_are_no_message_are_refused(relay: Relay, shape: str, raw: bytes) -> None:
    assert refused(lambda: SHAPES[shape](relay, [raw])).code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("shape", ["stream", "gather"])
def test_an_empty_stream_is_refused(relay: Relay, shape: str) -> None:
    error = refused(lambda: SHAPES[shape](relay, []))
    assert (error.code(), "mpty" in error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True)


@pytest.mark.parametrize("shape", ["stream", "gather"])
@pytest.mark.parametrize(
    "second",
    [message(b"x", mux.Target(instance_name="beta")), message(None), message(None, None), b"\xff\xff"],
    ids=["another target", "no request", "empty", "not a message"],
)
def test_a_later_message_that_is_wrong_ends_the_stream_every_time(relay: Relay, shape: str, second: bytes) -> None:
    """Many times, because the second message may arrive before the replica's call is set up."""
    found = [code_of(lambda: SHAPES[shape](relay, [message(b"first"), second])) for _ in range(40)]
    assert set(found) == {"INVALID_ARGUMENT"}, {code: found.count(code) for code in set(found)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("code", "details", "trailing"),
    [
        ("INVALID_ARGUMENT", "`inputs` must have less than 512 tokens. Given: 600", [["x-error-type", "Validation"]]),
        ("RESOURCE_EXHAUSTED", "Model is overloaded", [["retry-after-ms", "50"], ["x-data-bin", "raw"]]),
        ("UNIMPLEMENTED", "", []),
        ("FAILED_PRECONDITION", "Überlastet \U0001f600 100% \n second line", [["grpc-status-details-bin", "status"]]),
        ("UNKNOWN", "nobody knows", []),
        ("CANCELLED", "TEI gave up", []),
        ("INTERNAL", "backend error", []),
        ("DEADLINE_EXCEEDED", "TEI's own limit", [["x-a", "1"]]),
        ("UNAVAILABLE", "Model is not healthy", [["x-a", "1"]]),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isupper() else "",
)
def test_errors_of_tei_pass_unchanged(
    relay: Relay, shape: str, code: str, details: str, trailing: list[list[str]]
) -> None:
    error = refused(lambda: SHAPES[shape](relay, [message({"fail": [code, details, trailing]})]))
    assert (error.code().name, error.details()) == (code, details)
    found = dict(error.trailing_metadata() or ())
    for key, value in trailing:
        assert found[key] == (value.encode() if key.endswith("-bin") else value)


def test_a_replica_that_says_it_is_full_is_passed_on_with_a_time_to_come_back(relay: Relay) -> None:
    error = refused(lambda: relay.unary(message({"fail": ["RESOURCE_EXHAUSTED", "Model is overloaded", []]})))
    assert error.details() == "Model is overloaded"
    assert int(dict(error.trailing_metadata())["retry-after-ms"]) > 0


def test_what_is_too_large_for_a_replica_is_refused_at_once(relay: Relay) -> None:
    """It is exhausted, too, and no wait makes room for it."""
    seen = len(relay.alpha.calls)
    refused(lambda: relay.unary(message({"fail": ["RESOURCE_EXHAUSTED", "Received message larger than max", []]})))
    assert len(relay.alpha.calls) - seen <= 2  # once on each way


def test_replies_before_an_error_arrive(relay: Relay) -> None:
    call = relay.stream([message(b"1"), message(b"2"), message({"fail": ["INTERNAL", "third", []]})])
    assert [next(call), next(call)] == [reply_to(b"1"), reply_to(b"2")]
    assert refused(lambda: next(call)).details() == "third"


def test_a_request_over_the_size_limit_is_resource_exhausted(relay: Relay) -> None:
    assert len(relay.unary(message(b"x" * (LIMIT_MB * 2**20 - 100)))) > LIMIT_MB * 2**20 - 100
    error = refused(lambda: relay.unary(message(b"x" * (LIMIT_MB * 2**20 + 1))))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_reply_over_the_size_limit_is_resource_exhausted(relay: Relay) -> None:
    if relay.express:  # on the direct way only the client's own limit counts
        assert len(relay.unary(message({"size": LIMIT_MB * 2**20 + 1}))) > LIMIT_MB * 2**20
        return
    error = refused(lambda: relay.unary(message({"size": LIMIT_MB * 2**20 + 1})))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error


def test_an_unknown_method_is_unimplemented(relay: Relay) -> None:
    assert refused(lambda: relay.unary(message(b"x"), "Nothing")).code() is grpc.StatusCode.UNIMPLEMENTED


# -- how calls end ---------------------------------------------------------------------------------------------------

HANG = message({"hang": True})


def ended(call: Call) -> float:
    eventually(lambda: call.ended is not None, 10)
    assert call.ended is not None
    return call.ended


@pytest.mark.parametrize("shape", SHAPES)
def test_the_deadline_of_the_caller_reaches_the_replica_and_ends_the_call(relay: Relay, shape: str) -> None:
    calls = {
        "unary": lambda: relay.unary(HANG, timeout=0.8),
        "stream": lambda: list(relay.stream([HANG], timeout=0.8)),
        "gather": lambda: relay.gather([HANG], timeout=0.8),
    }
    began = time.monotonic()
    error = refused(calls[shape])
    late = time.monotonic() - began - 0.8
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    remaining = relay.last().time_remaining
    assert remaining is not None
    assert 0 < remaining <= 0.81
    late_there = ended(relay.last()) - began - 0.8
    print(f"{shape}: {late * 1000:.0f} ms after the deadline here, {late_there * 1000:.0f} ms at the replica")
    assert max(late, late_there) < SLACK_SECS


def test_a_call_without_deadline_ends_after_our_own(relay: Relay) -> None:
    began = time.monotonic()
    error = refused(lambda: relay.unary(HANG, timeout=None))
    late = time.monotonic() - began - TIMEOUT_SECS
    print(f"own limit: {late * 1000:.0f} ms late")
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert -0.2 < late < SLACK_SECS


@pytest.mark.parametrize("shape", ["stream", "gather"])
def test_a_stalled_stream_ends_after_the_request_timeout(relay: Relay, shape: str) -> None:
    began = time.monotonic()
    error = refused(lambda: SHAPES[shape](relay, [message(b"1"), message(b"2"), HANG, message(b"4")]))
    late = time.monotonic() - began - TIMEOUT_SECS
    print(f"stalled {shape}: {late * 1000:.0f} ms late")
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert -0.2 < late < SLACK_SECS
    assert ended(relay.last()) - began - TIMEOUT_SECS < SLACK_SECS


def test_a_slow_stream_that_moves_is_not_ended(relay: Relay) -> None:
    pause = TIMEOUT_SECS * 0.4
    assert len(list(relay.stream(message({"sleep": pause, "at": at}) for at in range(4)))) == 4


def test_an_idle_stream_to_which_nothing_is_owed_stays_open(relay: Relay) -> None:
    def pausing() -> Iterator[bytes]:
        yield message(b"1")
        time.sleep(TIMEOUT_SECS + 0.7)
        yield message(b"2")

    assert list(relay.stream(pausing())) == [reply_to(b"1"), reply_to(b"2")]


def test_an_idle_stream_outlives_its_replica(relay: Relay) -> None:
    """Whoever had nothing to ask asked for another replica, waking what slept, and was ended when none came in time."""
    new, port = mux.Target(instance_name="new"), relay.more_ports[0]
    fake, answered = relay.fake("new", port), threading.Event()

    def pausing() -> Iterator[bytes]:
        yield message(b"1", new)
        answered.wait()
        fake.stop()
        time.sleep(TIMEOUT_SECS + 0.7)
        fake.start()
        relay.wait_routable(new)
        yield message(b"2", new)

    try:
        fake.start()
        relay.write([*relay.instances, instance("new", port, "org/new")])
        relay.wait_routable(new)
        call = relay.stream(pausing(), timeout=30)
        assert next(call) == reply_to(b"1")
        answered.set()
        assert list(call) == [reply_to(b"2")]
    finally:
        answered.set()
        fake.stop()
        relay.write(relay.instances)


@pytest.mark.parametrize("pause", [None, 0.3], ids=["never", "now and then"])
def test_a_caller_that_does_not_read_holds_up_no_other(relay: Relay, pause: float | None) -> None:
    """Its answers held all permits that batches have, and no other stream was answered any more."""
    before = len(relay.alpha.calls)
    large = (message({"size": 50_000, "at": at}) for at in range(3000))
    mute = relay.stream(large, timeout=None)
    over = threading.Event()

    def read_slowly() -> int:
        next(mute)
        return 1 + sum(1 for _ in itertools.takewhile(lambda _: not over.wait(pause), mute))

    def innocent(number: int) -> list[bytes]:
        return list(relay.stream([message(b"innocent %d %d" % (number, at)) for at in range(20)], timeout=8))

    def read_after_the_end() -> grpc.RpcError:
        """At once: Envoy keeps the status for a caller that does not read as long as the multiplexer an answer."""
        ended(at_replica)
        return refused(lambda: list(mute))

    with ThreadPoolExecutor(5) as pool:
        slow = pool.submit(read_slowly) if pause else None
        at_replica = eventually(lambda: next((call for call in relay.alpha.calls[before:] if call.requests), None))
        eventually(lambda: len(at_replica.requests) > 50)
        late = None if pause else pool.submit(read_after_the_end)
        time.sleep(0.2)  # until the permits are taken: nothing tells when
        answers = list(pool.map(innocent, range(4)))
        over.set()
    assert answers == [[reply_to(b"innocent %d %d" % (number, at)) for at in range(20)] for number in range(4)]
    if slow:
        assert slow.result() >= 1
        assert mute.is_active()
        mute.cancel()
    if late:
        error = late.result()
        if not relay.express:  # Envoy ends the stream, with the status behind answers, unless they are read in a second
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "does not read its answers" in error.details()


def test_a_unary_answer_that_is_not_read_is_not_kept(relay: Relay) -> None:
    """One call with a window of 100 bytes for an answer of 900,000."""
    began = time.monotonic()
    mute = HalfSender(relay.port, f"/{SERVICE}/Embed", message({"size": 900_000}), window=100)

    def ended() -> bool:
        mute.go_on()
        return mute.ended

    eventually(ended, timeout=10)
    assert TIMEOUT_SECS < time.monotonic() - began < TIMEOUT_SECS + 1 + relay.late_secs + SLACK_SECS
    if not relay.express:  # Envoy has taken the whole answer; it ends the stream, and the status waits behind it
        assert mute.trailers["grpc-status"] == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])
    mute.close()


def test_half_a_request_is_not_kept(relay: Relay) -> None:
    began = time.monotonic()
    half = HalfSender(relay.port, f"/{SERVICE}/Embed", message(b"x" * 1000), keep_back=1)

    def ended() -> bool:
        half.go_on()
        return half.ended

    eventually(ended, timeout=10)
    # A second for the largest MiB.
    assert TIMEOUT_SECS + 1 < time.monotonic() - began < TIMEOUT_SECS + 1 + relay.late_secs + SLACK_SECS
    assert half.trailers["grpc-status"] == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])
    words = unquote(half.trailers["grpc-message"])
    if "did not arrive" in words:
        assert half.trailers["x-tei-code"] == "TIMEOUT"
    else:
        assert relay.express
        assert "no whole request" in words
    half.close()


def test_a_caller_that_takes_its_time_between_texts_to_rerank_is_not_ended(relay: Relay) -> None:
    """The replica owes nothing until the caller has finished; the timeout is on the replica's progress."""

    def pausing() -> Iterator[bytes]:
        yield message(b"1")
        time.sleep(TIMEOUT_SECS + 0.7)
        yield message(b"2")

    assert relay.gather(pausing()) == b"|".join([reply_to(b"1"), reply_to(b"2")])


def test_a_cancelled_call_is_cancelled_at_the_replica(relay: Relay) -> None:
    seen = len(relay.alpha.calls)
    future = relay.channel.unary_unary(f"/{SERVICE}/Embed").future(HANG, timeout=20)
    eventually(lambda: len(relay.alpha.calls) > seen)
    cancelled = time.monotonic()
    future.cancel()
    took = ended(relay.last()) - cancelled
    print(f"unary cancel reached the replica after {took * 1000:.0f} ms")
    assert took < 1


def test_a_cancelled_stream_is_cancelled_at_the_replica(relay: Relay) -> None:
    seen = len(relay.alpha.calls)
    release = threading.Event()

    def never_ending() -> Iterator[bytes]:
        yield message(b"1")
        release.wait(20)

    call = relay.stream(never_ending())
    assert next(call) == reply_to(b"1")
    assert len(relay.alpha.calls) == seen + 1
    cancelled = time.monotonic()
    call.cancel()
    took = ended(relay.last()) - cancelled
    release.set()
    print(f"stream cancel reached the replica after {took * 1000:.0f} ms")
    assert took < 1


# -- following -------------------------------------------------------------------------------------------------------


def test_the_state_file_is_followed_without_a_restart(relay: Relay) -> None:
    new, port = mux.Target(instance_name="new"), relay.more_ports[0]
    fake = relay.fake("new", port)
    assert refused(lambda: relay.unary(message(b"x", new))).code() is grpc.StatusCode.NOT_FOUND
    try:
        fake.start()
        relay.write([*(each for each in relay.instances if each.name != "beta"), instance("new", port, "org/new")])
        assert relay.unary(message(b"x", new)) == reply_to(b"x")  # at once: a caller that sees the file may call
        relay.write([*relay.instances[:1], instance("new", port, "org/new", wanted="stopped")])
        eventually(lambda: code_of(lambda: relay.unary(message(b"x", new))) == "FAILED_PRECONDITION", 5)
        relay.write(relay.instances)
        eventually(lambda: code_of(lambda: relay.unary(message(b"x", new))) == "NOT_FOUND", 5)
    finally:
        fake.stop()
        relay.write(relay.instances)


def test_another_process_on_a_replicas_port_gets_no_call(relay: Relay) -> None:
    """Another program, another instance, a predecessor of an earlier launch, another appliance: all the same."""
    port = relay.more_ports[0]
    mine = mux.Target(instance_name="mine")
    others = [FakeTei(port, "another", "mine"), relay.fake("other", port), relay.fake("mine", port, replica=1)]
    try:
        relay.write([*relay.instances, instance("mine", port, "org/mine", launch=2)])
        for other in (*others, relay.fake("mine", port)):
            other.start()
            for _ in range(20):
                assert code_of(lambda: relay.unary(message(b"x", mine), timeout=5)) == "UNAVAILABLE"
            assert code_of(lambda: list(relay.stream([message(b"x", mine)]))) == "UNAVAILABLE"
            assert other.calls == []
            other.stop()
        own = relay.fake("mine", port)
        own.start(launch=2)
        assert relay.unary(message(b"x", mine)) == reply_to(b"x")
        own.stop()
        others[0].start()  # the port is taken between two calls
        assert code_of(lambda: relay.unary(message(b"x", mine), timeout=5)) == "UNAVAILABLE"
        assert code_of(lambda: list(relay.stream([message(b"x", mine)]))) == "UNAVAILABLE"
        assert others[0].calls == []
    finally:
        for other in others:
            other.stop()
        relay.write(relay.instances)


def test_a_damaged_state_file_keeps_the_routes(relay: Relay) -> None:
    good = relay.state.path.read_bytes()
    try:
        for damage in (b"", b"\xff\x00 not [toml", good[: len(good) // 2]):
            relay.state.path.write_bytes(damage)
            time.sleep(0.4)
            assert relay.unary(message(b"x")) == reply_to(b"x")
        relay.state.path.unlink()
        time.sleep(0.4)
        assert relay.unary(message(b"x")) == reply_to(b"x")
    finally:
        relay.state.path.write_bytes(good)


def test_a_returned_replica_takes_traffic_within_a_second(relay: Relay) -> None:
    target = mux.Target(instance_name="beta")
    took = []
    for down_secs in (0.3, 1.5):
        relay.beta.stop()
        time.sleep(down_secs)
        began = time.monotonic()
        # It was there a moment ago, so the call waits for it, as long as a call may take.
        assert refused(lambda: relay.unary(message(b"x", target))).code() is grpc.StatusCode.UNAVAILABLE
        assert TIMEOUT_SECS <= time.monotonic() - began < TIMEOUT_SECS + SLACK_SECS
        relay.beta.start()
        began = time.monotonic()
        relay.wait_routable(target, 10)
        took.append(time.monotonic() - began)
    print("returned replica routable after", ", ".join(f"{secs:.2f} s" for secs in took))
    assert max(took) < 1 + SLACK_SECS


def test_a_replica_whose_port_opens_late_takes_traffic_within_a_second(relay: Relay) -> None:
    late = relay.fake("closed", relay.closed_port)
    target = mux.Target(instance_name="closed")
    try:
        late.start()
        began = time.monotonic()
        relay.wait_routable(target, 10)
        took = time.monotonic() - began
        print(f"opened replica routable after {took:.2f} s")
        assert took < 1 + SLACK_SECS
    finally:
        late.stop()
    eventually(lambda: code_of(lambda: relay.unary(message(b"x", target))) == "UNAVAILABLE", 5)


def test_a_call_whose_replica_goes_away_waits_for_the_other_to_come_back(patient: Relay) -> None:
    first, second = (patient.fake("pair", port, replica) for replica, port in enumerate(patient.more_ports[:2]))
    spec = InstanceSpec.parse({"name": "pair", "model_id": "org/pair", "replicas": 2})
    ports, own_ports = tuple(patient.more_ports[:2]), tuple(patient.more_ports[2:])
    pair = Instance(spec, ports, own_ports, created_at="2026-01-01T00:00:00Z")
    target = mux.Target(instance_name="pair")
    first.start()
    try:
        patient.write([*patient.instances, pair])
        patient.wait_routable(target)
        with ThreadPoolExecutor() as threads:
            answer = threads.submit(patient.unary, message({"sleep": 0.6}, target))
            eventually(lambda: any(b"sleep" in request for call in first.calls for request in call.requests), 5)
            first.stop()
            time.sleep(0.7)  # no replica is there
            second.start()
            assert answer.result() == reply_to(b'{"sleep": 0.6}')
        assert [request for call in second.calls for request in call.requests] == [b'{"sleep": 0.6}']
    finally:
        first.stop()
        second.stop()
        patient.write(patient.instances)


def test_a_call_that_goes_on_at_another_instance_of_its_model_waits_at_its_gate(patient: Relay) -> None:
    twins = [patient.fake(name, port) for name, port in zip(("one", "two"), patient.more_ports[:2], strict=True)]
    spec = {"model_id": "org/twin", "max_concurrent_requests": 1}
    instances = [
        Instance(InstanceSpec.parse({**spec, "name": name}), (port,), (own,), created_at="2026-01-01T00:00:00Z")
        for name, port, own in zip(("one", "two"), patient.more_ports[:2], patient.more_ports[2:], strict=True)
    ]
    for twin in twins:
        twin.start()
    try:
        patient.write([*patient.instances, *instances])
        for each in instances:
            patient.wait_routable(mux.Target(instance_name=each.name))
        with ThreadPoolExecutor() as threads:
            # A stream is the multiplexer's with Envoy before it, too: it counts what it has in work itself.
            held = threads.submit(list, patient.stream([message({"sleep": 0.8}, mux.Target(instance_name="two"))]))
            eventually(lambda: any(b"0.8" in request for call in twins[1].calls for request in call.requests), 5)
            moved = threads.submit(patient.unary, message({"sleep": 0.5}, mux.Target(model_id="org/twin")))
            eventually(lambda: any(b"0.5" in request for call in twins[0].calls for request in call.requests), 5)
            twins[0].stop()
            assert held.result() == [reply_to(b'{"sleep": 0.8}')]
            assert moved.result() == reply_to(b'{"sleep": 0.5}')
        first, second = twins[1].calls[-2:]
        assert first.ended is not None
        assert second.began > first.ended - 0.05
    finally:
        for twin in twins:
            twin.stop()
        patient.write(patient.instances)


def test_our_own_connection_may_be_slow_with_its_first_frame(relay: Relay) -> None:
    """A process that stood still between the connection and that frame had its call end with UNAVAILABLE."""
    path = Layout(str(relay.folder)).multiplexer_backend_socket(0)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(path)
        silent.settimeout(HANDSHAKE_SECS + 1)
        assert silent.recv(1024)  # its own first frame
        with pytest.raises(TimeoutError):
            silent.recv(1024)


def test_restarts_under_load_give_no_error_but_unavailable(patient: Relay) -> None:
    """Every rewrite with a higher launch number replaces alpha's connection, as a restart does."""
    stop = threading.Event()
    codes: dict[str, int] = {}

    def hammer() -> None:
        for number in itertools.count():
            if stop.wait(PAUSE_SECS):
                return
            text = f"{threading.get_ident()} {number}".encode()
            try:
                code = "OK" if patient.unary(message(text)) == reply_to(text) else "WRONG ANSWER"
            except grpc.RpcError as error:
                code = error.code().name
                if code != "UNAVAILABLE":
                    code = f"{code}: {error.details()}"
            codes[code] = codes.get(code, 0) + 1

    threads = [threading.Thread(target=hammer) for _ in range(16)]
    try:
        for thread in threads:
            thread.start()
        for launch in range(2, 22):
            patient.write([instance("alpha", patient.alpha.port, launch=launch), *patient.instances[1:]])
            patient.alpha.stop()
            patient.alpha.start(launch)
            time.sleep(0.15)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    print(f"20 replaced connections under load: {codes}")
    assert codes.pop("OK") > 0
    assert set(codes) <= {"UNAVAILABLE"}, codes
    patient.wait_routable(ALPHA, 5)


# -- health and reflection -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", ["", SERVICE])
def test_health_is_serving(relay: Relay, service: str) -> None:
    reply = health_pb2_grpc.HealthStub(relay.channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_health_of_an_unknown_service_is_not_found(relay: Relay) -> None:
    request = health_pb2.HealthCheckRequest(service="nothing")
    error = refused(lambda: health_pb2_grpc.HealthStub(relay.channel).Check(request, timeout=10))
    assert error.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_lists_and_describes_the_services(relay: Relay, version: str) -> None:
    ask = relay.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    questions = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="tei.v1.EmbedRequest"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.such.Thing"),
    ]
    listed, described, inner, unknown = ask(iter(questions), timeout=10)
    names = {service.name for service in listed.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    assert {"grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"} <= names
    assert described.file_descriptor_response.file_descriptor_proto
    assert inner.file_descriptor_response.file_descriptor_proto
    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def test_a_replica_that_takes_no_packed_streams_is_asked_once_whether_it_does(relay: Relay) -> None:
    """The embedded engine alone takes them, and its process tells so by taking one."""
    for number in range(3):
        request = dense_request("beta", [f"{number} {text}" for text in "abcdef"]).SerializeToString()
        reply = mux.EmbedArrowResponse.FromString(relay.unary(request, "EmbedArrow"))
        assert len(vectors(reply)) == 6
    assert relay.beta.unknown == ["/tei_appliance.v1.PackedEmbed/Embed"]
    assert sum(len(call.requests) for call in relay.beta.calls if call.path == "/tei.v1.Embed/EmbedStream") == 18
