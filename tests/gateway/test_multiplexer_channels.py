"""The gateway's way to a multiplexer that does not answer: its threads are not held for ever."""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from threading import Event
from typing import Any

import grpc
import pytest

from appliance.gateway.multiplexer_channels import MultiplexerChannels
from appliance.gateway.refusals import Reason, Refusal
from testing.running import free_ports

LONGEST_SECS = 0.5
LIMIT_SECS = 20.0
NO_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # the frame with which a server of HTTP/2 begins


def unary(channels: MultiplexerChannels, requests: list[bytes]) -> list[bytes]:
    return [channels.unary("Info", request)[0] for request in requests]


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
    with closing(MultiplexerChannels([f"127.0.0.1:{port}"], 10**6, LONGEST_SECS)) as channels:
        yield channels
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


def test_a_request_without_rows_has_the_time_of_one(channels: MultiplexerChannels) -> None:
    """For the width of no vectors a replica may be asked."""
    assert list(channels.stream("EmbedArrowStream", [b"0.4"], [0], nullcontext)) == [b"0.4"]


# -- multiplexers that die --------------------------------------------------------------------------------------------


class Echo(grpc.GenericRpcHandler):
    """Answers with what it was asked."""

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        if details.method.endswith("RerankStream"):
            return grpc.stream_unary_rpc_method_handler(lambda requests, context: b"".join(requests))
        if details.method.endswith("EmbedAllStream"):
            return grpc.stream_stream_rpc_method_handler(lambda requests, context: requests)
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)


def end_the_first_call(listener: socket.socket) -> None:
    """As a process that is killed with the call in work."""
    with listener:
        connection, _ = listener.accept()
    with connection:
        connection.sendall(NO_SETTINGS)
        seen = b""
        while b"TeiMultiplexer" not in seen:
            seen += connection.recv(65536)


@pytest.mark.parametrize("call", [unary, stream, gather])
def test_a_second_try_waits_for_a_process_that_is_not_there_yet(call: Callable[..., Any]) -> None:
    """Nobody has asked the second process before, so nobody knows that it is just being started, too."""
    dying = socket.create_server(("127.0.0.1", 0))
    (port,) = free_ports(1)
    channels = MultiplexerChannels([f"127.0.0.1:{dying.getsockname()[1]}", f"127.0.0.1:{port}"], 10**6, LIMIT_SECS)
    server = grpc.server(ThreadPoolExecutor(8), handlers=[Echo()])
    with ThreadPoolExecutor(2) as threads:
        ended = threads.submit(end_the_first_call, dying)
        answer = threads.submit(call, channels, [b"text"])
        ended.result(LIMIT_SECS)
        time.sleep(0.5)  # in which a try that does not wait is refused
        assert not answer.done()
        server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        assert answer.result(LIMIT_SECS) == (b"text" if call is gather else [b"text"])
    channels.close()
    server.stop(None).wait()


def test_the_processes_take_calls_in_turn() -> None:
    """All calls went to the first one."""
    with closing(MultiplexerChannels([f"unix:/nowhere/{number}" for number in range(4)], 10**6, 1)) as channels:
        asked = [channels.next_channel() for _ in range(100)]
        assert [asked.count(each) for each in channels.channels] == [25] * 4


def test_what_was_connected_to_a_process_that_died_is_not_asked_again() -> None:
    server = grpc.server(ThreadPoolExecutor(8), handlers=[Echo()])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with closing(MultiplexerChannels([address], 10**6, LIMIT_SECS)) as channels:
        (channel,) = channels.channels
        connections = [channel.acquire() for _ in range(3)]
        for each in connections:
            channel.release(each)
        channel.mark_lost()
        assert not any(each.idle for each in connections)
        assert unary(channels, [b"text"]) == [b"text"]
    server.stop(None).wait()
