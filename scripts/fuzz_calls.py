"""The calls of scripts/fuzz.py: how each message is sent, and what came of it."""

import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
import pyarrow as pa
from google.protobuf.message import Message
from hpack import Decoder

from appliance.wire import http2
from appliance.wire.methods import Shape
from scripts.fuzz_http2 import AT_ONCE
from scripts.fuzz_messages import LONG_TEXTS, RPCS, Sent, all_rpcs, make_call

DEADLINE_SECS = 10.0
GRACE_SECS = 0.1
WIDE = (
    *(("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500), ("grpc.enable_retries", 0)),
    *(("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)),
)
CONNECTIONS = "HTTP/2 bytes"
STILL_OPEN = "OPEN"
FORBIDDEN = ("UNKNOWN", "INTERNAL", "UNAVAILABLE", "ABORTED", "DATA_LOSS", "UNAUTHENTICATED", STILL_OPEN)
ONE_BOMB = threading.Lock()  # at a time: it is their own size that is measured, not this machine's


class Outcome(NamedTuple):
    """code: a gRPC status, or a word for how a connection ended. details: the server's words."""

    code: str
    details: str


class Answered(NamedTuple):
    """key: the message, or all of them joined where they get one reply."""

    key: bytes
    reply: Message


def converse(raw: bytes, port: int, listen_secs: float) -> Outcome:
    """Send it all, listen for a while, end our side, and wait until the server has ended its own."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_SECS) as connection:
        try:
            connection.sendall(raw)
            connection.settimeout(listen_secs)
            while b"grpc-status" not in received and (chunk := connection.recv(65536)):
                received += chunk
        except (TimeoutError, ConnectionError):
            pass
        try:
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(DEADLINE_SECS + GRACE_SECS)
            while chunk := connection.recv(65536):
                received += chunk
        except TimeoutError:
            return Outcome(STILL_OPEN, "the server did not end the connection that we had ended")
        except OSError:
            pass  # reset
    return outcome_of(received)


def outcome_of(received: bytes) -> Outcome:
    """The status of the first call that ended, else RESET, GOAWAY or closed."""
    at, decoder, word = 0, Decoder(), "closed"
    while len(received) - at >= 9:
        end = at + 9 + int.from_bytes(received[at : at + 3], "big")
        if received[at + 3] == http2.HEADERS and end <= len(received):
            block = decoder.decode(http2.unpadded(received[at + 4], received[at + 9 : end]), raw=True)
            headers = {bytes(key): bytes(value) for key, value in block}
            if status := headers.get(b"grpc-status"):
                code = next(code for code in grpc.StatusCode if code.value[0] == int(status))
                return Outcome(code.name, headers.get(b"grpc-message", b"").decode(errors="replace"))
        if word == "closed":
            word = {http2.RST_STREAM: "RESET", http2.GOAWAY: "GOAWAY"}.get(received[at + 3], word)
        at = end
    return Outcome(word, "")


def call_rpc(channel: grpc.Channel, sent: Sent) -> list[bytes]:
    """The replies. Raises: grpc.RpcError."""
    assert sent.rpc is not None
    many_requests, many_replies = sent.rpc.shape is not Shape.UNARY, sent.rpc.shape is Shape.BIDI_STREAMING
    sides = ("stream" if many_requests else "unary", "stream" if many_replies else "unary")
    start = getattr(channel, "_".join(sides))(sent.rpc.path)
    options = {"timeout": DEADLINE_SECS, "metadata": sent.metadata}
    if not many_replies:
        return [start(iter(sent.messages) if many_requests else sent.messages[0], **options)]
    replies, received = start(iter(sent.messages), **options), []
    for reply in replies:
        received.append(reply)
        if sent.cancel:
            replies.cancel()
    return received


def values_of(message: Message) -> list[Any]:
    """The numbers and texts of a reply, without its times."""
    values: list[Any] = []
    for about, value in message.ListFields():
        if about.name == "arrow_ipc":
            with pa.ipc.open_stream(value) as reader:
                values += [each for rows in reader.read_all().to_pydict().values() for each in flat(rows)]
        elif about.name != "metadata":
            values += flat(value)
    return values


def flat(value: Any) -> Iterator[Any]:
    if isinstance(value, Message):
        yield from values_of(value)
    elif isinstance(value, dict):
        yield from flat(list(value.values()))
    elif isinstance(value, str | bytes | int | float) or value is None:
        yield value
    else:
        for each in value:
            yield from flat(each)


def near(one: Any, other: Any) -> bool:
    return abs(one - other) < 1e-3 if isinstance(one, float) and isinstance(other, float) else bool(one == other)


@dataclass
class Tally:
    """What came of all calls. Filled by several threads."""

    answers: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    slowest: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    examples: dict[tuple[str, str], str] = field(default_factory=dict)  # the first of (RPC, code)
    violations: list[str] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)  # messages without an answer
    compared: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, number: int, sent: Sent, code: str, seconds: float, details: str) -> None:
        name = sent.rpc.name if sent.rpc else CONNECTIONS
        details = " ".join(details.split())[:300]
        with self.lock:
            self.answers[name][code] += 1
            self.slowest[name] = max(self.slowest[name], seconds)
            self.examples.setdefault((name, code), f"message {number}: {details}")
            if code == "UNAVAILABLE" and sent.rpc:
                self.lost.append(number)
            if seconds > DEADLINE_SECS + GRACE_SECS:
                self.violations.append(f"message {number} to {name} took {seconds:.2f} s: {code} {details}")
            if sent.whole and code != "OK":
                self.violations.append(f"message {number} to {name} is valid, and was refused: {code} {details}")

    def compare(self, number: int, name: str, values: list[Any], right: list[Any]) -> None:
        same = len(values) == len(right) and all(map(near, values, right))
        with self.lock:
            self.compared += 1
            if not same:
                self.violations.append(f"message {number} to {name} is valid, and was answered with other values")

    def forbidden(self) -> Iterator[str]:
        for (name, code), example in sorted(self.examples.items()):
            transports = name == CONNECTIONS and code in ("INTERNAL", "UNAVAILABLE")
            if code in FORBIDDEN and not transports:
                yield f"{self.answers[name][code]} times {code} from {name}, as {example}"

    def table(self) -> None:
        print(f"\n{'RPC':24}  {'messages':>8}  {'slowest ms':>10}  answers")
        for name, codes in sorted(self.answers.items()):
            listed = ", ".join(f"{code} {count}" for code, count in codes.most_common())
            print(f"{name:24}  {codes.total():8}  {self.slowest[name] * 1000:10.0f}  {listed}")
        codes = sum(self.answers.values(), Counter())
        listed = ", ".join(f"{code} {count}" for code, count in codes.most_common())
        print(f"{'all':24}  {codes.total():8}  {max(self.slowest.values()) * 1000:10.0f}  {listed}")


class Client:
    """One connection. right: the values of each valid message, by RPC."""

    def __init__(self, port: int, right: dict[tuple[str, bytes], list[Any]], tally: Tally) -> None:
        self.port, self.right, self.tally = port, right, tally

    def learn(self) -> None:
        """What every valid message is answered with."""
        with grpc.insecure_channel(f"127.0.0.1:{self.port}", WIDE) as channel:
            for rpc in RPCS:
                if rpc.reply:
                    valid = rpc.valid[:2] if rpc.arrow else rpc.valid
                    for key, reply in self.answered(channel, Sent(rpc, valid, rpc.metadata)):
                        self.right[rpc.name, key] = values_of(reply)

    def stretch(self) -> None:
        """The largest valid calls, and many at once: memory is compared with what the processes need anyway."""
        with grpc.insecure_channel(f"127.0.0.1:{self.port}", WIDE) as channel:
            for rpc in filter(lambda rpc: rpc.reply, all_rpcs(LONG_TEXTS)):
                try:
                    call_rpc(channel, Sent(rpc, rpc.valid[1:2] or rpc.valid, rpc.metadata))
                except grpc.RpcError as error:  # no truncation was asked for
                    if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                        raise
            embed = next(rpc for rpc in RPCS if rpc.name == "Embed")
            start = channel.unary_unary(embed.path)
            for call in [start.future(embed.valid[0], timeout=60) for _ in range(AT_ONCE)]:
                call.result()

    def answered(self, channel: grpc.Channel, sent: Sent) -> list[Answered]:
        assert sent.rpc is not None
        if sent.rpc.shape is Shape.UNARY:
            raw = [call_rpc(channel, Sent(sent.rpc, (each,), sent.metadata))[0] for each in sent.messages]
        else:
            raw = call_rpc(channel, sent)
        keys = [b"".join(sent.messages)] if sent.rpc.shape is Shape.CLIENT_STREAMING else sent.messages
        return [Answered(key, sent.rpc.reply.FromString(each)) for key, each in zip(keys, raw, strict=True)]

    def run(self, seed: int, numbers: Sequence[int]) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{self.port}", WIDE) as channel:
            for number in numbers:
                sent = make_call(seed, number)
                if sent.bomb:
                    with ONE_BOMB:
                        self.send(channel, number, sent)
                else:
                    self.send(channel, number, sent)

    def send(self, channel: grpc.Channel, number: int, sent: Sent) -> None:
        began, code, details = time.monotonic(), "OK", ""
        answered: list[Answered] = []
        try:
            if sent.rpc is None:
                code, details = converse(sent.messages[0], self.port, sent.listen_secs)
            elif sent.whole and sent.rpc.reply:
                answered = self.answered(channel, sent)
            else:
                call_rpc(channel, sent)
        except grpc.RpcError as error:
            code, details = error.code().name, error.details() or ""
        except OSError as error:
            code, details = "UNAVAILABLE", str(error)
        self.tally.note(number, sent, code, time.monotonic() - began, details)
        for key, reply in answered:
            assert sent.rpc is not None
            self.tally.compare(number, sent.rpc.name, values_of(reply), self.right[sent.rpc.name, sent.rpc.like(key)])
