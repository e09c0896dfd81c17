"""One address in front of two appliances: real nginx and Envoy with what `appliance export` wrote for them."""

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from operator import sub
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
import requests

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import (
    TeiMultiplexerServicer,
    TeiMultiplexerStub,
    add_TeiMultiplexerServicer_to_server,
)
from testing.arrows import dense_request, vectors
from testing.background import Background
from testing.fake_gateway import FakeGateway
from testing.fronts import RunningFront
from testing.running import RunningAppliance, eventually, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(600)]
KINDS = ("nginx", "envoy")
NAME = "same"
TARGET = mux.Target(instance_name=NAME)
PATIENCE = 60.0  # seconds of a call


class Boxes(NamedTuple):
    one: RunningAppliance
    two: RunningAppliance

    @property
    def named(self) -> list[str]:
        return [f"127.0.0.1:{each.grpc_port}:{each.http_port}" for each in self]


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boxes]:
    settings = "multiplexer_workers = 1"
    with (
        RunningAppliance(tmp_path_factory.mktemp("one"), seeds="", settings=settings) as one,
        RunningAppliance(tmp_path_factory.mktemp("two"), seeds="", settings=settings) as two,
    ):
        for box in (one, two):
            box.create(NAME)
        for box in (one, two):
            box.wait_ready(NAME)
        yield Boxes(one, two)


@pytest.fixture(scope="module", params=KINDS)
def front(boxes: Boxes, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with RunningFront(request.param, tmp_path_factory.mktemp("front") / request.param, *boxes.named) as running:
        eventually(lambda: embed(stub_of(running), "begin") is not None, 120)
        yield running


def stub_of(front: RunningFront) -> Any:
    return TeiMultiplexerStub(grpc.insecure_channel(f"127.0.0.1:{front.grpc_port}"))


def embed(stub: Any, text: str) -> np.ndarray:
    inner = tei.EmbedRequest(inputs=text, truncate=True, normalize=True)
    reply = stub.Embed(mux.EmbedRequest(target=TARGET, request=inner), timeout=PATIENCE)
    return np.array(reply.embeddings, np.float32)


def http(front: RunningFront, text: str) -> np.ndarray:
    body = {"model": NAME, "input": text}
    url = f"http://127.0.0.1:{front.http_port}/v1/embeddings"
    reply = requests.post(url, json=body, timeout=PATIENCE)
    assert reply.status_code == 200, reply.text
    return np.array(reply.json()["data"][0]["embedding"], np.float32)


def arrow(stub: Any, text: str) -> np.ndarray:
    return np.array(vectors(stub.EmbedArrow(dense_request(NAME, [text, text]), timeout=PATIENCE)))[1]


def stream(stub: Any, text: str) -> np.ndarray:
    """A conversation: the second text is sent when the first was answered."""
    answered = threading.Event()

    def requests() -> Iterator[mux.EmbedRequest]:
        for _ in range(2):
            yield mux.EmbedRequest(target=TARGET, request=tei.EmbedRequest(inputs=text, truncate=True, normalize=True))
            assert answered.wait(PATIENCE)

    replies = []
    for reply in stub.EmbedStream(requests(), timeout=PATIENCE):
        replies.append(np.array(reply.embeddings, np.float32))
        answered.set()
    assert len(replies) == 2
    return replies[1]


def ways(front: RunningFront) -> dict[str, Callable[[str], np.ndarray]]:
    stub = stub_of(front)
    return {
        "unary": lambda text: embed(stub, text),
        "stream": lambda text: stream(stub, text),
        "arrow": lambda text: arrow(stub, text),
        "http": lambda text: http(front, text),
    }


def test_each_way_goes_through_it_and_reaches_both(boxes: Boxes, front: RunningFront) -> None:
    for number, (way, ask) in enumerate(ways(front).items()):
        expected = embed(boxes.one.stub(), f"text {number}")
        for _ in range(4):
            np.testing.assert_allclose(ask(f"text {number}"), expected, atol=1e-4, err_msg=way)
    eventually(lambda: (http(front, "more"), all(all(served(box)) for box in boxes))[1])


class Served(NamedTuple):
    """What an appliance has answered: single calls of its multiplexer, requests of its gateway."""

    calls: float
    requests: float


def served(box: RunningAppliance) -> Served:
    lines = box.get("/metrics").text.splitlines()

    def total(family: str, label: str) -> float:
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(family) and label in line)

    calls = total("tei_manager_grpc_requests_total", 'method="Embed"')
    return Served(calls, total("tei_manager_http_requests_total", 'route="/v1/embeddings"'))


def test_what_an_appliance_refuses_arrives_as_it_is(front: RunningFront) -> None:
    nobody = mux.EmbedRequest(target=mux.Target(instance_name="nobody"), request=tei.EmbedRequest(inputs="x"))
    with pytest.raises(grpc.RpcError) as refused:
        stub_of(front).Embed(nobody, timeout=PATIENCE)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert NAME in str(refused.value.details())
    url = f"http://127.0.0.1:{front.http_port}/v1/embeddings"
    told = requests.post(url, json={"model": "nobody", "input": "x"}, timeout=PATIENCE)
    assert (told.status_code, told.json()["error"]["code"]) == (404, "model_not_found")


def test_a_batch_of_many_megabytes_goes_through(front: RunningFront) -> None:
    """nginx takes 1 MB by itself."""
    texts = [f"{number} {'x' * 2100}" for number in range(2000)]  # so long a word is one token
    request = dense_request(NAME, texts)
    assert len(request.arrow_ipc) > 4_000_000
    assert len(vectors(stub_of(front).EmbedArrow(request, timeout=PATIENCE * 4))) == len(texts)


class Failure(NamedTuple):
    """code: of gRPC, or None."""

    way: str
    code: grpc.StatusCode | None
    words: str


class Callers(Background):
    """One thread for each way."""

    def __init__(self, front: RunningFront) -> None:
        super().__init__()
        self.answered: Counter[str] = Counter()
        self.failed: list[Failure] = []
        self.threads = [threading.Thread(target=self.ask, args=each) for each in ways(front).items()]

    def ask(self, way: str, call: Callable[[str], np.ndarray]) -> None:
        while self.paused():
            try:
                call(f"{way} {self.answered[way]}")
                self.answered[way] += 1
            except (grpc.RpcError, requests.RequestException, AssertionError) as error:
                code = error.code() if isinstance(error, grpc.RpcError) else None
                self.failed.append(Failure(way, code, str(error)))


def test_an_appliance_that_dies_costs_only_what_it_was_answering(boxes: Boxes, front: RunningFront) -> None:
    """Envoy keeps a call until an answer begins, and makes it again elsewhere. nginx passes a call of gRPC on as it
    comes, and cannot repeat it; it says UNAVAILABLE. An answer that has begun ends with its appliance, in both."""
    with Callers(front) as callers:
        eventually(lambda: len(callers.answered) == 4)
        for box in boxes:
            before = callers.answered.copy()
            for number in (signal.SIGSTOP, signal.SIGKILL):  # first they hang for a moment
                for name in ("multiplexer", "gateway"):
                    for process in box.processes_of(name):
                        process.send_signal(number)
                time.sleep(0.2)
            eventually(lambda before=before: all(callers.answered[way] > before[way] for way in before), 120)
            dead = served(box)
            eventually(lambda box=box, dead=dead: min(map(sub, served(box), dead)) > 3, 120)  # it is used again
    half_answered = (grpc.StatusCode.INTERNAL, None)  # its stream, or its connection of HTTP, was reset
    for failure in callers.failed:
        repeated = failure.way == "http" or front.kind == "envoy"
        assert failure.code in half_answered or (failure.code is grpc.StatusCode.UNAVAILABLE and not repeated), failure
        assert "503" not in failure.words
    assert len(callers.failed) <= 4 * 2 * 2, "what each way had under way at the death of each program"


class OneText(TeiMultiplexerServicer):
    def Embed(self, request: mux.EmbedRequest, context: grpc.ServicerContext) -> tei.EmbedResponse:
        return tei.EmbedResponse(embeddings=[1.0])


@contextmanager
def appliance_at(grpc_port: int, http_port: int) -> Iterator[None]:
    """What a front sees of an appliance, and that comes and goes when a test says so."""
    gateway = FakeGateway(http_port)
    with ThreadPoolExecutor(4) as threads:
        multiplexer = grpc.server(threads)
        add_TeiMultiplexerServicer_to_server(OneText(), multiplexer)
        assert multiplexer.add_insecure_port(f"127.0.0.1:{grpc_port}") == grpc_port
        multiplexer.start()
        try:
            yield
        finally:
            multiplexer.stop(None).wait()
            gateway.close()


@pytest.mark.parametrize("kind", KINDS)
def test_whom_it_holds_for_away_it_asks_when_all_others_are_gone(kind: str, tmp_path: Path) -> None:
    """An appliance has come back, the front does not know it yet, and the only other one dies."""
    one, two = free_ports(2), free_ports(2)
    with RunningFront(kind, tmp_path / kind, *(f"127.0.0.1:{grpc}:{http}" for grpc, http in (one, two))) as front:

        def both_ways() -> bool:
            body = {"model": "minilm", "input": "x"}
            told = requests.post(f"http://127.0.0.1:{front.http_port}/v1/embeddings", json=body, timeout=PATIENCE)
            assert told.status_code == 200, told.text
            return len(embed(stub, "x")) == 1

        stub = stub_of(front)
        with ExitStack() as first:
            with appliance_at(*two):
                eventually(both_ways)
                assert all(both_ways() for _ in range(8)), "the first is away, and costs nobody a call"
                first.enter_context(appliance_at(*one))
            assert all(both_ways() for _ in range(8))


@pytest.mark.parametrize("kind", KINDS)
def test_with_nobody_behind_it_a_call_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    with RunningFront(kind, tmp_path / kind, "127.0.0.1:1:1", "127.0.0.1:2:2") as alone:
        with pytest.raises(grpc.RpcError) as refused:
            embed(stub_of(alone), "x")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "No appliance behind this address takes the call" in str(refused.value.details())
        url = f"http://127.0.0.1:{alone.http_port}/v1/embeddings"
        told = requests.post(url, json={"model": NAME, "input": "x"}, timeout=PATIENCE)
        assert (told.status_code, told.json()["error"]["code"]) == (503, "unavailable")


class Refusing(grpc.GenericRpcHandler):
    """It refuses every call, at length."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
            context.abort(grpc.StatusCode.NOT_FOUND, "long " * 1200)
            raise AssertionError  # not reached

        return grpc.unary_unary_rpc_method_handler(refuse)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_refusal_is_an_answer_and_no_sign_of_death(kind: str, tmp_path: Path) -> None:
    """nginx takes headers of more than 4 kB for no answer by itself, and who gives them for dead."""
    server = grpc.server(ThreadPoolExecutor(4), handlers=[Refusing()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with RunningFront(kind, tmp_path / kind, f"127.0.0.1:{port}:1") as front:
            stub = stub_of(front)
            eventually(lambda: refused_by(stub)[0] is grpc.StatusCode.NOT_FOUND)
            for _ in range(5):
                assert refused_by(stub) == (grpc.StatusCode.NOT_FOUND, "long " * 1200)
    finally:
        server.stop(0)


def refused_by(stub: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as refused:
        embed(stub, "x")
    return refused.value.code(), str(refused.value.details())
