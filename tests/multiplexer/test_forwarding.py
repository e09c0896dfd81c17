"""What is not plain reaches the server of grpcio behind, and its answers come back, as if nothing was between."""

import asyncio
import hashlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from appliance.drivers.http2 import UNIX, Connection, MessageStream
from appliance.multiplexer import served_connection
from testing.plain_calls import WAIT_SECS, ServerBefore, path, unary
from testing.running import eventually

MANY = 3000  # messages each way
SLACK_SECS = 0.5  # grpcio rounds what is left up, by one in a hundred at most
LARGE = 9 * 2**20 + 7  # bytes of a message
METADATA = (("x-one", "1"), ("x-two-bin", bytes(range(256))), ("x-one", "another"))


class Behind:
    """The handlers of grpcio's server; `ended` when a call of `Hold` or `Watch` has."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.begun, self.ended = threading.Event(), threading.Event()
        self.half_closed = threading.Event()

    def echo(self, message: bytes, context: Any) -> bytes:
        metadata = [tuple(pair) for pair in context.invocation_metadata()]
        self.seen.append({"metadata": metadata, "left": context.time_remaining(), "size": len(message)})
        return b"behind:" + message

    def refuse(self, message: bytes, context: Any) -> bytes:
        context.send_initial_metadata((("x-first-bin", b"\x00\xff"),))
        context.set_trailing_metadata((("x-code", "NOPE"), ("x-last-bin", bytes(range(256)))))
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, message.decode())
        raise AssertionError

    def fail(self, message: bytes, context: Any) -> bytes:
        raise ValueError("unexpected")

    def both(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        context.set_trailing_metadata((("x-last-bin", b"\x00\xff"),))
        for message in messages:
            yield b"s:" + message

    def down(self, message: bytes, context: Any) -> Iterator[bytes]:
        for number in range(int(message)):
            yield b"%d" % number

    def up(self, messages: Iterator[bytes], context: Any) -> bytes:
        found = hashlib.sha256()
        count = 0
        for message in messages:
            found.update(message)
            count += 1
        self.half_closed.set()
        return b"%d %s" % (count, found.hexdigest().encode())

    def half(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """It answers when its caller has said all."""
        said = list(messages)
        yield b"%d" % len(said)
        yield b"end"

    def broken(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield next(messages)
        context.set_trailing_metadata((("x-row", "1"),))
        context.abort(grpc.StatusCode.DATA_LOSS, "the second is lost")

    def hold(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        context.add_callback(self.ended.set)
        self.begun.set()
        yield b"begun"
        self.ended.wait(WAIT_SECS)

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        streams = {name.capitalize(): getattr(self, name) for name in ("both", "half", "broken", "hold")}
        return {
            **{name: grpc.stream_stream_rpc_method_handler(handler) for name, handler in streams.items()},
            "Echo": unary(self.echo),
            "Other": unary(self.echo),
            "Refuse": unary(self.refuse),
            "Fail": unary(self.fail),
            "Down": grpc.unary_stream_rpc_method_handler(self.down),
            "Up": grpc.stream_unary_rpc_method_handler(self.up),
        }


@pytest.fixture
def behind() -> Behind:
    return Behind()


@pytest.fixture
def standing(tmp_path: Path, behind: Behind) -> Iterator[ServerBefore]:
    plain = {"Echo": lambda message, context: b"unary:" + message}
    with ServerBefore(tmp_path, plain, behind.handlers()) as made:
        yield made


@pytest.fixture(params=["port", "socket"])
def channel(standing: ServerBefore, request: pytest.FixtureRequest) -> grpc.Channel:
    return standing.channel(internal=request.param == "socket")


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


# -- what is forwarded -------------------------------------------------------------------------------------------------


def test_other_methods_are_answered_behind(channel: grpc.Channel) -> None:
    assert channel.unary_unary(path("Other"))(b"x", timeout=WAIT_SECS) == b"behind:x"
    assert channel.unary_unary(path("Echo"))(b"x", timeout=WAIT_SECS) == b"unary:x"


@pytest.mark.parametrize("method", [path("None"), "/no.Service/None", "/"])
def test_methods_that_do_not_exist_are_refused_behind(channel: grpc.Channel, method: str) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        channel.unary_unary(method)(b"x", timeout=WAIT_SECS)
    assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert failed.value.details() == "Method not found!"


def test_health_and_reflection_are_those_of_the_server_behind(channel: grpc.Channel) -> None:
    assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=WAIT_SECS) == b"\x08\x01"


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_messages_are_read_behind(
    channel: grpc.Channel, behind: Behind, compression: grpc.Compression
) -> None:
    assert channel.unary_unary(path("Echo"))(b"z" * 1000, timeout=WAIT_SECS, compression=compression)[:7] == b"behind:"
    assert behind.seen[0]["size"] == 1000


@pytest.mark.parametrize("size", [48 * 1024, 2**16, LARGE])
def test_large_messages_come_and_go_byte_for_byte(channel: grpc.Channel, size: int) -> None:
    message = noise(size)
    assert channel.unary_unary(path("Echo"))(message, timeout=WAIT_SECS) in (b"behind:" + message, b"unary:" + message)
    assert channel.unary_unary(path("Other"))(message, timeout=WAIT_SECS) == b"behind:" + message


def test_a_message_of_more_than_plain_ones_goes_on(channel: grpc.Channel) -> None:
    message = noise(served_connection.LARGEST_PLAIN * 2)
    assert channel.unary_unary(path("Echo"))(message, timeout=WAIT_SECS) == b"behind:" + message


def test_one_that_arrives_slowly_goes_on_and_is_whole(standing: ServerBefore, behind: Behind) -> None:
    client = standing.client()
    stream = client.open("Echo", ("grpc-timeout", "20S"))
    client.body(stream, b"\0\0\0\0\x06ab", ends=False)
    eventually(lambda: standing.in_thread(lambda: any(each.forwarded for each in standing.unary.connections)))
    client.body(stream, b"cd", ends=False)
    client.body(stream, b"ef", ends=True)
    assert client.answer(stream)[1] == b"behind:abcdef"
    assert 10 < behind.seen[0]["left"] <= 20 - served_connection.LATE_SECS + SLACK_SECS


def test_what_is_not_one_message_is_judged_behind(standing: ServerBefore) -> None:
    client = standing.client()
    two = client.open("Echo")
    client.body(two, b"\0\0\0\0\x01a\0\0\0\0\x01b", ends=True)
    assert client.answer(two)[1] == b"behind:a"
    for ends in (True, False):
        none = client.open("Echo", ends=ends)
        if not ends:
            client.body(none, b"", ends=True)
        assert client.answer(none)[0].get("grpc-status") != "0"
    assert client.answer(client.call("Echo", b"x"))[1] == b"unary:x"


# -- streams -----------------------------------------------------------------------------------------------------------


def test_thousands_of_messages_go_both_ways_in_order(channel: grpc.Channel) -> None:
    messages = [b"%d" % number * (number % 50) for number in range(MANY)]
    call = channel.stream_stream(path("Both"))(iter(messages), timeout=60)
    assert list(call) == [b"s:" + message for message in messages]
    assert ("x-last-bin", b"\x00\xff") in call.trailing_metadata()


def test_a_dialogue_has_each_answer_before_the_next_question(channel: grpc.Channel) -> None:
    answered = threading.Semaphore(1)

    def questions() -> Iterator[bytes]:
        for number in range(200):
            assert answered.acquire(timeout=WAIT_SECS)
            yield b"%d" % number

    found = []
    for reply in channel.stream_stream(path("Both"))(questions(), timeout=60):
        found.append(reply)
        answered.release()
    assert found == [b"s:%d" % number for number in range(200)]


def test_large_messages_of_a_stream_come_and_go_byte_for_byte(channel: grpc.Channel) -> None:
    messages = [noise(2**20 + number) for number in range(12)]
    assert list(channel.stream_stream(path("Both"))(iter(messages), timeout=60)) == [b"s:" + each for each in messages]


def test_a_stream_of_replies(channel: grpc.Channel) -> None:
    found = list(channel.unary_stream(path("Down"))(b"%d" % MANY, timeout=60))
    assert found == [b"%d" % number for number in range(MANY)]
    assert list(channel.unary_stream(path("Down"))(b"0", timeout=60)) == []


def test_a_stream_of_requests(channel: grpc.Channel) -> None:
    messages = [noise(1000 + number) for number in range(MANY)]
    wanted = b"%d %s" % (MANY, hashlib.sha256(b"".join(messages)).hexdigest().encode())
    assert channel.stream_unary(path("Up"))(iter(messages), timeout=60) == wanted
    assert channel.stream_unary(path("Up"))(iter(()), timeout=60)[:2] == b"0 "


def test_the_end_of_the_requests_arrives(channel: grpc.Channel) -> None:
    call = channel.stream_stream(path("Half"))(iter([b"a", b"b"]), timeout=WAIT_SECS)
    assert list(call) == [b"2", b"end"]


def test_streams_of_one_connection_do_not_mix(standing: ServerBefore) -> None:
    async def one(channel: grpc.aio.Channel, number: int) -> list[bytes]:
        call = channel.stream_stream(path("Both"))(timeout=60)
        found = []
        for at in range(100):
            await call.write(b"%d %d" % (number, at))
            found.append(await call.read())
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        return found

    async def all_of_them() -> list[list[bytes]]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{standing.port}") as channel:
            return await asyncio.gather(*[one(channel, number) for number in range(20)])

    found = asyncio.run(all_of_them())
    assert found == [[b"s:%d %d" % (number, at) for at in range(100)] for number in range(20)]


def test_our_own_client_streams(standing: ServerBefore) -> None:
    connection = Connection(f"{UNIX}{standing.own_socket}")
    for _ in range(2):
        messages = (noise(5000 + number) for number in range(300))
        stream = MessageStream(connection, path("Both"), messages, [])
        assert list(stream.replies(lambda: WAIT_SECS)) == [b"s:" + noise(5000 + number) for number in range(300)]
    connection.close()


# -- metadata and ends -------------------------------------------------------------------------------------------------


def test_metadata_arrives_with_its_bytes(channel: grpc.Channel, behind: Behind) -> None:
    channel.unary_unary(path("Other"))(b"x", timeout=WAIT_SECS, metadata=METADATA)
    assert [pair for pair in behind.seen[0]["metadata"] if pair[0] in ("x-one", "x-two-bin")] == [*METADATA]
    assert WAIT_SECS - 5 < behind.seen[0]["left"] < WAIT_SECS + SLACK_SECS


def test_an_error_comes_back_with_its_words_and_trailers(channel: grpc.Channel) -> None:
    words = "100 % of Zürich \U0001f600\n."
    call = channel.unary_unary(path("Refuse")).future(words.encode(), timeout=WAIT_SECS)
    assert call.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert call.details() == words
    assert ("x-first-bin", b"\x00\xff") in call.initial_metadata()
    assert [tuple(each) for each in call.trailing_metadata()] == [("x-code", "NOPE"), ("x-last-bin", bytes(range(256)))]


def test_an_unexpected_error_behind_is_unknown(channel: grpc.Channel) -> None:
    call = channel.unary_unary(path("Fail")).future(b"", timeout=WAIT_SECS)
    assert (call.code(), call.details()) == (grpc.StatusCode.UNKNOWN, "Exception calling application: unexpected")
    assert channel.unary_unary(path("Other"))(b"x", timeout=WAIT_SECS) == b"behind:x"


def test_a_stream_that_fails_keeps_what_it_has_answered(channel: grpc.Channel) -> None:
    call = channel.stream_stream(path("Broken"))(iter([b"first", b"second"]), timeout=WAIT_SECS)
    assert next(call) == b"first"
    with pytest.raises(grpc.RpcError) as failed:
        next(call)
    assert (failed.value.code(), failed.value.details()) == (grpc.StatusCode.DATA_LOSS, "the second is lost")
    assert [tuple(each) for each in call.trailing_metadata()] == [("x-row", "1")]


def test_a_caller_who_cancels_is_heard_behind(channel: grpc.Channel, behind: Behind) -> None:
    call = channel.stream_stream(path("Hold"))(iter([b"x"]))
    assert next(call) == b"begun"
    assert not behind.ended.is_set()
    call.cancel()
    assert behind.ended.wait(WAIT_SECS)
    assert channel.unary_unary(path("Other"))(b"x", timeout=WAIT_SECS) == b"behind:x"


def test_one_whose_connection_breaks_is_heard_behind(standing: ServerBefore, behind: Behind) -> None:
    client = standing.client()
    stream = client.open("Hold")
    client.wait(lambda: client.bodies.get(stream))
    client.close()
    assert behind.ended.wait(WAIT_SECS)


def test_a_deadline_ends_the_call_on_both_sides(channel: grpc.Channel, behind: Behind) -> None:
    call = channel.stream_stream(path("Hold"))(iter([b"x"]), timeout=0.5)
    with pytest.raises(grpc.RpcError) as failed:
        list(call)
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert behind.ended.wait(WAIT_SECS)


@pytest.mark.parametrize("said", ["inside", "admitted", "judge", "outside"])
def test_only_from_the_data_folder_a_caller_says_how_he_came(standing: ServerBefore, behind: Behind, said: str) -> None:
    metadata = [("x-tei-express", said), ("x-tei-express", said), ("x-other", said)]
    for internal in (False, True):
        other = standing.channel(internal).unary_unary(path("Other"))
        assert other(b"x", timeout=WAIT_SECS, metadata=metadata) == b"behind:x"
    outside, inside = ([v for k, v in each["metadata"] if k == "x-tei-express"] for each in behind.seen)
    assert outside == ["outside"]
    assert inside == [said, said]


def test_a_strange_spelling_of_it_goes_nowhere(standing: ServerBefore, behind: Behind) -> None:
    client = standing.client()
    for name in ("X-Tei-Express", "x-tei-Express"):
        assert client.answer(client.call("Other", b"x", (name, "inside")))[0].get("grpc-status") != "0"
    assert behind.seen == []
