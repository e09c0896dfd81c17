"""The caller of a relayed call, as grpc has it: its metadata and deadline go to the replica, and its call ends as the
replica's does.
"""

from __future__ import annotations

import time
from typing import NoReturn

import grpc

from appliance.core.access import CREDENTIALS
from appliance.core.problems import Kind, Problem
from appliance.drivers.grpccalls import LOOK_SECS, STATUS, abort
from appliance.drivers.tei import Backend
from appliance.wire.calls import CallFailed, Code, Metadata, timeout_header
from appliance.wire.envelope import (
    CACHE_KEY,
    CERTIFICATE_KEY,
    CODE_KEY,
    EXPECT_KEY,
    EXPRESS_KEY,
    HOP_KEY,
    INSTANCE_KEY,
    IS_WHOLE,
    LANE_KEY,
    MODEL_KEY,
    REPLICA_UNAVAILABLE,
    SCOPE_KEY,
    WAIT_KEY,
    WHOLE_KEY,
)
from appliance.wire.served_calls import CONNECTIONS_OWN

# Ours to read, or the transport's to set: everything else of the caller's metadata goes along.
OWN_METADATA = CONNECTIONS_OWN | {
    *(INSTANCE_KEY, MODEL_KEY, HOP_KEY, EXPRESS_KEY, CERTIFICATE_KEY, CACHE_KEY, EXPECT_KEY, SCOPE_KEY, WAIT_KEY),
    *(LANE_KEY, WHOLE_KEY, *CREDENTIALS, "user-agent", "content-type", "te"),
}
# Without a code an end as UNAVAILABLE is that of this multiplexer itself, and the gateway asks another process.
REPLICA_AWAY = (CODE_KEY, REPLICA_UNAVAILABLE)
COMPUTED_ANEW = ("bypass", "refresh")  # of x-tei-cache
LONGEST_WAIT_SECS = 10**7  # grpc reports "no deadline" as some centuries
OVERLOADED = "overloaded"  # in TEI's words for a call over its max_concurrent_requests
SECOND_REPLICA_SECS = 3.0  # so long a suspect waits for a second replica, rather than be tried on the last one


class ReplicaDied(CallFailed):
    """The replica went away with the call in work."""


class WrongAnswer(CallFailed):
    """The replica's answer cannot be right."""


def time_left(context: grpc.ServicerContext) -> float | None:
    """Seconds to the caller's deadline; None where there is none."""
    remaining = context.time_remaining()
    return remaining if remaining is not None and remaining < LONGEST_WAIT_SECS else None


def metadata_for_peer(context: grpc.ServicerContext) -> Metadata:
    """What a peer has to know of a call: whether it may wait there, that it is to be computed anew there, too, and that
    its replies are of one generation, whose number is another one there."""
    said = context.invocation_metadata()
    kept = [(key, value) for key, value in said if key == WAIT_KEY or (key == CACHE_KEY and value in COMPUTED_ANEW)]
    return kept + [(WHOLE_KEY, IS_WHOLE) for key, _ in said if key == WHOLE_KEY][:1]


def metadata_for_replica(context: grpc.ServicerContext, seconds: float | None, is_peer: bool) -> Metadata:
    """The caller's metadata that concerns the replica, traces and the like, and what is left of its time."""
    metadata = [
        (key, value)
        for key, value in context.invocation_metadata()
        if key not in OWN_METADATA and not key.startswith(("grpc-", ":"))
    ]
    if is_peer:
        metadata += metadata_for_peer(context)
    if seconds is not None:
        metadata.append(("grpc-timeout", timeout_header(seconds)))
    return metadata


def end_as(context: grpc.ServicerContext, backend: Backend, failure: CallFailed) -> NoReturn:
    """End the caller's call as the replica's call ended. Raises: Problem of a wrong answer."""
    code, details, trailers = failure.status
    if isinstance(failure, WrongAnswer):
        raise wrong_answer(backend, details)
    if not failure.answered:
        replica = backend.replica
        details = f'Replica {replica.index} of "{replica.instance}" does not answer, see its logs: {details}'
    if code == Code.UNAVAILABLE and all(key != CODE_KEY for key, _ in trailers):
        trailers = (*trailers, REPLICA_AWAY)
    abort(context, STATUS.get(code, grpc.StatusCode.UNKNOWN), details, trailers)


def wrong_answer(backend: Backend, why: object) -> Problem:
    replica = backend.replica
    words = f'Replica {replica.index} of "{replica.instance}" answered, but {why}'
    return Problem(Kind.INTERNAL, "WRONG_ANSWER", words)


def is_full(failure: CallFailed) -> bool:
    """Whether the replica has no place for the call. What is too large for it is exhausted, too, and stays so."""
    return failure.status.code == Code.RESOURCE_EXHAUSTED and OVERLOADED in failure.status.details


def trial_limits(context: grpc.ServicerContext) -> tuple[float, float]:
    """Until when a suspect may be tried again, and until when not on the last replica; of time.monotonic."""
    left = time_left(context)
    longest = LOOK_SECS if left is None else left
    return time.monotonic() + longest, time.monotonic() + min(SECOND_REPLICA_SECS, longest / 2)
