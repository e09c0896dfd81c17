"""One real request to one replica, with a deadline: what it answers, or why it counts as missed.

TEI's own health service stays green while its device hangs, so nothing less than an answer is taken for health.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from google.protobuf.message import DecodeError

from appliance.core import busy
from appliance.core.busy import Work
from appliance.core.health import ProbeResult
from appliance.core.program import LOOPBACK
from appliance.drivers.http2 import Connection
from appliance.drivers.scraping import metrics_page
from appliance.wire import exposition
from appliance.wire.calls import CallFailed, Code
from appliance.wire.tei.v1 import tei_pb2 as tei

METRICS_SECS = 0.75

Answer = dict[str, float]  # an answer's numbers, each under its name: a place, a token id or a label


class Late(Exception):
    """The deadline of a probe has passed."""


@dataclass
class ServedModel:
    """The model of one process. type: as its Info tells it; None until it was asked. A process keeps its model."""

    type: int | None = None


@dataclass(frozen=True)
class ProbeTarget:
    """Where to ask. sparse: it was started with splade pooling, which Info does not tell. proved: whether the replica
    itself listens on a port of its own; no other process is asked. model: what is remembered of the process."""

    port: int
    prometheus_port: int
    sparse: bool
    proved: Callable[[int], bool]
    model: ServedModel = field(default_factory=ServedModel)


@dataclass
class Heard:
    """What is remembered of one process from probe to probe, as `busy.late` wants it. Times are of time.monotonic."""

    calm: Work = Work()
    unanswered: int = 0
    last: Work | None = None
    silent_since: float | None = None
    model: ServedModel = field(default_factory=ServedModel)


def probe(replica: ProbeTarget, deadline_secs: float, heard: Heard) -> tuple[ProbeResult, str]:
    """One token's worth of its own task. Returns the outcome, and why it is not an answer."""
    before, began = progress(replica), time.monotonic()
    heard.unanswered += 1
    try:
        answer(replica, "a", began + deadline_secs)
    except Late:
        return late(replica, heard, before, began, f"no answer within {deadline_secs:g} s")
    except CallFailed as failure:
        code, details, _ = failure.status
        if code == Code.RESOURCE_EXHAUSTED:
            return refused(replica, heard, began, details)
        return ProbeResult.MISSED, details or f"gRPC status {int(code)}"
    except (OSError, ValueError) as error:
        return ProbeResult.MISSED, f"{type(error).__name__}: {error}"
    calm = before or Work()
    heard.calm, heard.last = replace(calm, begun=calm.begun + 1), before
    heard.unanswered, heard.silent_since = 0, None
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
    try:
        return parsed_answer(replica, text, until)
    except DecodeError as error:
        raise ValueError(f"its answer is no message of TEI: {error}") from error


def parsed_answer(replica: ProbeTarget, text: str, until: float) -> Answer:
    if replica.model.type is None:
        replica.model.type = tei.InfoResponse.FromString(ask(replica, "/tei.v1.Info/Info", b"", until)).model_type
    if replica.model.type != tei.MODEL_TYPE_EMBEDDING:
        request = tei.PredictRequest(inputs=text, truncate=True, raw_scores=True)
        raw = ask(replica, "/tei.v1.Predict/Predict", request.SerializeToString(), until)
        return {each.label: each.score for each in tei.PredictResponse.FromString(raw).predictions}
    if replica.sparse:
        sparse = tei.EmbedSparseRequest(inputs=text, truncate=True)
        raw = ask(replica, "/tei.v1.Embed/EmbedSparse", sparse.SerializeToString(), until)
        return {str(each.index): each.value for each in tei.EmbedSparseResponse.FromString(raw).sparse_embeddings}
    dense = tei.EmbedRequest(inputs=text, truncate=True, normalize=False)
    raw = ask(replica, "/tei.v1.Embed/Embed", dense.SerializeToString(), until)
    vector = tei.EmbedResponse.FromString(raw).embeddings
    if not vector:
        raise ValueError("its answer has no vector")
    return {str(at): value for at, value in enumerate(vector)}


def ask(replica: ProbeTarget, path: str, message: bytes, until: float) -> bytes:
    """One unary call on a connection of its own, so that accepting connections is part of what is proved.

    Raises: Late, CallFailed, OSError; ValueError also where another process listens.
    """

    def check() -> float:
        if (left := until - time.monotonic()) <= 0:
            raise Late
        return left

    line = Connection(f"{LOOPBACK}:{replica.port}")
    try:
        if not replica.proved(replica.port):
            raise ValueError(f"what listens on port {replica.port} is not this replica")
        left = max(1, int((until - time.monotonic()) * 1000))
        replies = list(line.replies(line.begin(path, (message,), [("grpc-timeout", f"{left}m")]), check))
    except CallFailed as failure:
        if failure.status.code == Code.DEADLINE_EXCEEDED:
            raise Late from failure
        raise
    finally:
        line.close()
    if len(replies) != 1:
        raise ValueError(f"{len(replies)} replies to one request")
    return replies[0]


def progress(replica: ProbeTarget) -> Work | None:
    """What the replica tells of its work; None when it does not."""
    if not replica.proved(replica.prometheus_port):
        return None
    page = metrics_page(replica.prometheus_port, METRICS_SECS)
    try:
        return exposition.work(page) if page is not None else None
    except ValueError:
        return None
