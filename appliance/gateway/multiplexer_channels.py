"""The multiplexer as the gateway calls it: serialized requests in, serialized replies out, failures as Refusals.

A multiplexer process that dies takes its calls along; all of them may be repeated, so each is, once, as soon as
another process answers. A batch goes on where its replies ended. The second try waits for its connection: the process
that has just been seen to listen may be the one that is dying.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc

from appliance.drivers.grpccalls import STATUS, TimeLimits, deadline_check
from appliance.drivers.http2 import Connection
from appliance.gateway.refusals import Reason, Refusal, refusal_from_rpc, refusal_from_status
from appliance.wire.calls import CallFailed, Code, Status, timeout_header
from appliance.wire.envelope import CODE_KEY
from appliance.wire.methods import MULTIPLEXER

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
MOST_IDLE = 64  # connections to one multiplexer process
RECONNECT_POLL_SECS = 0.05
RECONNECT_SECS = 15.0  # a start takes a second or two, and more where the cores are busy
Metadata = Sequence[tuple[str, str]]
Watch = Callable[[Callable[[], object]], Any]  # what to call when the caller goes -> a context manager


class ChannelReply(NamedTuple):
    """metadata: that before the reply, and that behind it."""

    message: bytes
    metadata: dict[str, Any]


class MultiplexerChannel:
    """The channel to one multiplexer process, and whether that process is there.

    The channel's own state is not used: that of a process that was just killed is "ready" for a moment longer, and
    grpcio's own thread that watches it fails when the channel is closed.
    """

    def __init__(self, address: str, options: Sequence[tuple[str, int]]) -> None:
        self.address = address
        self.channel = grpc.insecure_channel(address, options)
        self.idle: list[Connection] = []  # for unary calls, each of which has one to itself
        self.up, self.closed = threading.Event(), threading.Event()
        self.up.set()
        self.callables: dict[tuple[str, str], Any] = {}
        self.lock = threading.Lock()

    @property
    def is_up(self) -> bool:
        return self.up.is_set()

    def mark_lost(self) -> None:
        """The connection has just broken, and with it those that were of the same process."""
        self.drop_idle()
        with self.lock:
            if self.is_up:
                self.up.clear()
                threading.Thread(target=self.watch_return, name="return", daemon=True).start()

    def watch_return(self) -> None:
        """Until a process answers there, whatever it says."""
        check = self.channel.unary_unary(HEALTH_CHECK)
        while not self.closed.wait(RECONNECT_POLL_SECS):
            try:
                check(b"", wait_for_ready=True)
                break
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    break
            except ValueError:  # it was closed just before
                break
        self.up.set()

    def wait_until_up(self, within_secs: float) -> bool:
        """Whether the process is there in time."""
        return self.up.wait(within_secs)

    def unary(
        self, name: str, request: bytes, metadata: Metadata, longest_secs: float | None, largest: int
    ) -> ChannelReply:
        """On a connection of our own: grpcio's client takes ten times its CPU (`drivers.http2`). Raises: CallFailed."""
        check = deadline_check(longest_secs, "The multiplexer does not answer in time: its log may say why")
        deadline = [] if longest_secs is None else [("grpc-timeout", timeout_header(longest_secs))]
        connection = self.acquire()
        try:
            call = connection.begin(f"/{MULTIPLEXER}/{name}", (request,), [*deadline, *metadata])
            replies = list(connection.replies(call, check))
        finally:
            self.release(connection)
        if len(replies) != 1:
            raise CallFailed(Status(Code.INTERNAL, f"{len(replies)} replies to one request"), answered=False)
        if (size := len(replies[0])) > largest:
            words = f"CLIENT: Received message larger than max ({size} vs. {largest})"
            raise CallFailed(Status(Code.RESOURCE_EXHAUSTED, words), answered=False)
        trailers = call.status.trailers if call.status else ()
        return ChannelReply(replies[0], dict((*call.headers, *trailers)))

    def acquire(self) -> Connection:
        """A living connection. Raises: CallFailed when the process does not listen."""
        while True:
            with self.lock:
                connection = self.idle.pop() if self.idle else None
            if connection is None:
                break
            if connection.fresh():
                return connection
            connection.close()
        try:
            return Connection(self.address)
        except OSError as error:
            words = f"The multiplexer does not listen: {error.strerror or error}"
            raise CallFailed(Status(Code.UNAVAILABLE, words), answered=False, begun=False) from error

    def release(self, connection: Connection) -> None:
        """Keep it, if another call may be made on it."""
        with self.lock:
            if connection.idle and len(self.idle) < MOST_IDLE:
                self.idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """No call may be made afterwards."""
        self.closed.set()
        self.channel.close()
        self.drop_idle()

    def drop_idle(self) -> None:
        with self.lock:
            idle, self.idle = self.idle, []
        for connection in idle:
            connection.close()

    def callable(self, kind: str, name: str) -> Any:
        """The callable of an RPC that streams. kind: `stream_stream` or `stream_unary`."""
        with self.lock:
            if (kind, name) not in self.callables:
                self.callables[kind, name] = getattr(self.channel, kind)(f"/{MULTIPLEXER}/{name}")
            return self.callables[kind, name]


class TimedCall:
    """A call that is cancelled when no reply comes in time."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.cancel = call.cancel
        self.is_late = False

    def give_up(self) -> None:
        self.is_late = True
        self.cancel()

    def refuse_late(self) -> None:
        """Raises: Refusal, if the call was given up."""
        if self.is_late:
            raise Refusal(Reason.TIMEOUT, "The multiplexer does not answer in time: its log may say why")


class MultiplexerChannels:
    """The channels to all multiplexer processes.

    longest_secs bounds a unary call, and in a stream the wait for a reply, once for each row of its request. That is
    long where a request has many rows; but the multiplexer itself ends a call that does not move, and pings show that
    it lives.
    """

    def __init__(
        self, addresses: Sequence[str], max_message_bytes: int, longest_secs: float | None, lane: str | None = None
    ) -> None:
        """addresses: of the multiplexer processes, which take calls in turn. lane: that of the express lane."""
        self.max_message_bytes = max_message_bytes
        self.longest_secs = longest_secs
        options = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
        ]
        self.channels = [MultiplexerChannel(address, options) for address in addresses]
        self.lane = MultiplexerChannel(lane, options) if lane else None
        self.round_robin = itertools.cycle(self.channels)
        self.lock = threading.Lock()
        self.limits = TimeLimits()

    def close(self) -> None:
        """No call may be made afterwards."""
        for channel in (*self.channels, *([self.lane] if self.lane else [])):
            channel.close()

    def next_channel(self) -> MultiplexerChannel:
        """The channels in turn; those whose process is away only if no other is there."""
        with self.lock:
            candidates = [next(self.round_robin) for _ in self.channels]
        return next((channel for channel in candidates if channel.is_up), candidates[0])

    def unary(self, name: str, request: bytes, metadata: Metadata = (), express: bool = False) -> ChannelReply:
        """Raises: Refusal. express: through the express lane, if that is there."""
        self.refuse_too_large(request)
        channel = self.lane if express and self.lane and self.lane.is_up else self.next_channel()
        try:
            return channel.unary(name, request, metadata, self.longest_secs, self.max_message_bytes)
        except CallFailed as failure:
            if not self.may_repeat(failure.status, channel):
                raise refusal_from_failure(failure) from None
        until = time.monotonic() + RECONNECT_SECS
        while True:
            try:
                other = self.next_channel()
                return other.unary(name, request, metadata, self.longest_secs, self.max_message_bytes)
            except CallFailed as again:
                if again.begun or time.monotonic() > until:
                    raise refusal_from_failure(again) from None
                time.sleep(RECONNECT_POLL_SECS)  # the process that has just been seen to listen may be ending

    def stream(
        self,
        name: str,
        requests: Sequence[bytes],
        rows: Sequence[int],
        watch: Watch,
        metadata: Metadata = (),
        positions: Sequence[int] = (),
        on_end: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> Iterator[bytes]:
        """One reply for each request, in order, or a Refusal.

        rows: how many texts each request has. positions: of the first text of each request among the caller's inputs,
        where they do not follow one another. on_end: called with the metadata of each call that was needed.
        """
        for request in requests:
            self.refuse_too_large(request)
        done, repeated_at = 0, -1
        while done < len(requests):
            unanswered = map(requests.__getitem__, range(done, len(requests)))
            channel = self.next_channel()
            waits = repeated_at == done and self.longest_secs is not None
            ask = channel.callable("stream_stream", name)
            call = TimedCall(ask(unanswered, metadata=metadata, wait_for_ready=waits))
            try:
                with watch(call.cancel):
                    for reply in self.replies_in_time(call, rows[done:]):
                        done += 1
                        if done > len(requests):
                            raise Refusal(Reason.INTERNAL, f"{name} answered more than its {len(requests)} requests")
                        yield reply
                on_end(dict((*call.call.initial_metadata(), *(call.call.trailing_metadata() or ()))))
                if done < len(requests):
                    raise Refusal(Reason.INTERNAL, f"{name} answered {done} of {len(requests)} requests")
            except grpc.RpcError as error:
                call.refuse_late()
                if repeated_at == done or not self.may_repeat(status_of(error), channel):
                    single = max(rows) == 1
                    offset = positions[done] if done < len(positions) else sum(rows[:done])
                    raise refusal_from_rpc(error, offset, 0 if single and len(rows) > 1 else None) from None
                repeated_at = done
            finally:
                call.cancel()

    def gather(self, name: str, requests: Sequence[bytes], watch: Watch, metadata: Metadata = ()) -> bytes:
        """The one reply to a stream of requests. Raises: Refusal."""
        for request in requests:
            self.refuse_too_large(request)
        for last in (False, True):
            channel = self.next_channel()
            waits = last and self.longest_secs is not None
            begin = channel.callable("stream_unary", name).future
            call = TimedCall(begin(iter(requests), metadata=metadata, wait_for_ready=waits))
            try:
                with watch(call.cancel), self.time_limit(call, len(requests)):
                    reply: bytes = call.call.result()
                    return reply
            except grpc.FutureCancelledError:
                call.refuse_late()
                raise Refusal(Reason.UNAVAILABLE, "The caller is gone") from None
            except grpc.RpcError as error:
                if last or not self.may_repeat(status_of(error), channel):
                    raise refusal_from_rpc(error) from None
        raise AssertionError  # not reached: the last try returns or raises

    def replies_in_time(self, call: TimedCall, rows: Sequence[int]) -> Iterator[bytes]:
        replies = iter(call.call)
        for due in rows:
            with self.time_limit(call, due):
                reply = next(replies, None)
            if reply is None:
                return
            yield reply
        yield from replies  # its end

    @contextmanager
    def time_limit(self, call: TimedCall, rows: int) -> Iterator[None]:
        if not self.longest_secs:
            yield
            return
        number = self.limits.begin(self.longest_secs * rows, call.give_up)
        try:
            yield
        finally:
            self.limits.end(number)

    def check(self) -> None:
        """Raises: Refusal unavailable unless the multiplexer serves."""
        call = self.next_channel().channel.unary_unary(HEALTH_CHECK)
        try:
            call(b"", timeout=RECONNECT_SECS)
        except grpc.RpcError as error:
            raise refusal_from_rpc(error) from None

    def may_repeat(self, status: Status, channel: MultiplexerChannel) -> bool:
        """Whether the connection was lost rather than the call refused, and a process is there for another try."""
        if status.code != Code.UNAVAILABLE or any(key == CODE_KEY for key, _ in status.trailers):
            return False
        channel.mark_lost()
        return self.next_channel().wait_until_up(RECONNECT_SECS)

    def refuse_too_large(self, request: bytes) -> None:
        if len(request) > self.max_message_bytes:
            raise Refusal(
                Reason.LARGE,
                f"An input of {len(request)} bytes is over what one message may have "
                f"({self.max_message_bytes}, grpc_max_message_size_mb): cut it",
            )


def status_of(error: grpc.RpcError) -> Status:
    return Status(error.code().value[0], error.details() or "", error.trailing_metadata() or ())


def refusal_from_failure(failure: CallFailed) -> Refusal:
    code, details, trailers = failure.status
    return refusal_from_status(STATUS.get(code, grpc.StatusCode.UNKNOWN), details, trailers)
