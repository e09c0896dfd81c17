"""One real request to one replica, with a deadline: what it answers, or why it counts as missed.

TEI's own health service stays green while its device hangs, so nothing less than an answer is taken for health.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from appliance.core import busy
from appliance.core.addresses import address
from appliance.core.busy import Work
from appliance.core.health import ProbeResult
from appliance.core.program import LOOPBACK
from appliance.drivers.http2 import Connection
from appliance.drivers.scraping import metrics_page
from appliance.wire import exposition
from appliance.wire.calls import CallFailed, Code
from appliance.wire.tei.v1 import tei_pb2 as tei

METRICS_SECS = 0.75
LOOK_SECS = 60.0  # between two looks at the work of a replica that answers, and tells what is in progress
PATIENCE_SECS = 0.25  # without an answer it is looked at

QUESTION = "a"
PREDICT = "/tei.v1.Predict/Predict"

Answer = dict[str, float]  # an answer's numbers, each under its name: a place, a token id or a label
Said = tei.EmbedResponse | tei.EmbedSparseResponse | tei.EmbedAllResponse | tei.PredictResponse
# By the vectors that a model gives (`servable.vectors_of`): the path of the call, its messages.
EMBEDS: dict[str, tuple[str, type[Any], type[Said]]] = {
    "dense": ("/tei.v1.Embed/Embed", tei.EmbedRequest, tei.EmbedResponse),
    "sparse": ("/tei.v1.Embed/EmbedSparse", tei.EmbedSparseRequest, tei.EmbedSparseResponse),
    "tokens": ("/tei.v1.Embed/EmbedAll", tei.EmbedAllRequest, tei.EmbedAllResponse),
}


class Late(Exception):
    """The deadline of a probe has passed."""


@dataclass
class ServedModel:
    """The model of one process. type: as its Info tells it; None until it was asked. A process keeps its model.

    vectors: which ones it gives where it embeds, which Info does not tell.
    """

    type: int | None = None
    vectors: str = "dense"


class ProbeConnection:
    """A connection to a replica, made at the first call, and anew where it has ended. Who listens is proved each time
    after it was made: so the replica has accepted it, and nobody else answers on it as long as it lives."""

    def __init__(self, host: str, port: int, proved: Callable[[int], bool]) -> None:
        self.host = host
        self.port = port
        self.proved = proved
        self.connection: Connection | None = None

    def connected(self) -> Connection:
        """Raises: OSError; ValueError where another process listens."""
        if self.connection is None or not self.connection.idle:
            self.close()
            self.connection = Connection(address(self.host, self.port))
            if not self.proved(self.port):
                self.close()
                raise ValueError(f"what listens on port {self.port} is not this replica")
        return self.connection

    def close(self) -> None:
        if self.connection:
            self.connection.close()


@dataclass(frozen=True)
class ProbeTarget:
    """Where to ask. proved(port): whether the replica itself listens on a port of its own at this moment; no other
    process is asked. model: what is remembered of the process. shared: the connection of all calls of a block; None
    where each call has one of its own. host: an IP address."""

    port: int
    prometheus_port: int
    proved: Callable[[int], bool]
    model: ServedModel = field(default_factory=ServedModel)
    shared: ProbeConnection | None = None
    host: str = LOOPBACK

    def connect(self) -> None:
        """The shared connection, if there is none yet. Raises: as `ProbeConnection.connected`."""
        if self.shared:
            self.shared.connected()

    @contextmanager
    def on_one_connection(self) -> Iterator[ProbeTarget]:
        """In the block all calls go over one connection. It is a new one for each probe: that the replica accepts
        connections is part of what is proved, and one that is kept would not show it."""
        connection = ProbeConnection(self.host, self.port, self.proved)
        try:
            yield replace(self, shared=connection)
        finally:
            connection.close()


class Slow(NamedTuple):
    """act: what is done once during a call that has no answer ``at`` that time, of time.monotonic."""

    act: Callable[[], None]
    at: float


@dataclass
class Heard:
    """What is remembered of one process from probe to probe, as `busy.late` wants it. Times are of time.monotonic.

    looked_at: when its work was looked at before a probe that it answered.
    """

    calm: Work = Work()
    unanswered: int = 0
    last: Work | None = None
    silent_since: float | None = None
    looked_at: float = float("-inf")
    model: ServedModel = field(default_factory=ServedModel)

    def wants_look(self, now: float) -> bool:
        """Whether to look at its work before it is asked: always, unless it tells what is in progress."""
        return self.calm.running is None or now - self.looked_at >= LOOK_SECS

    def note_look(self, before: Work | None, at: float) -> None:
        """Its work right before a probe that it has answered; None where it did not tell."""
        calm = before or Work()
        self.calm, self.last, self.looked_at = replace(calm, begun=calm.begun + 1), before, at

    def note_answer(self) -> None:
        self.unanswered, self.silent_since = 0, None


def probe(replica: ProbeTarget, deadline_secs: float, heard: Heard) -> tuple[ProbeResult, str]:
    """One token's worth of its own task. Returns the outcome, and why it is not an answer."""
    heard.unanswered += 1
    before, began = None, time.monotonic()
    looks_before = heard.wants_look(began)

    def look() -> None:
        nonlocal before
        before = progress(replica)

    try:
        replica.connect()
        if looks_before:
            look()
        began = time.monotonic()
        slow = None if looks_before else Slow(look, began + min(PATIENCE_SECS, deadline_secs / 2))
        said(replica, QUESTION, began + deadline_secs, slow)
    except Late:
        return late(replica, heard, before, began, f"no answer within {deadline_secs:g} s")
    except CallFailed as failure:
        code, details, _ = failure.status
        if code == Code.RESOURCE_EXHAUSTED:
            return refused(replica, heard, began, details)
        return ProbeResult.MISSED, details or f"gRPC status {int(code)}"
    except (OSError, ValueError) as error:
        return ProbeResult.MISSED, f"{type(error).__name__}: {error}"
    if looks_before:
        heard.note_look(before, began)
    heard.note_answer()
    return ProbeResult.ANSWERED, ""


def refused(replica: ProbeTarget, heard: Heard, began: float, details: str) -> tuple[ProbeResult, str]:
    """All its permits are taken, and it counts no text for us (TEI 1.9). Busy, if its progress was known before."""
    earlier = heard.last
    heard.unanswered -= 1
    outcome = late(replica, heard, earlier, began, f"it refuses: {details}")
    return outcome if earlier and heard.last else (ProbeResult.BUSY, "")


def late(replica: ProbeTarget, heard: Heard, earlier: Work | None, began: float, why: str) -> tuple[ProbeResult, str]:
    """The result of a probe that was not answered. ``earlier``: the progress at the look before, if it was known."""
    heard.last = now = progress(replica)
    if now is None:
        return ProbeResult.MISSED, why
    if earlier and now.answered > earlier.answered:
        heard.unanswered, heard.silent_since = min(heard.unanswered, 1), time.monotonic()
    elif heard.silent_since is None:
        heard.silent_since = began
    silent_secs = time.monotonic() - heard.silent_since
    outcome, detail = busy.late(earlier, now, heard.calm, heard.unanswered, silent_secs)
    return outcome, "; ".join(part for part in (why, detail) if part) if outcome is ProbeResult.MISSED else ""


def answer(replica: ProbeTarget, text: str, until: float) -> Answer:
    """What the model says of ``text``, not normalised. Raises: Late, CallFailed, OSError, ValueError."""
    return numbers(said(replica, text, until))


def said(replica: ProbeTarget, text: str, until: float, slow: Slow | None = None) -> Said:
    """As `answer`, as TEI's message, which is whole."""
    try:
        if replica.model.type is None:
            replica.model.type = tei.InfoResponse.FromString(ask(replica, "/tei.v1.Info/Info", b"", until)).model_type
    except DecodeError as error:
        raise ValueError(f"its answer is no message of TEI: {error}") from error
    path, _ = task(replica.model)
    return message_of(replica.model, ask(replica, path, request(path, text), until, slow))


def message_of(model: ServedModel, raw: bytes) -> Said:
    """The answer to `task`. Raises: ValueError where it is none."""
    try:
        message = task(model)[1].FromString(raw)
    except DecodeError as error:
        raise ValueError(f"its answer is no message of TEI: {error}") from error
    if isinstance(message, tei.EmbedResponse) and not message.embeddings:
        raise ValueError("its answer has no vector")
    if isinstance(message, tei.EmbedAllResponse) and not message.token_embeddings:
        raise ValueError("its answer has no token vector")
    return message


def task(model: ServedModel) -> tuple[str, type[Said]]:
    """What is asked of it, whose type is known: the path, and the message that it answers with."""
    if model.type != tei.MODEL_TYPE_EMBEDDING:
        return PREDICT, tei.PredictResponse
    path, _, reply = EMBEDS[model.vectors]
    return path, reply


@lru_cache(64)
def request(path: str, text: str) -> bytes:
    """As it travels; there are few."""
    if path == PREDICT:
        return tei.PredictRequest(inputs=text, truncate=True, raw_scores=True).SerializeToString()
    message = next(message for each, message, _ in EMBEDS.values() if each == path)
    options = {"normalize": False} if message is tei.EmbedRequest else {}
    raw: bytes = message(inputs=text, truncate=True, **options).SerializeToString()
    return raw


def numbers(message: Said) -> Answer:
    if isinstance(message, tei.PredictResponse):
        return {each.label: each.score for each in message.predictions}
    if isinstance(message, tei.EmbedSparseResponse):
        return {str(each.index): each.value for each in message.sparse_embeddings}
    if isinstance(message, tei.EmbedAllResponse):
        return {str(at): value for at, value in enumerate(message.token_embeddings[0].embeddings)}
    return {str(at): value for at, value in enumerate(message.embeddings)}


def content(message: Said) -> bytes:
    """What the model has said, without what was measured meanwhile, which is deleted: equal bytes are equal numbers."""
    message.ClearField("metadata")
    return message.SerializeToString(deterministic=True)


def ask(replica: ProbeTarget, path: str, message: bytes, until: float, slow: Slow | None = None) -> bytes:
    """One unary call. Raises: Late, CallFailed, OSError; ValueError also where another process listens."""
    if replica.shared:
        return reply(replica.shared.connected(), path, message, until, slow)
    with replica.on_one_connection() as connected:
        return ask(connected, path, message, until, slow)


def reply(connection: Connection, path: str, message: bytes, until: float, slow: Slow | None = None) -> bytes:
    def check() -> float:
        nonlocal slow
        if slow and time.monotonic() >= slow.at:
            slow.act()
            slow = None
        now = time.monotonic()
        if now >= until:
            raise Late
        return min(until, slow.at if slow else until) - now

    left = max(1, int((until - time.monotonic()) * 1000))
    try:
        replies = list(connection.replies(connection.begin(path, (message,), [("grpc-timeout", f"{left}m")]), check))
    except CallFailed as failure:
        if failure.status.code == Code.DEADLINE_EXCEEDED:
            raise Late from failure
        raise
    if len(replies) != 1:
        raise ValueError(f"{len(replies)} replies to one request")
    return replies[0]


def progress(replica: ProbeTarget) -> Work | None:
    """What the replica tells of its work; None when it does not."""
    port = replica.prometheus_port
    if not replica.proved(port):
        return None
    return work_of(metrics_page(port, METRICS_SECS, exposition.WORK_PATH, replica.host))


def work_of(page: str | None) -> Work | None:
    """page: as of `scraping`."""
    try:
        return exposition.work(page) if page is not None else None
    except ValueError:
        return None
