"""The express lane with a real Envoy: who is asked, that the answers are those of the multiplexer, and what happens
when a part of it dies."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import httpx2
import psutil
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from appliance.core.access import CREDENTIALS
from appliance.core.events import Event
from appliance.drivers import envoy, processes
from appliance.drivers.journal import Journal
from appliance.export.envoy_tables import FRAME_BYTES, WINDOW_BYTES
from appliance.export.express_lane import VALID_SECS, express_methods
from appliance.express.__main__ import MOST_SILENCES
from appliance.wire.envelope import CACHE_KEY, EXPRESS_ADMITTED, EXPRESS_KEY, EXPRESS_SECS_KEY, FINAL, INSTANCE_KEY
from appliance.wire.methods import METHODS
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.vectors import length_delimited
from testing.fake_tei import reply_to
from testing.relay import ALPHA, LIMIT_MB, SERVICE, TIMEOUT_SECS, Relay, code_of, instance, message, refused
from testing.running import eventually

pytestmark = pytest.mark.processes
DIRECT_SECS = 5.0


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    running = Relay(tmp_path_factory.mktemp("lane"), express=True)
    yield running
    running.close()


@pytest.fixture
def own(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Relay]:
    """To be broken. Its parameter: grpc_request_timeout_secs."""
    timeout_secs = getattr(request, "param", TIMEOUT_SECS)
    running = Relay(tmp_path_factory.mktemp("lane"), express=True, timeout_secs=timeout_secs)
    try:
        yield running
    finally:
        for process in running.processes:
            process.kill()
            process.wait()
        end_envoys(running)
        running.alpha.stop()
        running.beta.stop()
        running.channel.close()


def envoys(relay: Relay) -> list[psutil.Process]:
    mark = f"{relay.node}:express:"
    return [each for each, _ in processes.marked("TEI_APPLIANCE_REPLICA", mark, ()) if "envoy" in each.name()]


def end_envoys(relay: Relay) -> None:
    for each in envoys(relay):
        each.kill()


def channel(relay: Relay) -> grpc.Channel:
    """A connection of its own, to whoever the kernel gives it."""
    unlimited = [(f"grpc.max_{way}_message_length", -1) for way in ("receive", "send")]
    return grpc.insecure_channel(f"127.0.0.1:{relay.port}", [*unlimited, ("grpc.use_local_subchannel_pool", 1)])


def inside(relay: Relay) -> grpc.Channel:
    """The multiplexer without Envoy."""
    unlimited = [(f"grpc.max_{way}_message_length", -1) for way in ("receive", "send")]
    return grpc.insecure_channel(f"unix:{relay.folder}/multiplexer-0.sock", unlimited)


def multiplexer_calls(relay: Relay) -> int:
    """Requests that Envoy has sent to the multiplexer."""
    text = envoy.ask(relay.folder / "express.sock", "GET", "/stats?filter=^cluster.multiplexer.upstream_rq_total$")
    assert text
    return int(text.partition(":")[2])


def admitted(relay: Relay, ask: Any) -> Any:
    """The answer of a call that went straight to a replica: an Envoy that knows the caller asks nobody else."""
    until = time.monotonic() + DIRECT_SECS
    while time.monotonic() < until:
        before = multiplexer_calls(relay)
        answer = ask()
        if multiplexer_calls(relay) == before:
            return answer
    raise AssertionError("every call went to the multiplexer")


# -- who is asked -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [method.name for method in express_methods()])
def test_a_known_caller_is_sent_straight_to_the_replica(relay: Relay, method: str) -> None:
    assert admitted(relay, lambda: relay.unary(message(b"direct"), method)) == reply_to(b"direct")


def test_calls_go_on_while_the_multiplexer_hangs(own: Relay) -> None:
    admitted(own, lambda: own.unary(message(b"x")))
    own.processes[0].send_signal(signal.SIGSTOP)
    assert [own.unary(message(b"y"), timeout=1) for _ in range(20)] == [reply_to(b"y")] * 20
    assert code_of(lambda: own.unary(message(), "Info", timeout=0.5)) == "DEADLINE_EXCEEDED"
    own.processes[0].send_signal(signal.SIGCONT)


def test_a_client_of_tei_names_the_instance_in_its_metadata(relay: Relay) -> None:
    ask = relay.channel.unary_unary("/tei.v1.Embed/Embed")
    named = ((INSTANCE_KEY, "beta"),)
    assert admitted(relay, lambda: ask(b"native", metadata=named)) == reply_to(b"native")
    assert relay.beta.calls[-1].requests == [b"native"]


@pytest.mark.parametrize(
    "target", [mux.Target(model_id="org/beta"), mux.Target(instance_index=1), mux.Target(instance_name="nobody")]
)
def test_what_is_no_name_of_the_lane_goes_to_the_multiplexer(relay: Relay, target: mux.Target) -> None:
    admitted(relay, lambda: relay.unary(message(b"x")))
    before = multiplexer_calls(relay)
    code = code_of(lambda: relay.unary(message(b"x", target)))
    assert (multiplexer_calls(relay) - before, code) == (1, "NOT_FOUND" if target.instance_name else "OK")


def test_an_instance_without_the_flag_is_none_of_the_lane(relay: Relay) -> None:
    plain = [replace(each, spec=replace(each.spec, express=each.name != "beta")) for each in relay.instances]
    relay.state.update(lambda before: replace(before, instances={each.name: each for each in plain}))
    try:
        admitted(relay, lambda: relay.unary(message(b"x")))
        eventually(lambda: '"instance:beta"' not in (relay.folder / "express" / "routes.json").read_text())
        for _ in range(3):  # Envoy follows a moment later
            relay.unary(message(b"x", mux.Target(instance_name="beta")))
            time.sleep(0.1)
        before = multiplexer_calls(relay)
        relay.unary(message(b"x", mux.Target(instance_name="beta")))
        assert multiplexer_calls(relay) == before + 1
    finally:
        relay.write(relay.instances)


def test_neither_side_sees_what_envoy_and_the_multiplexer_say_to_each_other(relay: Relay) -> None:
    ask = relay.channel.unary_unary(f"/{SERVICE}/Embed")
    sent = [(name, "SECRET") for name in CREDENTIALS] + [("x-forwarded-client-cert", "SECRET"), ("x-mine", "1")]
    for _ in range(3):
        _, call = admitted(relay, lambda: ask.with_call(message(b"x"), metadata=sent))
        names = {key for key, _ in (*call.initial_metadata(), *call.trailing_metadata())}
        assert names <= {INSTANCE_KEY, "date"}
        got = relay.last().metadata
        assert "SECRET" not in str(got)
        assert got["x-mine"] == "1"
    error = refused(lambda: relay.unary(message(b"x", mux.Target(instance_name="closed"))))
    assert {key for key, _ in error.trailing_metadata()} & {FINAL[0], EXPRESS_SECS_KEY} == set()


def test_every_single_call_with_a_text_is_of_the_lane() -> None:
    assert {method.name for method in METHODS} - {method.name for method in express_methods()} == {
        "Info",
        *(method.name for method in METHODS if method.name.endswith("Stream")),
    }


# -- the same answers -------------------------------------------------------------------------------------------------

TARGETS = st.sampled_from([ALPHA, mux.Target(instance_name="beta"), mux.Target(model_id="org/beta"), mux.Target()])
PIECES = st.one_of(
    TARGETS.map(lambda target: length_delimited(1, target.SerializeToString())),
    st.binary(max_size=40).map(lambda inner: length_delimited(2, inner)),
    st.builds(length_delimited, st.integers(3, 40), st.binary(max_size=9)),  # fields that nobody has
    st.binary(max_size=6),
)
MESSAGES = st.one_of(
    st.lists(PIECES, max_size=4).map(b"".join),
    st.tuples(TARGETS, st.binary(max_size=300)).map(lambda both: message(both[1], both[0])),
    st.tuples(TARGETS, st.integers(0, 40)).map(lambda both: message(b"cut off", both[0])[: both[1]]),
)
COMPRESSIONS = st.sampled_from([grpc.Compression.NoCompression, grpc.Compression.Gzip])


def outcome(way: grpc.Channel, path: str, raw: bytes, compression: grpc.Compression) -> tuple[Any, ...]:
    """What the caller gets, without what is of its transport."""
    try:
        reply, call = way.unary_unary(path).with_call(raw, timeout=10, compression=compression)
    except grpc.RpcError as error:
        trailing = {key: value for key, value in error.trailing_metadata() if key not in ("date", INSTANCE_KEY)}
        return error.code(), error.details(), trailing
    # The lane passes by the cache, and says nothing of it.
    return reply, {key: value for key, value in call.initial_metadata() if key not in ("date", CACHE_KEY)}


@pytest.mark.parametrize("own", [60.0], indirect=True)  # a busy machine may take a second for one of them
def test_any_message_has_the_answer_of_the_multiplexer(own: Relay) -> None:
    """Fields out of order, twice, cut off, unknown; compressed or not: 500 messages, on a known caller's connection."""
    seen: Counter[str] = Counter()
    with channel(own) as envoy_way, inside(own) as plain_way:

        @examples(max_examples=500, deadline=None)
        @given(MESSAGES, COMPRESSIONS, st.sampled_from(["Embed", "Tokenize"]))
        def check(raw: bytes, compression: grpc.Compression, method: str) -> None:
            path = f"/{SERVICE}/{method}"
            wanted = outcome(plain_way, path, raw, compression)
            assert outcome(envoy_way, path, raw, compression) == wanted
            seen["answered" if isinstance(wanted[0], bytes) else "refused"] += 1

        check()
    assert min(seen["answered"], seen["refused"]) > 50, seen


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 1_000_000, 1_048_000])
def test_a_message_of_any_size_arrives_whole(relay: Relay, size: int) -> None:
    inner = os.urandom(size)
    assert relay.unary(message(inner)) == reply_to(inner)
    assert relay.last().requests == [inner]


def test_a_caller_cannot_say_that_he_was_admitted(relay: Relay) -> None:
    """The multiplexer would not ask him for a key; here it is asked what arrived there."""
    claims = ((EXPRESS_KEY, EXPRESS_ADMITTED), ("x-someone", "new"), ("api-key", "never seen before"))
    before = multiplexer_calls(relay)
    relay.unary(message(b"x"), metadata=claims)
    assert multiplexer_calls(relay) == before + 1  # to be judged


def test_a_message_of_tei_reaches_the_replica_whole_and_within_the_limit(relay: Relay) -> None:
    """Half of one would keep a thread of the replica, and a large one has no place in the memory budget there."""
    to_alpha = (("x-tei-instance", "alpha"),)
    path = "/tei.v1.Embed/Embed"
    with channel(relay) as way:
        ask = way.unary_unary(path)
        assert admitted(relay, lambda: ask(b"x", timeout=10, metadata=to_alpha)) == reply_to(b"x")
        error = refused(lambda: ask(bytes(2_000_000), timeout=10, metadata=to_alpha))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        before, silent = len(relay.alpha.calls), threading.Event()
        half = way.stream_unary(path).future((b"" for _ in iter(silent.wait, True)), timeout=5, metadata=to_alpha)
        time.sleep(0.5)
        assert len(relay.alpha.calls) == before
        half.cancel()
        silent.set()


@pytest.mark.parametrize("own", [60.0], indirect=True)  # the patient call may take a second longer on a busy machine
def test_short_deadlines_cost_the_caller_none_of_his_other_calls(own: Relay) -> None:
    """Envoy would end the connection after some hundred calls that their caller gave up within a second."""
    with channel(own) as way:
        ask = way.unary_unary(f"/{SERVICE}/Embed")
        ask(message(b"x"), timeout=10)
        given_up: Counter[str] = Counter()
        patient = ask.future(message({"sleep": 0.8}), timeout=10)
        for _ in range(12):
            hasty = [ask.future(message({"sleep": 0.3}), timeout=0.05) for _ in range(50)]
            given_up.update(each.code().name for each in hasty)
        assert set(given_up) == {"DEADLINE_EXCEEDED"}
        assert patient.result() == reply_to(b'{"sleep": 0.8}')


def test_as_many_pairs_of_metadata_as_the_multiplexer_takes(relay: Relay) -> None:
    pairs = tuple((f"x-pair-{number}", "1") for number in range(120))
    assert admitted(relay, lambda: relay.unary(message(b"x"), metadata=pairs)) == reply_to(b"x")
    assert relay.last().metadata["x-pair-119"] == "1"


# -- replicas that are full, gone or not ours -------------------------------------------------------------------------


def table(relay: Relay) -> str:
    return (relay.folder / "express" / "clusters.json").read_text()


def test_a_replica_that_is_gone_leaves_the_table_and_calls_fail_by_name(relay: Relay) -> None:
    port = f'"port_value": {relay.beta.port}'
    assert port in table(relay)
    relay.beta.stop()
    try:
        target = mux.Target(instance_name="beta")
        assert code_of(lambda: relay.unary(message(b"x", target), timeout=1)) in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
        eventually(lambda: port not in table(relay), 5)
    finally:
        relay.beta.start()
    eventually(lambda: port in table(relay), 5)


def test_another_process_on_the_port_gets_no_place_in_the_table(relay: Relay) -> None:
    relay.beta.stop()
    port = f'"port_value": {relay.beta.port}'
    eventually(lambda: port not in table(relay), 5)
    stranger = relay.fake("stranger", relay.beta.port)
    stranger.start()
    try:
        time.sleep(0.5)
        assert port not in table(relay)
        assert stranger.calls == []
    finally:
        stranger.stop()
        relay.beta.start()
    eventually(lambda: port in table(relay), 5)


@pytest.mark.parametrize("taken", [{"ejected": {0: "it is silent"}}, {"quarantined": {0: "it crashed"}}], ids=str)
def test_a_replica_from_which_traffic_is_taken_leaves_the_table(relay: Relay, taken: Any) -> None:
    port = f'"port_value": {relay.beta.port}'
    eventually(lambda: port in table(relay), 5)
    changed = [replace(each, **taken) if each.name == "beta" else each for each in relay.instances]
    relay.write(changed)
    try:
        eventually(lambda: port not in table(relay), 5)
    finally:
        relay.write(relay.instances)
    eventually(lambda: port in table(relay), 5)


def test_a_launch_with_a_conviction_leaves_the_table_until_the_next(own: Relay) -> None:
    """The multiplexer refuses the convicted call; Envoy would send it to the next replica."""
    port = f'"port_value": {own.alpha.port}'
    assert port in table(own)
    journal = Journal[Event](own.folder / "events.jsonl", now=str)
    journal.record(Event.CONVICTED, "alpha", "this call ends replicas", launch=1, died=[])
    eventually(lambda: port not in table(own), 5)
    assert own.unary(message(b"x")) == reply_to(b"x")  # through the multiplexer
    own.write([instance("alpha", own.alpha.port, launch=2), *own.instances[1:]])
    own.alpha.stop()
    own.alpha.start(2)
    eventually(lambda: port in table(own), 5)


def test_the_next_instance_of_a_convicted_name_is_not_convicted(own: Relay) -> None:
    """Its launches are counted from 1 again."""
    port = f'"port_value": {own.alpha.port}'
    journal = Journal[Event](own.folder / "events.jsonl", now=str)
    journal.record(Event.CONVICTED, "alpha", "this call ends replicas", launch=1, died=[])
    eventually(lambda: port not in table(own), 5)
    journal.record(Event.DELETED, "alpha", "deleted")
    eventually(lambda: port in table(own), 5)


def test_a_conviction_counts_in_a_journal_that_was_begun_anew(own: Relay) -> None:
    """Its events are counted from 1 again."""
    port = f'"port_value": {own.alpha.port}'
    path = own.folder / "events.jsonl"
    journal = Journal[Event](path, now=str)
    for _ in range(3):
        journal.record(Event.CREATED, "other", "created")
    journal.record(Event.CONVICTED, "alpha", "this call ends replicas", launch=1, died=[])
    eventually(lambda: port not in table(own), 5)
    journal.record(Event.DELETED, "alpha", "deleted")
    eventually(lambda: port in table(own), 5)
    path.unlink()
    journal.record(Event.CONVICTED, "alpha", "this call ends replicas", launch=1, died=[])
    eventually(lambda: port not in table(own), 5)


def test_what_a_full_replica_refuses_waits_in_the_multiplexer(relay: Relay) -> None:
    """By a caller of another way, so the multiplexer does not know how full it is."""
    full = {"fail": ["RESOURCE_EXHAUSTED", "Model is overloaded", []]}
    begun = time.monotonic()
    error = refused(lambda: relay.unary(message(full), timeout=5))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 0.9 < time.monotonic() - begun < 4  # until the timeout of the multiplexer, and not tried again after it


@pytest.mark.parametrize("own", [30], indirect=True, ids=["late"])
def test_with_all_replicas_dead_no_call_ends_before_its_deadline(own: Relay) -> None:
    """Which is nearer than that of the multiplexer: a replica's start may take a second where the cores are busy."""
    admitted(own, lambda: own.unary(message(b"x")))
    own.alpha.stop()
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(own.unary, message(b"later"), timeout=10) for _ in range(8)]
        time.sleep(0.5)
        own.alpha.start()
        assert [each.result() for each in waiting] == [reply_to(b"later")] * 8


@pytest.mark.parametrize("way", [channel, inside], ids=["express", "multiplexer"])
def test_a_reply_over_the_limit_is_refused_on_both_ways(relay: Relay, way: Any) -> None:
    def ask(size: int) -> bytes:
        with way(relay) as its_channel:
            reply: bytes = its_channel.unary_unary(f"/{SERVICE}/Embed")(message({"size": size}), timeout=10)
            return reply

    relay.unary(message(b"x"))  # so that Envoy knows who calls
    least = LIMIT_MB * 1024 * 1024 - 100
    assert len(ask(least)) > least
    error = refused(lambda: ask(WINDOW_BYTES + FRAME_BYTES))
    assert (error.code(), "arger than" in error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)


@pytest.mark.parametrize("own", [30], indirect=True, ids=["late"])
def test_a_replica_that_dies_in_the_middle_of_its_reply_is_not_the_callers_loss(own: Relay) -> None:
    admitted(own, lambda: own.unary(message(b"x")))
    with ThreadPoolExecutor(8) as threads:
        order = {"begin": True, "sleep": 0.5}
        waiting = [threads.submit(own.unary, message(order), timeout=20) for _ in range(8)]
        eventually(lambda: sum(b"begin" in raw for call in own.alpha.calls for raw in call.requests) == 8, 5)
        own.alpha.stop()
        own.alpha.start()
        assert [each.result() for each in waiting] == [reply_to(b'{"begin": true, "sleep": 0.5}')] * 8


# -- what dies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [30.0], indirect=True)  # so that a deadline is the caller's: a call hung
def test_when_envoy_is_killed_the_multiplexer_answers_in_its_place(own: Relay) -> None:
    """What was in flight is lost. A caller who connects again in the very moment meets the dying listener, and pauses a
    second, as gRPC's clients do."""
    admitted(own, lambda: own.unary(message(b"x")))
    stop = threading.Event()

    def caller() -> list[tuple[float, str]]:
        codes = []
        with channel(own) as way:
            ask = way.unary_unary(f"/{SERVICE}/Embed")
            while not stop.is_set():
                codes.append((time.monotonic(), code_of(lambda: ask(message(b"x"), timeout=5))))
        return codes

    with ThreadPoolExecutor() as threads:
        callers = [threads.submit(caller) for _ in range(8)]
        time.sleep(0.5)
        (envoy_process,) = envoys(own)
        killed = time.monotonic()
        envoy_process.kill()
        time.sleep(3.5)
        stop.set()
        found = [each.result() for each in callers]
    assert {code for codes in found for _, code in codes} == {"OK", "UNAVAILABLE"}
    late = [code for codes in found for at, code in codes if at > killed + 2]
    assert (len(late) > 100, set(late)) == (True, {"OK"})
    assert own.processes[1].wait(5) == 1  # and supervisord starts it again


@pytest.mark.parametrize("ahead_secs", [0, 3600], ids=["", "and the clock is set back"])
def test_while_the_writer_of_the_tables_hangs_all_calls_go_to_the_multiplexer(own: Relay, ahead_secs: int) -> None:
    """A port in the tables may be another instance's meanwhile."""
    admitted(own, lambda: own.unary(message(b"x")))
    own.processes[1].send_signal(signal.SIGSTOP)
    valid = own.folder / "express.valid"
    valid.write_text(f"{int(valid.read_text()) + ahead_secs:020}\n")
    time.sleep(VALID_SECS + 0.5)
    own.write([each for each in own.instances if each.name != "alpha"])
    eventually(lambda: code_of(lambda: own.unary(message(b"x"), timeout=5)) == "NOT_FOUND", 3)
    own.write(own.instances)
    own.processes[1].send_signal(signal.SIGCONT)
    admitted(own, lambda: own.unary(message(b"x")))


def test_on_a_full_disk_envoy_goes_on_and_admits_nobody(own: Relay) -> None:
    """Here a folder has the name under which new tables are written."""
    admitted(own, lambda: own.unary(message(b"x")))
    (envoy_process,) = envoys(own)
    (own.folder / "express" / "candidate.json.new").mkdir()
    own.beta.stop()
    time.sleep(VALID_SECS + 1.5)
    before = multiplexer_calls(own)
    assert own.unary(message(b"x")) == reply_to(b"x")
    assert multiplexer_calls(own) == before + 1
    (own.folder / "express" / "candidate.json.new").rmdir()
    admitted(own, lambda: own.unary(message(b"x")))
    assert envoys(own) == [envoy_process]


def test_an_envoy_that_hangs_is_ended(own: Relay) -> None:
    """Connections to it are taken by the kernel, and nobody answers."""
    admitted(own, lambda: own.unary(message(b"x")))
    (hanging,) = envoys(own)
    hanging.suspend()
    own.processes[1].wait(5 * MOST_SILENCES)
    with channel(own) as way:
        assert way.unary_unary(f"/{SERVICE}/Embed")(message(b"x"), timeout=5) == reply_to(b"x")
    assert envoys(own) == []


def test_a_successor_ends_the_envoy_that_was_left_behind(own: Relay) -> None:
    (orphan,) = envoys(own)
    own.processes[1].kill()
    own.processes[1].wait()
    assert orphan.is_running()
    own.processes[1] = own.run("express", own.environ)
    assert orphan.pid not in [each.pid for each in envoys(own)]
    assert len(envoys(own)) == 1


def test_at_its_end_calls_in_progress_are_answered_and_new_ones_go_to_the_multiplexer(own: Relay) -> None:
    """The kernel resets a connection that Envoy had not accepted when it closed its socket: clients connect again."""
    admitted(own, lambda: own.unary(message(b"x")))
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(own.unary, message({"sleep": 0.8}))
        eventually(lambda: any(b"sleep" in request for call in own.alpha.calls for request in call.requests), 5)
        own.processes[1].send_signal(signal.SIGTERM)
        with channel(own) as way:
            ask = way.unary_unary(f"/{SERVICE}/Embed")
            asked = [ask(message(b"new"), timeout=5, wait_for_ready=True) for _ in range(50)]
            assert asked == [reply_to(b"new")] * 50
        assert slow.result() == reply_to(b'{"sleep": 0.8}')
    assert own.processes[1].wait(10) == 0


def kill_multiplexer(relay: Relay) -> None:
    relay.processes[0].kill()
    relay.processes[0].wait()


def test_what_is_no_call_ends_at_once(relay: Relay) -> None:
    """The multiplexer resets it, and no other one would take it."""
    with httpx2.Client(http1=False, http2=True, timeout=5) as client:
        assert client.get(f"http://127.0.0.1:{relay.port}/{SERVICE}/Embed").status_code == 503


def test_a_multiplexer_that_is_started_again_is_waited_for(own: Relay) -> None:
    kill_multiplexer(own)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(own.unary, message(), "Info", timeout=20)
        time.sleep(0.3)
        own.processes[0] = own.run("multiplexer", own.environ)
        assert waiting.result() == reply_to(b"")


@pytest.mark.parametrize("own", [30.0], indirect=True, ids=["late"])
def test_what_a_killed_multiplexer_had_goes_to_the_next(own: Relay) -> None:
    """Single calls that Envoy did not admit: of callers whom it does not know, and to instances without the lane."""
    with ThreadPoolExecutor(8) as threads:
        order = {"sleep": 0.5}
        unknown = [("x-api-key", "not seen before")]
        waiting = [threads.submit(own.unary, message(order), timeout=20, metadata=unknown) for _ in range(8)]
        eventually(lambda: sum(b"sleep" in raw for call in own.alpha.calls for raw in call.requests) == 8, 5)
        kill_multiplexer(own)
        own.processes[0] = own.run("multiplexer", own.environ)
        assert [each.result() for each in waiting] == [reply_to(b'{"sleep": 0.5}')] * 8
