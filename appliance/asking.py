"""One real request to one replica, with a deadline: what it answers, or why it counts as missed.

TEI's own health service stays green while its device hangs, so nothing less than an answer is taken for health.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import requests

from appliance.core.health import Probe
from appliance.core.program import LOOPBACK
from appliance.drivers.http2 import CallFailed, Connection
from appliance.wire import vectors
from appliance.wire.tei.v1 import tei_pb2 as tei

METRICS_SECS = 0.5
RESOURCE_EXHAUSTED = 8
DEADLINE_EXCEEDED = 4
COUNTERS = re.compile(r"^te_(?:embed|predict|request)_success(?:\{[^}]*\})? ([0-9.e+]+)$", re.M)

Answer = dict[str, float]  # an answer's numbers, each under its name: a place, a token id or a label


class Late(Exception):
    """The deadline of a probe has passed."""


@dataclass(frozen=True)
class Replica:
    """Where to ask. sparse: it was started with splade pooling, which Info does not tell."""

    port: int
    prometheus_port: int
    sparse: bool


def probe(replica: Replica, deadline_secs: float) -> tuple[Probe, str]:
    """One token's worth of its own task. Returns the outcome, and why it is not an answer."""
    before = progress(replica)
    try:
        answer(replica, "a", time.monotonic() + deadline_secs)
    except Late:
        after = progress(replica)
        if before is not None and after is not None and after > before:
            return Probe.BUSY, ""
        return Probe.MISSED, f"no answer within {deadline_secs:g} s"
    except CallFailed as failure:
        if failure.code == RESOURCE_EXHAUSTED:
            return Probe.BUSY, ""
        return Probe.MISSED, failure.details or f"gRPC status {failure.code}"
    except (OSError, ValueError) as error:
        return Probe.MISSED, f"{type(error).__name__}: {error}"
    return Probe.ANSWERED, ""


def answer(replica: Replica, text: str, until: float) -> Answer:
    """What the model says of ``text``, not normalised. Raises: Late, CallFailed, OSError, ValueError."""
    told = tei.InfoResponse.FromString(ask(replica.port, "/tei.v1.Info/Info", b"", until))
    if told.model_type != tei.MODEL_TYPE_EMBEDDING:
        request = tei.PredictRequest(inputs=text, truncate=True, raw_scores=True)
        raw = ask(replica.port, "/tei.v1.Predict/Predict", request.SerializeToString(), until)
        return {each.label: each.score for each in tei.PredictResponse.FromString(raw).predictions}
    if replica.sparse:
        sparse = tei.EmbedSparseRequest(inputs=text, truncate=True)
        raw = ask(replica.port, "/tei.v1.Embed/EmbedSparse", sparse.SerializeToString(), until)
        return {str(each.index): each.value for each in tei.EmbedSparseResponse.FromString(raw).sparse_embeddings}
    dense = tei.EmbedRequest(inputs=text, truncate=True, normalize=False)
    vector, _ = vectors.unpack(ask(replica.port, "/tei.v1.Embed/Embed", dense.SerializeToString(), until))
    return {str(at): value for at, value in enumerate(vector.tolist())}


def ask(port: int, path: str, message: bytes, until: float) -> bytes:
    """One unary call on a connection of its own, so that accepting connections is part of what is proved."""

    def check() -> float:
        if (left := until - time.monotonic()) <= 0:
            raise Late
        return left

    line = Connection(f"{LOOPBACK}:{port}")
    try:
        left = max(1, int((until - time.monotonic()) * 1000))
        replies = list(line.replies(line.begin(path, (message,), [("grpc-timeout", f"{left}m")]), check))
    except CallFailed as failure:
        if failure.code == DEADLINE_EXCEEDED:
            raise Late from failure
        raise
    finally:
        line.close()
    if len(replies) != 1:
        raise ValueError(f"{len(replies)} replies to one request")
    return replies[0]


def progress(replica: Replica) -> float | None:
    """How many answers the replica counts in its metrics; None when it does not tell."""
    try:
        with requests.Session() as session:
            session.trust_env = False
            url = f"http://{LOOPBACK}:{replica.prometheus_port}/metrics"
            text = session.get(url, timeout=METRICS_SECS).text
    except requests.RequestException:
        return None
    return sum(map(float, COUNTERS.findall(text)))
