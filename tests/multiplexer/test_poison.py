"""Texts that kill or hang replicas, and replicas that die by themselves, behind a real multiplexer process: only the
guilty row fails, every other row is answered correctly and in order.

The replicas are small gRPC servers in processes of their own, which die when a text says so; the test restarts them.
"""

import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from appliance.core.instance import InstanceSpec
from appliance.core.program import MARKER, marker
from appliance.core.state import Instance, State
from appliance.drivers.statefile import StateFile
from appliance.node.context import node_id
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub
from testing.arrows import dense_request, rows, vectors
from testing.running import eventually, free_ports

pytestmark = pytest.mark.processes

STALL_SECS = 1  # grpc_request_timeout_secs where a text hangs
PATIENCE_SECS = 15  # and elsewhere: calls wait so long for a replica that starts again, on a loaded machine, too
NULL = (("x-arrow-on-error", "null"),)
REPLICA = """
import math, os, sys, time
from concurrent.futures import ThreadPoolExecutor
import grpc
from appliance.wire.tei.v1 import tei_pb2 as tei

def answer(raw, context):
    text = tei.EmbedRequest.FromString(raw).inputs
    if "late poison" in text:
        time.sleep(0.3)
    if "poison" in text:
        os._exit(9)
    if "nan" in text and (" on " not in text or sys.argv[1] in text):
        return tei.EmbedResponse(embeddings=[1, math.nan]).SerializeToString()
    if "wide" in text and (" on " not in text or sys.argv[1] in text):
        return tei.EmbedResponse(embeddings=[1, 2, 3]).SerializeToString()
    if "zero" in text:
        return tei.EmbedResponse(embeddings=[0, 0]).SerializeToString()
    if "hang" in text:
        while context.is_active():
            time.sleep(0.05)
    if "bad" in text:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "bad text")
    time.sleep(0.4 if "slow" in text else float(os.environ["PACE"]))
    return tei.EmbedResponse(embeddings=[len(text), sum(text.encode()) % 4099]).SerializeToString()

def rerank(raw, context):
    context.send_initial_metadata((("x-compute-time", "1"),))
    request = tei.RerankRequest.FromString(raw)
    ranks = [tei.Rank(index=at, text=text, score=len(text)) for at, text in enumerate(request.texts)]
    return tei.RerankResponse(ranks=ranks).SerializeToString()

def die(raw, context):
    os._exit(6)

def stream(raws, context):
    for raw in raws:
        if "silent" in tei.EmbedRequest.FromString(raw).inputs:
            return
        yield answer(raw, context)
        if "endless" in tei.EmbedRequest.FromString(raw).inputs:
            while context.is_active():
                time.sleep(0.05)

class Replica(grpc.GenericRpcHandler):
    def service(self, details):
        if details.method.startswith("/tei_appliance."):
            return None
        if details.method.endswith("/EmbedAll"):
            return grpc.unary_unary_rpc_method_handler(die)
        if details.method.endswith("/Rerank"):
            return grpc.unary_unary_rpc_method_handler(rerank)
        if details.method.endswith("/EmbedStream"):
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(answer)

server = grpc.server(ThreadPoolExecutor(32), handlers=[Replica()], options=[("grpc.so_reuseport", 0)])
server.add_insecure_port("127.0.0.1:" + sys.argv[1])
server.start()
server.wait_for_termination()
"""


request_of = partial(dense_request, normalize=False)


def right(text: str) -> list[float]:
    return [len(text), sum(text.encode()) % 4099]


class Replicas:
    """Processes by port, started again when they die. markers: of each port, whose replica it is."""

    def __init__(self, markers: dict[int, str]) -> None:
        self.markers = markers
        self.deaths = 1  # nothing is connected yet
        self.environ = {**os.environ, "PACE": "0.001"}
        self.running = {port: self.started(port) for port in markers}
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.keep, daemon=True)
        self.thread.start()

    def started(self, port: int) -> subprocess.Popen[bytes]:
        environ = {**self.environ, MARKER: self.markers[port]}
        return subprocess.Popen([sys.executable, "-c", REPLICA, str(port)], env=environ)

    def keep(self) -> None:
        while not self.over.wait(0.02):
            for port, process in self.running.items():
                if process.poll() is not None:
                    self.deaths += 1
                    self.running[port] = self.started(port)

    def kill(self, *ports: int) -> None:
        for port in ports:
            self.running[port].kill()

    def close(self) -> None:
        self.over.set()
        self.thread.join()
        for process in self.running.values():
            process.kill()
            process.wait()


class Box:
    """A multiplexer process; `pair` has two replicas, `lone` has one with room for few texts."""

    def __init__(self, folder: Path, workers: int = 1, timeout_secs: int = PATIENCE_SECS) -> None:
        self.port, *ports = free_ports(4)
        self.pair, self.lone = ports[:2], ports[2:]
        node = node_id(str(folder))
        markers = {port: marker(node, "pair", index, 1) for index, port in enumerate(self.pair)}
        self.replicas = Replicas({**markers, self.lone[0]: marker(node, "lone", 0, 1)})
        config = folder / "appliance.toml"
        config.write_text(
            f"data_dir = '{folder}'\ngrpc_port = {self.port}\ngrpc_request_timeout_secs = {timeout_secs}\n"
            f"multiplexer_workers = {workers}\ngraceful_shutdown_timeout_secs = 1\n[queue]\nmax_wait_ms = 10000\n"
        )
        state = StateFile(folder / "state.toml", now=str, on_repair=print)
        made = {"pair": self.instance("pair", self.pair), "lone": self.instance("lone", self.lone)}
        state.update(lambda before: State(before.generation, instances=made))
        self.output = folder / "multiplexer.log"
        with self.output.open("wb") as output:
            environ = {**os.environ, "TEI_MANAGER_CONFIG": str(config)}
            command = [sys.executable, "-m", "appliance.multiplexer"]
            self.process = subprocess.Popen(command, env=environ, stdout=output, stderr=output)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        grpc.channel_ready_future(self.channel).result(timeout=20)
        self.stub: Any = TeiMultiplexerStub(self.channel)

    def instance(self, name: str, ports: list[int]) -> Instance:
        few = {"max_concurrent_requests": 32} if name == "lone" else {}
        spec = InstanceSpec.parse({"name": name, "model_id": f"org/{name}", "replicas": len(ports), **few})
        metrics = tuple(port + 1000 for port in ports)
        return Instance(spec, tuple(ports), metrics, created_at="2026-01-01T00:00:00Z", wanted="running", launch=1)

    def settle(self) -> None:
        """Until every replica listens again and is connected."""

        for port in (*self.pair, *self.lone):
            eventually(lambda port=port: socket.create_connection(("127.0.0.1", port)).close() is None, 20, every=0.02)
        for name in ("pair", "lone"):
            eventually(lambda name=name: self.stub.EmbedArrow(request_of(name, ["x"]), timeout=5), 10)
        if self.replicas.deaths:
            time.sleep(0.6)  # a replica takes traffic at most so much later than its port opens
        self.replicas.deaths = 0

    def close(self) -> None:
        self.channel.close()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=20)
        self.replicas.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    node = Box(tmp_path_factory.mktemp("poison"))
    yield node
    node.close()


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Box]:
    """One that soon gives up a replica that owes an answer."""
    node = Box(tmp_path, timeout_secs=STALL_SECS)
    node.settle()
    yield node
    node.close()


@pytest.fixture
def node(running: Box) -> Box:
    running.settle()
    return running


def texts(count: int, seed: int = 3) -> list[str | None]:
    choice = random.Random(seed)
    return [f"{number} " + "w" * choice.randint(1, 200) for number in range(count)]


def check(found: list[np.ndarray | None], asked: list[str | None], missing: set[int]) -> None:
    assert {at for at, row in enumerate(found) if row is None} == missing
    for at, (row, text) in enumerate(zip(found, asked, strict=True)):
        if at not in missing and text is not None:
            assert row is not None
            assert row.tolist() == right(text), f"row {at}"


def check_errors(reply: Any, failed: set[int]) -> list[str | None]:
    errors: list[str | None] = rows(reply).column("error").to_pylist()
    assert {at for at, error in enumerate(errors) if error} == failed, {at: e for at, e in enumerate(errors) if e}
    return errors


@pytest.mark.parametrize("case", range(2))
def test_one_text_that_kills_replicas_costs_only_its_own_row(node: Box, case: int) -> None:
    asked = texts(300, seed=case)
    at = [150, 7][case]
    asked[at] = "poison " + "w" * [60, 190][case]
    reply = node.stub.EmbedArrow(request_of("pair", asked), timeout=30, metadata=NULL)
    check_errors(reply, {at})
    check(vectors(reply), asked, {at})
    eventually(lambda: node.replicas.deaths > 0, 5)
    assert node.replicas.deaths <= 3


def test_without_null_rows_the_call_fails_with_the_number_of_the_row_that_kills(node: Box) -> None:
    asked = texts(300)
    asked[150] = "poison " + "w" * 60
    with pytest.raises(grpc.RpcError) as caught:
        node.stub.EmbedArrow(request_of("pair", asked), timeout=30)
    assert caught.value.details().startswith("Row 150:"), caught.value.details()
    assert dict(caught.value.trailing_metadata())["x-arrow-error-row"] == "150"
    time.sleep(0.3)
    assert node.replicas.deaths <= 3


def test_a_text_that_hangs_costs_only_its_own_row(hasty: Box) -> None:
    asked = texts(300)
    asked[150] = "hang " + "w" * 60
    began = time.monotonic()
    reply = hasty.stub.EmbedArrow(request_of("pair", asked), timeout=30, metadata=NULL)
    assert time.monotonic() - began < 2 * STALL_SECS + 3
    errors = check_errors(reply, {150})
    assert str(errors[150]).startswith("DEADLINE_EXCEEDED")
    check(vectors(reply), asked, {150})
    with pytest.raises(grpc.RpcError) as caught:
        hasty.stub.EmbedArrow(request_of("pair", asked), timeout=30)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert caught.value.details().startswith("Row 150:"), caught.value.details()


def test_a_stream_ends_whose_replica_does_not_end_its_answers(hasty: Box) -> None:
    """It waited until the monitor ended the replica."""
    replies = streamed(hasty, ["good", "endless"])
    assert [next(replies), next(replies)] == [right("good"), right("endless")]
    code, words = refusal(lambda: next(replies))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert f"No answer for {STALL_SECS} s from the replica" in words


def test_a_bad_text_keeps_its_own_code_beside_one_that_kills(node: Box) -> None:
    """What is left of a slice after a death is sent row by row; a refusal there is still the row's own."""
    asked = texts(40)
    asked[20] = "poison " + "w" * 60
    for at in (19, 21, 35):
        asked[at] = f"bad {at} " + "w" * 59
    reply = node.stub.EmbedArrow(request_of("pair", asked), timeout=30, metadata=NULL)
    errors = check_errors(reply, {19, 20, 21, 35})
    assert {errors[at] for at in (19, 21, 35)} == {"INVALID_ARGUMENT: bad text"}
    check(vectors(reply), asked, {19, 20, 21, 35})


def test_a_bad_text_before_large_ones_keeps_its_own_code(node: Box) -> None:
    """The replica refuses while the rest of the slice is still on its way."""
    asked: list[str | None] = [f"{number} " + "w" * 100_000 for number in range(40)]
    asked[3] = "bad " + "w" * 100_500
    reply = node.stub.EmbedArrow(request_of("lone", asked), timeout=30, metadata=NULL)
    assert check_errors(reply, {3})[3] == "INVALID_ARGUMENT: bad text"
    assert node.replicas.deaths == 0


def test_another_callers_batch_loses_no_row_to_a_text_that_kills(node: Box) -> None:
    asked = texts(1200, seed=5)
    poisoned = texts(40)
    poisoned[20] = "poison"
    results: list[Any] = []
    innocent = node.stub.EmbedArrow.future(request_of("pair", asked), timeout=40, metadata=NULL)
    time.sleep(0.2)
    results.append(node.stub.EmbedArrow(request_of("pair", poisoned), timeout=30, metadata=NULL))
    check_errors(results[0], {20})
    reply = innocent.result()
    check_errors(reply, set())
    check(vectors(reply), asked, set())


@pytest.mark.parametrize("which", ["one", "both"])
def test_replicas_killed_from_outside_cost_no_row(node: Box, which: str) -> None:
    asked = texts(1200, seed=6)
    call = node.stub.EmbedArrow.future(request_of("pair", asked), timeout=40)
    time.sleep(0.3)
    node.replicas.kill(*(node.pair if which == "both" else node.pair[:1]))
    check(vectors(call.result()), asked, set())


def test_the_only_replica_may_die_and_come_back_in_the_middle_of_a_batch(node: Box) -> None:
    asked = texts(800, seed=7)
    call = node.stub.EmbedArrow.future(request_of("lone", asked), timeout=40)
    time.sleep(0.2)
    node.replicas.kill(*node.lone)
    check(vectors(call.result()), asked, set())


def test_a_row_that_is_there_when_two_replicas_die_by_themselves_is_not_blamed(node: Box) -> None:
    asked: list[str | None] = [f"slow {number}" for number in range(6)]
    call = node.stub.EmbedArrow.future(request_of("lone", asked), timeout=40)
    for _ in range(2):
        eventually(lambda: socket.create_connection(("127.0.0.1", node.lone[0])).close() is None, 20, every=0.02)
        time.sleep(1.0)  # connected, and in the middle of a row
        node.replicas.kill(*node.lone)
        time.sleep(0.1)
    check(vectors(call.result()), asked, set())


def test_a_short_batch_does_not_wait_for_the_end_of_a_long_one(node: Box) -> None:
    """Slices of two calls take turns in the queue of a small instance."""
    long_call = node.stub.EmbedArrow.future(request_of("lone", texts(1200, seed=8)), timeout=40)
    time.sleep(0.3)
    began = time.monotonic()
    node.stub.EmbedArrow(request_of("lone", texts(20, seed=9)), timeout=40)
    short = time.monotonic() - began
    assert not long_call.done(), f"the short call came back after {short:.2f} s, behind the long one"
    long_call.result()


def test_single_texts_do_not_wait_for_a_whole_slice(node: Box) -> None:
    long_call = node.stub.EmbedArrow.future(request_of("lone", texts(1200, seed=8)), timeout=40)
    time.sleep(0.3)
    took: list[float] = []
    while not long_call.done() and len(took) < 30:
        request = mux.EmbedRequest(
            target=mux.Target(instance_name="lone"), request=tei.EmbedRequest(inputs=f"single {len(took)}")
        )
        began = time.monotonic()
        node.stub.Embed(request, timeout=10)
        took.append(time.monotonic() - began)
    long_call.result()
    took.sort()
    print(f"{len(took)} singles beside a batch: median {took[len(took) // 2]:.3f} s, worst {took[-1]:.3f} s")
    assert took[len(took) // 2] < 0.05


def test_a_long_rerank_stream_comes_back_from_a_replica_that_sends_metadata_first(node: Box) -> None:
    """As TEI does; more texts than one Rerank call takes."""

    def messages() -> Iterator[mux.RerankStreamRequest]:
        for number in range(50):
            inner = tei.RerankStreamRequest(query="q", text="t" * (number + 1), return_text=True)
            yield mux.RerankStreamRequest(target=mux.Target(instance_name="pair"), request=inner)

    reply = node.stub.RerankStream(messages(), timeout=10)
    assert [rank.index for rank in reply.ranks] == list(range(49, -1, -1))


# -- single calls and plain streams ----------------------------------------------------------------------------------


def single(node: Box, text: str, name: str = "pair", timeout: float = 20, **options: Any) -> list[float]:
    request = tei.EmbedRequest(**{"inputs": text, "truncate": True, "normalize": False, **options})
    asked = mux.EmbedRequest(target=mux.Target(instance_name=name), request=request)
    return list(node.stub.Embed(asked, timeout=timeout).embeddings)


def refusal(call: Any) -> tuple[Any, str]:
    return refused(call)[:2]


def refused(call: Any) -> tuple[Any, str, str | None]:
    """The status, its words, and the multiplexer's own code."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error = caught.value
    return error.code(), error.details(), dict(error.trailing_metadata()).get("x-tei-code")


def streamed(node: Box, texts: list[str]) -> Iterator[list[float]]:
    target = mux.Target(instance_name="pair")
    requests = [
        mux.EmbedRequest(target=target, request=tei.EmbedRequest(inputs=text, truncate=True, normalize=False))
        for text in texts
    ]
    return (list(reply.embeddings) for reply in node.stub.EmbedStream(iter(requests), timeout=30))


def test_calls_that_kill_cost_no_call_of_others(node: Box) -> None:
    """Two replicas, four callers, and every 1.5 s one more text that ends its replica."""
    over = threading.Event()
    wrong: list[Any] = []
    done: list[Any] = []

    def call(number: int) -> None:
        while not over.is_set():
            text = f"{number} innocent {len(done)}"
            try:
                assert single(node, text) == right(text)
                done.append(text)
            except (grpc.RpcError, AssertionError) as error:
                wrong.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        for number in range(3):
            code, words = refusal(lambda number=number: single(node, f"poison {number}"))
            assert code is grpc.StatusCode.INTERNAL, words
            assert 'ended 2 processes of "pair"' in words
            time.sleep(1.5)  # not for a condition: this is how often they come
    finally:
        over.set()
        for thread in threads:
            thread.join()
    print(f"{len(done)} innocent calls, {len(wrong)} failed, {node.replicas.deaths} deaths")
    assert len(done) > 100
    assert not wrong
    assert node.replicas.deaths <= 6  # two each


def test_a_convicted_text_reaches_no_replica_again(node: Box) -> None:
    assert refusal(lambda: single(node, "poison once"))[0] is grpc.StatusCode.INTERNAL
    node.settle()
    again = refusal(lambda: single(node, "poison once"))
    assert again[0] is grpc.StatusCode.INTERNAL
    assert "is refused for 10 minutes" in again[1]
    assert refusal(lambda: list(streamed(node, ["good", "poison once"])))[0] is grpc.StatusCode.INTERNAL
    found = node.stub.EmbedArrow(request_of("pair", ["good", "poison once"]), metadata=NULL, timeout=20)
    assert [row is None for row in vectors(found)] == [False, True]
    assert node.replicas.deaths == 0


def test_a_stream_ends_with_the_message_that_kills_and_has_answered_all_before_it(node: Box) -> None:
    texts = [*(f"before {number}" for number in range(5)), "slow poison in a stream", "after"]
    found: list[list[float]] = []
    code, words = refusal(lambda: found.extend(streamed(node, texts)))
    assert code is grpc.StatusCode.INTERNAL
    assert 'ended 2 processes of "pair"' in words
    eventually(lambda: node.replicas.deaths == 2, 5)
    node.settle()
    assert list(streamed(node, texts[:5])) == [right(text) for text in texts[:5]]


def test_a_method_that_only_kills_is_given_up(node: Box) -> None:
    def all_of(text: str) -> Any:
        request = mux.EmbedAllRequest(target=mux.Target(instance_name="pair"), request=tei.EmbedAllRequest(inputs=text))
        return refusal(lambda: node.stub.EmbedAll(request, timeout=20))

    for number in range(2):
        assert all_of(f"text {number}")[0] is grpc.StatusCode.INTERNAL
        node.settle()
    code, words = all_of("another text")
    assert code is grpc.StatusCode.INTERNAL
    assert words.startswith('EmbedAll ends the replicas of "pair"')
    assert node.replicas.deaths == 0
    assert single(node, "good") == right("good")


def test_with_one_replica_a_call_is_tried_alone_when_it_comes_again(node: Box) -> None:
    assert refusal(lambda: single(node, "poison alone", "lone"))[0] is grpc.StatusCode.UNAVAILABLE
    node.settle()
    assert refusal(lambda: single(node, "poison alone", "lone"))[0] is grpc.StatusCode.INTERNAL
    node.settle()
    assert "is refused" in refusal(lambda: single(node, "poison alone", "lone"))[1]
    assert single(node, "good", "lone") == right("good")


def test_a_call_that_kills_after_its_caller_has_given_up_is_convicted_all_the_same(node: Box) -> None:
    codes = []
    for _ in range(3):
        node.settle()
        codes.append(refusal(lambda: single(node, "late poison", timeout=0.25))[0])
        time.sleep(0.5)  # not for a condition: so long it computes, and dies
    assert codes == [*[grpc.StatusCode.DEADLINE_EXCEEDED] * 2, grpc.StatusCode.INTERNAL]


def test_where_several_processes_send_calls_one_more_death_convicts(tmp_path: Path) -> None:
    """What another process has in work at a replica is not known: its call may have been the cause."""
    node = Box(tmp_path, workers=2)
    try:
        node.settle()
        code, words = refusal(lambda: single(node, "poison", timeout=30))
        assert code is grpc.StatusCode.INTERNAL
        assert 'ended 3 processes of "pair"' in words
    finally:
        node.close()


def test_streams_that_never_pause_leave_room_for_what_is_tried_alone(node: Box) -> None:
    over = threading.Event()
    target = mux.Target(instance_name="pair")

    def messages(number: int) -> Iterator[mux.EmbedRequest]:
        for at in itertools.count():
            if over.wait(0.003):
                return
            yield mux.EmbedRequest(target=target, request=tei.EmbedRequest(inputs=f"{number} {at}", normalize=False))

    def run(number: int) -> int:
        return sum(1 for _ in node.stub.EmbedStream(messages(number), timeout=60))

    with ThreadPoolExecutor(16) as threads:
        streams = [threads.submit(run, number) for number in range(3)]
        try:
            calls = [threads.submit(single, node, f"slow {number}", timeout=40) for number in range(4)]
            time.sleep(0.2)  # they are in work
            node.replicas.kill(node.pair[0])
            assert [call.result(timeout=40) for call in calls] == [right(f"slow {number}") for number in range(4)]
        finally:
            over.set()
        assert all(stream.result(timeout=20) for stream in streams)


def test_who_does_not_read_his_stream_keeps_no_replica_from_others(node: Box) -> None:
    """Messages of a stream that were in work at a death are tried one at a time, as fast as the caller reads."""
    target = mux.Target(instance_name="pair")
    requests = [
        mux.EmbedRequest(target=target, request=tei.EmbedRequest(inputs=f"slow stream {number}", normalize=False))
        for number in range(20)
    ]
    replies = node.stub.EmbedStream(iter(requests), timeout=60)
    next(replies)
    node.replicas.kill(*node.pair)
    time.sleep(3)  # nobody reads
    began = time.monotonic()
    assert single(node, "good", timeout=15) == right("good")
    print(f"a single call beside it took {time.monotonic() - began:.1f} s")
    replies.cancel()


# -- answers that cannot be right ------------------------------------------------------------------------------------


def test_what_cannot_be_right_is_asked_of_another_replica_and_never_given_out(node: Box) -> None:
    assert [single(node, "good") for _ in range(4)] == [right("good")] * 4
    for port, what in itertools.product(node.pair, ("nan", "wide")):  # one of the two is wrong
        text = f"{what} on {port}"
        assert [single(node, text) for _ in range(4)] == [right(text)] * 4
        assert list(streamed(node, [text, "good"])) == [right(text), right("good")]
    assert "its vector has 3 numbers, and others had 2" in refusal(lambda: single(node, "wide"))[1]
    for call in (lambda: single(node, "nan"), lambda: list(streamed(node, ["nan"]))):
        code, words, own_code = refused(call)
        assert (code, own_code) == (grpc.StatusCode.INTERNAL, "WRONG_ANSWER")
        assert "cannot be right: number 1 of its vector is nan" in words
    found = node.stub.EmbedArrow(request_of("pair", ["nan", "good"]), metadata=NULL, timeout=20)
    assert [row is None for row in vectors(found)] == [True, False]
    assert "number 1 of its vector is nan" in rows(found).column("error").to_pylist()[0]


def test_a_vector_without_length_is_refused_where_a_normalised_one_was_asked_for(node: Box) -> None:
    assert single(node, "zero") == [0, 0]
    code, words = refusal(lambda: single(node, "zero", normalize=True))
    assert code is grpc.StatusCode.INTERNAL
    assert "has the length 0" in words


def test_a_success_that_leaves_messages_unanswered_is_a_failure(node: Box) -> None:
    code, words = refusal(lambda: list(streamed(node, ["good", "silent", "good"])))
    assert code is grpc.StatusCode.INTERNAL
    assert "unanswered" in words


def test_a_slice_of_vectors_that_are_all_of_another_width_is_computed_by_the_sibling(node: Box) -> None:
    """Among themselves they agree: only what the replicas gave before tells that they are wrong."""
    assert single(node, "first") == right("first")
    for port in node.pair:
        asked = [f"wide on {port} {number}" for number in range(4)]
        for _ in range(3):
            reply = node.stub.EmbedArrow(request_of("pair", asked), timeout=20)
            assert [None if row is None else row.tolist() for row in vectors(reply)] == [right(text) for text in asked]
