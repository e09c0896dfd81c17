"""The requests of a stream on their way to the model, ahead of the replies."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any

import grpc

from appliance.core.problems import Kind, Problem
from appliance.engine.answers import Pending
from appliance.engine.intake import JointLane, Lane, Permits

log = logging.getLogger(__name__)
Begin = Callable[[Any, Lane], Pending]


class Feeder:
    """Reads a stream's requests ahead of its replies, as far as permits and the length of ``waiting`` allow.

    The texts of one message are queued together, so that they make one batch.
    """

    def __init__(
        self,
        begin: Callable[[bytes, Lane], Pending],
        requests: Iterator[Sequence[bytes]],
        waiting: queue.Queue[Sequence[Pending] | Problem | None],
        permits: Permits,
        single: bool,
    ) -> None:
        self.begin = begin
        self.requests = requests
        self.waiting = waiting
        self.closed = threading.Event()
        self.together = JointLane(permits, self.closed.is_set, single)
        self.begun: list[Pending] = []  # of the message that is read
        self.taken: Sequence[Pending] = ()  # by whoever writes the replies

    def feed(self) -> None:
        end: Problem | None = Problem(Kind.INTERNAL, "INTERNAL", "The engine has stopped reading the stream")
        try:
            for requests in self.requests:
                self.feed_together(requests)
            end = None
        except Problem as problem:
            end = problem
        except (CancelledError, grpc.RpcError):
            end = None  # the caller is gone; the RPC's own callback closes this feeder
        except Exception as error:
            log.exception("A stream cannot be read any further")
            end = Problem(Kind.INTERNAL, "INTERNAL", f"The engine failed with {type(error).__name__}: {error}")
        finally:  # also where the tokenizer panics: the stream would wait for ever
            cancel(self.begun)
            if end:
                self.put(end)
            self.put(None)
            del end  # its traceback has this frame

    def feed_together(self, requests: Iterable[bytes]) -> None:
        """Raises: Problem of the first that is refused; those before it are answered."""
        try:
            for raw in requests:
                self.begun.append(self.begin(raw, self.together))
        except Problem:
            if self.begun:
                self.pass_on()
            raise
        self.pass_on()

    def pass_on(self) -> None:
        self.together.flush()
        begun, self.begun = self.begun, []
        self.put(begun)

    def put(self, entry: Sequence[Pending] | Problem | None) -> None:
        while not self.closed.is_set():
            try:
                self.waiting.put(entry, timeout=0.5)
                return
            except queue.Full:
                continue
        cancel(entry)

    def close(self) -> None:
        """The stream has no reader any more: cancel the entries that wait, and wake the thread that waits for one."""
        self.closed.set()
        cancel(self.taken)
        while True:
            try:
                entry = self.waiting.get_nowait()
            except queue.Empty:
                break
            cancel(entry)
        try:
            self.waiting.put_nowait(None)
        except queue.Full:
            pass


def cancel(entry: Sequence[Pending] | Problem | None) -> None:
    """What waits for its reply, if it is that."""
    if entry and not isinstance(entry, Problem):
        for pending in entry:
            pending.cancel()
