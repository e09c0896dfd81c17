"""The same questions to many replicas at once, in one thread: those that are well answer them within some milliseconds.

A thread that probes ten replicas, one after the other, is woken up for each of them, and asks the kernel for each who
listens. That took 0.59 ms of CPU a replica, and takes 0.36 where all are asked at once (2 cores).
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing

from appliance.core import busy
from appliance.core.addresses import address
from appliance.core.busy import Work
from appliance.core.program import LOOPBACK
from appliance.drivers.http2 import Connection
from appliance.drivers.scraping import metrics_pages
from appliance.node.context import Node
from appliance.node.probe import PATIENCE_SECS, QUESTION, Heard, Said, message_of, request, task, work_of
from appliance.wire.calls import CallFailed, Code, Metadata, timeout_header
from appliance.wire.exposition import WORK_PATH


class Questions:
    """To one replica, the type of whose model is known: ``texts`` where there are some, whose answers prove as much as
    that to the question of a probe, else that. marker: of its process. heard: of that, as `probe` remembers it.
    answered: all of them, the texts by ``messages``."""

    def __init__(self, port: int, prometheus_port: int, marker: str, heard: Heard, texts: Sequence[str] = ()) -> None:
        self.port = port
        self.prometheus_port = prometheus_port
        self.marker = marker
        self.heard = heard
        self.texts = texts
        self.messages: list[Said] = []
        self.answered = False
        self.before: Work | None = None  # its work, where it was looked at
        self.probed = False  # the first question is answered

    def connect(self) -> Connection:
        """A new one, as for `probe`. Raises: OSError."""
        self.connection = Connection(address(LOOPBACK, self.port))
        return self.connection

    def begin(self) -> None:
        self.began = time.monotonic()
        self.send(self.texts[0] if self.texts else QUESTION)
        self.heard.unanswered += 1

    def send(self, text: str) -> None:
        path, _ = task(self.heard.model)
        self.replies: list[bytes] = []
        timeout: Metadata = [("grpc-timeout", timeout_header(2 * PATIENCE_SECS))]  # it is we who do not wait any longer
        self.call = self.connection.begin(path, (request(path, text),), timeout)

    def have_ended(self) -> bool:
        """Without waiting for it: all are answered, or one of them will not be."""
        try:
            while not self.answered:
                self.replies += self.call.messages(self.connection.exchange(lambda: 0.0, None))
                if self.call.status is None:
                    return False
                self.go_on()
        except (CallFailed, OSError, ValueError) as error:
            given_up = isinstance(error, CallFailed) and error.status.code in (Code.DEADLINE_EXCEEDED, Code.CANCELLED)
            if not self.probed and not given_up:
                self.heard.unanswered -= 1  # it is not in progress there
        return True

    def go_on(self) -> None:
        """After an answer. Raises: ValueError where it is none."""
        self.connection.end(self.call)
        (raw,) = self.replies
        message = message_of(self.heard.model, raw)
        if not self.probed:
            self.note_answer()
        if self.texts:
            self.messages.append(message)
        self.answered = len(self.messages) == len(self.texts)
        if not self.answered:
            if not self.connection.idle:
                raise ValueError("its connection takes no other call")
            self.send(self.texts[len(self.messages)])

    def note_answer(self) -> None:
        """To the first question."""
        if self.before:
            self.heard.note_look(self.before, self.began)
        self.heard.note_answer()
        self.probed = True


def ask_together(node: Node, asked: Sequence[Questions]) -> None:
    """Where not all is answered then, the replica is to be asked alone, by `probe`.

    Blocks for as long as the slowest takes, some half a second where one does not answer, and a second more where one
    accepts no connection.
    """
    with ExitStack() as connections:
        connected = list(connect(asked, connections))
        table = node.listening()  # whoever has accepted a connection listened until then
        proved = [each for each in connected if node.listeners.proved(each.port, each.marker, table)]
        metered = [each for each in proved if node.listeners.proved(each.prometheus_port, each.marker, table)]
        wait_for_answers(look_before(proved, metered))


def connect(asked: Sequence[Questions], connections: ExitStack) -> Iterator[Questions]:
    """Those whose replica listens."""
    for each in asked:
        try:
            connections.enter_context(closing(each.connect()))
        except TimeoutError:  # a second is over: the others are not kept waiting any longer
            return
        except OSError:
            continue
        yield each


def look_before(asked: Sequence[Questions], metered: Sequence[Questions]) -> list[Questions]:
    """Those that are not looked at now, or told that they may answer at once. metered: whose port of metrics is proved
    to be its own.

    TEI does not tell what is in progress. What we leave unanswered there counts in what is inferred (`busy.late`), so
    it is asked here only where it has nothing to do.
    """
    now = time.monotonic()
    others = [each for each in asked if not each.heard.wants_look(now)]
    looked_at = [each for each in metered if each.heard.wants_look(now)]
    pages = metrics_pages([each.prometheus_port for each in looked_at], PATIENCE_SECS, WORK_PATH)
    for each, page in zip(looked_at, pages, strict=True):
        each.before = work_of(page)
    return [*others, *(each for each in looked_at if each.before and may_answer(each.heard, each.before))]


def may_answer(heard: Heard, now: Work) -> bool:
    return now.running is not None or busy.others(now, heard.calm, heard.unanswered) <= 0


def wait_for_answers(asked: Sequence[Questions]) -> None:
    poll, waiting = select.poll(), dict[int, Questions]()
    for each in asked:
        each.begin()
        if not each.have_ended():
            waiting[each.connection.socket.fileno()] = each
            poll.register(each.connection.socket, select.POLLIN)
    until = time.monotonic() + PATIENCE_SECS
    while waiting and (left := until - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(left * 1000):
            if waiting[descriptor].have_ended():
                poll.unregister(descriptor)
                del waiting[descriptor]
