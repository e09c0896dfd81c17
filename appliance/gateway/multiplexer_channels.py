"""The multiplexer as the gateway calls it: serialized requests in, serialized replies out, failures as Refusals.

A multiplexer process that dies takes its calls along; all of them may be repeated, so each is, once, as soon as
another process answers. A batch goes on where its replies ended. The second try waits for its connection: the process
that has just been seen to listen may be the one that is dying.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from appliance.drivers.grpccalls import STATUS, TimeLimits
from appliance.gateway.channel import HEALTH_CHECK, RECONNECT_POLL_SECS, ChannelReply, Metadata, MultiplexerChannel
from appliance.gateway.refusals import Reason, Refusal, refusal_from_rpc, refusal_from_status
from appliance.gateway.whole_answer import WholeAnswer
from appliance.wire.calls import CallFailed, Code, Status
from appliance.wire.envelope import CODE_KEY

RECONNECT_SECS = 15.0  # a start takes a second or two, and more where the cores are busy
Watch = Callable[[Callable[[], object]], Any]  # what to call when the caller goes -> a context manager


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
        self.lane = MultiplexerChannel(lane, options, is_lane=True) if lane else None
        self.turns = itertools.count()
        self.limits = TimeLimits()

    def close(self) -> None:
        """No call may be made afterwards."""
        for channel in (*self.channels, *([self.lane] if self.lane else [])):
            channel.close()

    def next_channel(self) -> MultiplexerChannel:
        """The channels in turn; those whose process is away only if no other is there."""
        first = next(self.turns) % len(self.channels)
        candidates = self.channels[first:] + self.channels[:first]
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
        whole: WholeAnswer | None = None,
    ) -> Iterator[bytes]:
        """One reply for each request, in order, or a Refusal.

        rows: how many texts each request has. positions: of the first text of each request among the caller's inputs,
        where they do not follow one another. on_end: called with the metadata of each call that was needed. whole: the
        answer of which the replies are a part; it is refused as REPLACED where they cannot be.
        """
        for request in requests:
            self.refuse_too_large(request)
        done, repeated_at = 0, -1
        while done < len(requests):
            unanswered = map(requests.__getitem__, range(done, len(requests)))
            channel = self.next_channel()
            waits = repeated_at == done and self.longest_secs is not None
            ask = channel.callable("stream_stream", name)
            told = (*metadata, *(whole.metadata if whole else ()))
            call = TimedCall(ask(unanswered, metadata=told, wait_for_ready=waits))
            try:
                with watch(call.cancel):
                    for reply in self.replies_in_time(call, rows[done:]):
                        done += 1
                        if done > len(requests):
                            raise Refusal(Reason.INTERNAL, f"{name} answered more than its {len(requests)} requests")
                        if whole:
                            whole.learn(call.call)
                        yield reply
                on_end(dict((*call.call.initial_metadata(), *(call.call.trailing_metadata() or ()))))
                if done < len(requests):
                    raise Refusal(Reason.INTERNAL, f"{name} answered {done} of {len(requests)} requests")
            except grpc.RpcError as error:
                call.refuse_late()
                if repeated_at == done or not self.may_repeat(status_of(error), channel):
                    single = max(rows) == 1
                    offset = positions[done] if done < len(positions) else sum(rows[:done])
                    raise refusal_from_rpc(
                        error, offset, 0 if single and (positions or len(rows) > 1) else None
                    ) from None
                repeated_at = done
            finally:
                call.cancel()

    def gather(
        self,
        name: str,
        requests: Sequence[bytes],
        watch: Watch,
        metadata: Metadata = (),
        whole: WholeAnswer | None = None,
    ) -> bytes:
        """The one reply to a stream of requests. whole: as for `stream`. Raises: Refusal."""
        for request in requests:
            self.refuse_too_large(request)
        for last in (False, True):
            channel = self.next_channel()
            waits = last and self.longest_secs is not None
            begin = channel.callable("stream_unary", name).future
            told = (*metadata, *(whole.metadata if whole else ()))
            call = TimedCall(begin(iter(requests), metadata=told, wait_for_ready=waits))
            try:
                with watch(call.cancel), self.time_limit(call, len(requests)):
                    reply: bytes = call.call.result()
                if whole:
                    whole.learn(call.call)
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
        number = self.limits.begin(self.longest_secs * max(1, rows), call.give_up)
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
