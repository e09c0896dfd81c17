"""The multiplexer as the gateway calls it: serialized requests in, serialized replies out, failures as Refusals.

A multiplexer process that dies takes its calls along; all of them may be repeated, so each is, once, as soon as
another process answers. A batch goes on where its replies ended.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from appliance.drivers.grpcserver import Patience
from appliance.gateway.refusals import Reason, Refusal, refusal_from_rpc
from appliance.wire.envelope import CODE_KEY, INSTANCE_KEY
from appliance.wire.methods import MULTIPLEXER

RECONNECT_SECS = 5.0
Metadata = Sequence[tuple[str, str]]
Watch = Callable[[Callable[[], object]], Any]  # what to call when the caller goes -> a context manager


class Line:
    """The channel to one multiplexer process, and whether it is there.

    Nothing watches the channel while all is well: grpc would tell its last state, and that of a process that was just
    killed is still "ready" for a moment.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.back: grpc.Future | None = None  # while the process is away
        self.calls: dict[tuple[str, str], Any] = {}
        self.lock = threading.Lock()

    @property
    def up(self) -> bool:
        return self.back is None

    def lost(self) -> None:
        """Its connection has just broken."""
        with self.lock:
            if self.back is None:
                self.back = grpc.channel_ready_future(self.channel)
                self.back.add_done_callback(self.returned)

    def returned(self, future: grpc.Future) -> None:
        self.back = None

    def comes_up(self, within_secs: float) -> bool:
        back = self.back
        try:
            return back is None or back.result(timeout=within_secs) is None
        except grpc.FutureTimeoutError:
            return False

    def method(self, kind: str, name: str) -> Any:
        """The multicallable of grpcio's channel; ``kind`` is its name there."""
        with self.lock:
            if (kind, name) not in self.calls:
                self.calls[kind, name] = getattr(self.channel, kind)(f"/{MULTIPLEXER}/{name}")
            return self.calls[kind, name]


class Timely:
    """A call, and whether it was given up because nothing came."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.cancel = call.cancel
        self.late = False

    def give_up(self) -> None:
        self.late = True
        self.cancel()

    def explain(self) -> None:
        if self.late:
            raise Refusal(Reason.TIMEOUT, "The multiplexer does not answer in time: its log may say why")


class Upstream:
    """longest_secs bounds a unary call, and in a stream the wait for a reply, once for each row of its request.

    That is long where a request has many rows; but the multiplexer ends by itself what does not move, and pings tell
    that it lives.
    """

    def __init__(self, addresses: Sequence[str], max_message_bytes: int, longest_secs: float | None) -> None:
        """addresses: of the multiplexer processes, which take calls in turn."""
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
        self.lines = [Line(grpc.insecure_channel(address, options)) for address in addresses]
        self.turns = itertools.cycle(self.lines)
        self.lock = threading.Lock()
        self.patience = Patience()

    def line(self) -> Line:
        """The next process in turn, those that are away left out as long as another is there."""
        with self.lock:
            asked = [next(self.turns) for _ in self.lines]
        return next((line for line in asked if line.up), asked[0])

    def unary(self, name: str, request: bytes) -> tuple[bytes, str | None]:
        """(reply, the instance that answered, as far as it is told). Raises: Refusal."""
        self.refuse_too_large(request)
        line = self.line()
        try:
            reply, ended = line.method("unary_unary", name).with_call(request, timeout=self.longest_secs)
        except grpc.RpcError as error:
            if not self.may_repeat(error, line):
                raise refusal_from_rpc(error) from None
            call = self.line().method("unary_unary", name)
            try:
                reply, ended = call.with_call(request, timeout=self.longest_secs)
            except grpc.RpcError as again:
                raise refusal_from_rpc(again) from None
        return reply, dict(ended.initial_metadata()).get(INSTANCE_KEY)

    def stream(
        self,
        name: str,
        requests: Sequence[bytes],
        rows: Sequence[int],
        watch: Watch,
        metadata: Metadata = (),
        places: Sequence[int] = (),
    ) -> Iterator[bytes]:
        """One reply for each request, in order, or a Refusal.

        rows: how many texts each request has. places: of each one's first text among the inputs, if others are between.
        """
        for request in requests:
            self.refuse_too_large(request)
        done, repeated_at = 0, -1
        while done < len(requests):
            unanswered = map(requests.__getitem__, range(done, len(requests)))
            line = self.line()
            call = Timely(line.method("stream_stream", name)(unanswered, metadata=metadata))
            try:
                with watch(call.cancel):
                    for reply in self.in_time(call, rows[done:]):
                        done += 1
                        if done > len(requests):
                            raise Refusal(Reason.INTERNAL, f"{name} answered more than its {len(requests)} requests")
                        yield reply
                if done < len(requests):
                    raise Refusal(Reason.INTERNAL, f"{name} answered {done} of {len(requests)} requests")
            except grpc.RpcError as error:
                call.explain()
                if repeated_at == done or not self.may_repeat(error, line):
                    single = max(rows) == 1
                    offset = places[done] if done < len(places) else sum(rows[:done])
                    raise refusal_from_rpc(error, offset, 0 if single and len(rows) > 1 else None) from None
                repeated_at = done
            finally:
                call.cancel()

    def gather(self, name: str, requests: Sequence[bytes], watch: Watch) -> bytes:
        """The one reply to a stream of requests. Raises: Refusal."""
        for request in requests:
            self.refuse_too_large(request)
        for last in (False, True):
            line = self.line()
            call = Timely(line.method("stream_unary", name).future(iter(requests)))
            try:
                with watch(call.cancel), self.limit(call, len(requests)):
                    reply: bytes = call.call.result()
                    return reply
            except grpc.FutureCancelledError:
                call.explain()
                raise Refusal(Reason.UNAVAILABLE, "The caller is gone") from None
            except grpc.RpcError as error:
                if last or not self.may_repeat(error, line):
                    raise refusal_from_rpc(error) from None
        raise AssertionError  # not reached: the last turn returns or raises

    def in_time(self, call: Timely, rows: Sequence[int]) -> Iterator[bytes]:
        replies = iter(call.call)
        for due in rows:
            with self.limit(call, due):
                reply = next(replies, None)
            if reply is None:
                return
            yield reply
        yield from replies  # its end

    @contextmanager
    def limit(self, call: Timely, rows: int) -> Iterator[None]:
        if not self.longest_secs:
            yield
            return
        number = self.patience.begin(self.longest_secs * rows, call.give_up)
        try:
            yield
        finally:
            self.patience.over(number)

    def check(self) -> None:
        """Raises: Refusal unavailable unless the multiplexer serves."""
        call = self.line().channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            call(b"", timeout=RECONNECT_SECS)
        except grpc.RpcError as error:
            raise refusal_from_rpc(error) from None

    def may_repeat(self, error: grpc.RpcError, line: Line) -> bool:
        """Whether the connection was lost, not the call refused, and there is another one."""
        trailing = {key for key, _ in error.trailing_metadata() or ()}
        if error.code() is not grpc.StatusCode.UNAVAILABLE or CODE_KEY in trailing:
            return False
        line.lost()
        return self.line().comes_up(RECONNECT_SECS)

    def refuse_too_large(self, request: bytes) -> None:
        if len(request) > self.max_message_bytes:
            raise Refusal(
                Reason.LARGE,
                f"An input of {len(request)} bytes is over what one message may have "
                f"({self.max_message_bytes}, grpc_max_message_size_mb): cut it",
            )
