"""A server with authentication asks who calls before it reads what they send, whatever the shape of the method."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import pytest

from appliance.core.problems import Kind, Problem
from appliance.drivers.grpccalls import ADMITTED_SECS, AuthenticationInterceptor, refuse
from appliance.drivers.grpcserver import Server
from appliance.engine.service import Service
from appliance.wire.envelope import EXPRESS_ADMITTED, EXPRESS_KEY, FINAL
from appliance.wire.tei.v1 import tei_pb2 as tei
from testing.half_sender import HalfSender
from testing.running import eventually, free_ports

LIMIT = 40 * 1024 * 1024
UNASKED = 4 * 1024 * 1024  # what the flow control lets a caller send that nobody reads: 64 KiB to 1 MiB were seen


REVOKED: set[str] = set()


def authenticate(method: str, context: grpc.ServicerContext) -> None:
    sent = [value for key, value in context.invocation_metadata() if key == "authorization"]
    if not sent or REVOKED.intersection(sent):
        raise Problem(Kind.UNAUTHENTICATED, "UNAUTHENTICATED", "Send a key")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = Server(64, LIMIT, False, [AuthenticationInterceptor(authenticate, LIMIT, timeout_secs=1)])
    handlers = {
        "One": grpc.unary_unary_rpc_method_handler(lambda raw, context: raw[:10]),
        "Many": grpc.unary_stream_rpc_method_handler(lambda raw, context: iter([raw[:10]] * 3)),
        "Gather": grpc.stream_unary_rpc_method_handler(lambda raws, context: b"".join(raws)),
        "Stream": grpc.stream_stream_rpc_method_handler(lambda raws, context: raws),
    }
    server.add("a.Service", handlers)
    (port,) = free_ports(1)
    server.start("127.0.0.1", port)
    yield port
    server.stop(0)


@pytest.mark.parametrize(
    "path",
    [
        *(f"/a.Service/{name}" for name in ("One", "Many", "Gather", "Stream", "Unknown")),
        "/grpc.health.v1.Health/Watch",
    ],
)
def test_what_a_stranger_sends_is_not_read(port: int, path: str) -> None:
    """30 with 38 of 39 MB each had 1.2 GB for as long as they liked."""
    strangers = [HalfSender(port, path, bytes(32 * 1024 * 1024), keep_back=1) for _ in range(4)]

    def all_ended() -> bool:
        for each in strangers:
            each.go_on()
        return all(each.ended for each in strangers)

    eventually(all_ended, timeout=10)
    assert {each.trailers["grpc-status"] for each in strangers} == {str(grpc.StatusCode.UNAUTHENTICATED.value[0])}
    assert sum(each.sent for each in strangers) <= 4 * UNASKED
    for each in strangers:
        each.close()


def messages_around_a_revocation(key: str) -> Iterator[bytes]:
    for _ in range(2):
        yield b"x"
        time.sleep(ADMITTED_SECS + 0.2)
    REVOKED.add(key)
    yield b"x"


def test_a_stream_ends_when_the_key_of_its_caller_is_revoked(port: int) -> None:
    """It went on for as long as its caller liked."""
    key = "Bearer of a stream"
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = channel.stream_stream("/a.Service/Stream")
        replies = ask(messages_around_a_revocation(key), metadata=(("authorization", key),), timeout=20)
        assert [next(replies), next(replies)] == [b"x", b"x"]
        with pytest.raises(grpc.RpcError, match="Send a key") as refused:
            next(replies)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_what_is_gathered_ends_when_the_key_of_its_caller_is_revoked(port: int) -> None:
    key = "Bearer of many"
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = channel.stream_unary("/a.Service/Gather")
        with pytest.raises(grpc.RpcError, match="Send a key") as refused:
            ask(messages_around_a_revocation(key), metadata=(("authorization", key),), timeout=20)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("shape", ["One", "Many", "Gather", "Stream"])
def test_who_may_come_in_is_answered_in_each_shape(port: int, shape: str) -> None:
    key = (("authorization", "Bearer k"),)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        if shape == "One":
            assert channel.unary_unary("/a.Service/One")(b"x" * 100, metadata=key) == b"x" * 10
        elif shape == "Many":
            assert list(channel.unary_stream("/a.Service/Many")(b"x" * 100, metadata=key)) == [b"x" * 10] * 3
        elif shape == "Gather":
            assert channel.stream_unary("/a.Service/Gather")(iter([b"a", b"b"]), metadata=key) == b"ab"
        else:
            assert list(channel.stream_stream("/a.Service/Stream")(iter([b"a", b"b"]), metadata=key)) == [b"a", b"b"]


def test_a_unary_call_without_a_message_is_refused_as_grpc_does(port: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.stream_unary("/a.Service/One")(iter([]), metadata=(("authorization", "Bearer k"),))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


class Ended(Exception):
    """A call is over."""


class AdmittedCall:
    """What `refuse` uses of a call that the express lane has admitted."""

    def __init__(self) -> None:
        self.trailing: tuple[tuple[str, str], ...] = ()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((EXPRESS_KEY, EXPRESS_ADMITTED),)

    def set_trailing_metadata(self, trailing: tuple[tuple[str, str], ...]) -> None:
        self.trailing = trailing

    def add_callback(self, _: Any) -> bool:
        return True

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise Ended(code.name)


def test_what_a_full_engine_refuses_envoy_may_try_at_the_multiplexer() -> None:
    """The engine said as the multiplexer does that nothing is to be tried again: a full replica ended calls."""
    full = Problem(Kind.EXHAUSTED, "OVERLOADED", "Model is overloaded")
    final: Any = AdmittedCall()
    with pytest.raises(Ended, match="RESOURCE_EXHAUSTED"):
        refuse(final, full)
    assert FINAL in final.trailing

    def begin(message: Any, lane: Any) -> NoReturn:
        raise full

    counter = SimpleNamespace(labels=lambda _: SimpleNamespace(inc=lambda: None))
    metrics = SimpleNamespace(requests=counter, failed=lambda _: None)
    permits = SimpleNamespace(acquire_now=None)
    model = SimpleNamespace(permits=permits, metrics=metrics, runtime=SimpleNamespace(on_cpu=True))
    answers: Any = SimpleNamespace(model=model)
    engine = Service(answers, tei.InfoResponse())
    unary = engine.unary(tei.EmbedRequest, begin).unary_unary
    direct = engine.direct("Tokenize", tei.EncodeRequest, lambda message: begin(message, None))["Tokenize"].unary_unary
    for handle in (unary, direct):
        admitted: Any = AdmittedCall()
        with pytest.raises(Ended, match="RESOURCE_EXHAUSTED"):
            handle(b"", admitted)
        assert FINAL not in admitted.trailing
