"""A server with authentication asks who calls before it reads what they send, whatever the shape of the method."""

from collections.abc import Iterator

import grpc
import pytest

from appliance.core.problems import Kind, Problem
from appliance.drivers.grpccalls import AuthenticationInterceptor
from appliance.drivers.grpcserver import Server
from testing.half_sender import HalfSender
from testing.running import eventually, free_ports

LIMIT = 40 * 1024 * 1024
UNASKED = 4 * 1024 * 1024  # what the flow control lets a caller send that nobody reads: 64 KiB to 1 MiB were seen


def authenticate(method: str, context: grpc.ServicerContext) -> None:
    if not any(key == "authorization" for key, _ in context.invocation_metadata()):
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
