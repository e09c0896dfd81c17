"""The gateway's way to a multiplexer that does not answer: its threads are not held for ever."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Event
from typing import Any

import grpc
import pytest

from appliance.gateway.multiplexer_channels import MultiplexerChannels
from appliance.gateway.refusals import Reason, Refusal

LONGEST_SECS = 0.5


class Silent(grpc.GenericRpcHandler):
    """Answers each message after as many seconds as it says; `never` not before the test ends."""

    def __init__(self) -> None:
        self.over = Event()

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        if details.method.endswith("RerankStream"):
            return grpc.stream_unary_rpc_method_handler(lambda requests, context: b"".join(self.each(requests)))
        return grpc.stream_stream_rpc_method_handler(lambda requests, context: self.each(requests))

    def each(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        for request in requests:
            self.over.wait(30 if request == b"never" else float(request))
            yield request


@pytest.fixture(scope="module")
def channels() -> Iterator[MultiplexerChannels]:
    silent = Silent()
    server = grpc.server(ThreadPoolExecutor(8), handlers=[silent])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield MultiplexerChannels([f"127.0.0.1:{port}"], 10**6, LONGEST_SECS)
    silent.over.set()
    server.stop(None).wait()


def stream(channels: MultiplexerChannels, requests: list[bytes]) -> list[bytes]:
    return list(channels.stream("EmbedAllStream", requests, [1] * len(requests), nullcontext))


def gather(channels: MultiplexerChannels, requests: list[bytes]) -> bytes:
    return channels.gather("RerankStream", requests, nullcontext)


@pytest.mark.parametrize("call", [stream, gather])
def test_an_answer_that_does_not_come_is_not_waited_for(
    channels: MultiplexerChannels, call: Callable[..., Any]
) -> None:
    began = time.monotonic()
    with pytest.raises(Refusal) as caught:
        call(channels, [b"0", b"never"])
    assert caught.value.reason is Reason.TIMEOUT
    assert time.monotonic() - began < 2 * LONGEST_SECS + 1.5


def test_a_stream_that_moves_goes_on_and_a_request_of_many_rows_has_longer(channels: MultiplexerChannels) -> None:
    assert stream(channels, [b"0.3"] * 3) == [b"0.3"] * 3
    assert list(channels.stream("EmbedArrowStream", [b"0.9"], [3], nullcontext)) == [b"0.9"]
