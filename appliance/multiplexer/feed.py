"""The messages of one client stream on their way to a replica, kept until they are answered.

A replica may go away in the middle: what it did not answer is then sent again, in order, to another, before the rest
of the stream. grpc reads a stream in a thread of its own, which may still be blocked on behalf of the call that died;
whatever it reads too late goes into a buffer, so that no message is lost between two calls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

import grpc

from appliance.core.problems import Kind, Problem, invalid
from appliance.drivers.tei import Backend
from appliance.multiplexer.addressing import Addressing
from appliance.multiplexer.gate import Gate
from appliance.multiplexer.progress import Progress
from appliance.wire.methods import Method


class Feed:
    """One client stream. The first message is read at once, for its target. Raises: Problem for an empty stream."""

    def __init__(
        self, method: Method, addressing: Addressing, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> None:
        self.addressing = addressing
        self.requests = requests
        first = next(requests, None)
        if first is None:
            raise invalid("Empty stream: send at least one message")
        self.target, inner = addressing.first(method, first, context)
        self.progress = Progress(cancel=lambda: None)
        self.problem: Problem | None = None
        self.unread = deque([inner])  # read from the client, not sent to a replica
        self.unanswered: deque[bytes] = deque()
        self.answered = 0
        self.count = 1
        self.turn = 0  # which call the stream is attached to
        self.backend: Backend | None = None
        self.gate: Gate | None = None
        self.reading = threading.Lock()
        self.lock = threading.Lock()

    def attach(self, backend: Backend, gate: Gate) -> Iterator[bytes]:
        """The messages for a call to ``backend``: what was not answered yet, then what follows."""
        with self.lock:
            self.turn += 1
            self.backend, self.gate = backend, gate
            self.unread.extendleft(reversed(self.unanswered))
            self.unanswered.clear()
            return self.messages(self.turn)

    def detach(self) -> None:
        """The call is over: nothing is owed by its backend any more."""
        with self.lock:
            self.turn += 1
            owed = len(self.unanswered)
            self.release(owed)
            self.progress.owed = 0

    def messages(self, turn: int) -> Iterator[bytes]:
        while True:
            try:
                inner = self.next_message(turn)
            except Problem as problem:
                self.problem = problem
                self.progress.cancel()
                return
            if inner is None:
                return
            yield inner

    def next_message(self, turn: int) -> bytes | None:
        """The next message of the call ``turn``; None at the end of the stream, or when that call is over."""
        if not self.unread and not self.read_one():
            return None
        gate = self.gate
        if gate is None or not gate.wait_bulk(1, gone=lambda: self.turn != turn):
            return None
        with self.lock:
            if self.turn != turn:
                gate.leave(bulk=1)
                return None
            inner = self.unread.popleft()
            self.unanswered.append(inner)
            self.progress.sent()
            if self.backend:
                self.backend.take(1)
            return inner

    def read_one(self) -> bool:
        """Wait for a message of the client, unless one is there meanwhile; False at the end of the stream."""
        with self.reading:
            if self.unread:
                return True
            try:
                raw = next(self.requests, None)
            except grpc.RpcError:  # the caller is gone; the cancellation goes its own way
                return False
            if raw is None:
                return False
            self.unread.append(self.addressing.following(raw, self.target, self.count))
            self.count += 1
            return True

    def received(self) -> None:
        """The oldest unanswered message was answered."""
        with self.lock:
            self.answered += 1
            self.progress.received()
            if self.unanswered:
                self.unanswered.popleft()
                self.release(1)

    def release(self, texts: int) -> None:
        if self.backend and self.gate and texts:
            self.backend.take(-texts)
            self.gate.leave(bulk=texts)

    def explain(self, timeout_secs: float) -> None:
        """Raises: the reason for which this side ended the call, if it did."""
        if self.problem:
            raise self.problem
        if self.progress.stalled:
            message = f"No answer for {timeout_secs:g} s from the replica (grpc_request_timeout_secs)"
            raise Problem(Kind.TIMEOUT, "TIMEOUT", message)
