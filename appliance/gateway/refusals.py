"""Every way in which the gateway refuses a request. Each dialect renders a refusal in its own form.

A failed call to the multiplexer is classified by the code that came with it, and else by its gRPC status. TEI and grpc
send no codes: some of their refusals differ in their words only, which `UPSTREAM_WORDS` lists.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import grpc

from appliance.core import fields as check
from appliance.wire.envelope import CODE_KEY, RETRY_KEY, ROW_KEY


class Reason(StrEnum):
    MALFORMED = "malformed"  # not HTTP, not JSON, not the encoding it says
    SHAPE = "shape"  # JSON of another shape
    MEDIA = "media"  # content type or encoding that is not taken
    LARGE = "large"
    EMPTY = "empty"
    VALIDATION = "validation"
    TOKENIZER = "tokenizer"
    TOKEN_IDS = "token_ids"  # not taken here, or outside the vocabulary
    BACKEND = "backend"  # not what this model does, or the model failed
    OVERLOADED = "overloaded"
    NOT_FOUND = "not_found"  # the model
    NOT_CACHED = "not_cached"  # and nothing was to be computed
    FINGERPRINT = "fingerprint_differs"  # the vectors would not fit the caller's index
    NO_PATH = "no_path"
    METHOD = "method"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    INTERNAL = "internal"


class Refusal(Exception):
    """retry_after_ms: after how long to try again, where that is known. code: the multiplexer's, where it gave one."""

    def __init__(self, reason: Reason, message: str, retry_after_ms: int | None = None, code: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_ms = retry_after_ms
        self.code = code

    @property
    def headers(self) -> dict[str, str]:
        """Retry-After in whole seconds, as HTTP has it, and in milliseconds, as OpenAI's clients read it."""
        if self.reason is Reason.UNAUTHENTICATED:
            return {"WWW-Authenticate": "Bearer"}
        if self.retry_after_ms is None:
            return {}
        return {"Retry-After": str(-(-self.retry_after_ms // 1000)), "Retry-After-Ms": str(self.retry_after_ms)}


class ErrorForm(NamedTuple):
    """What a dialect answers for a reason. error_type None: in plain text."""

    status: int
    error_type: str | None


class ErrorResponse(NamedTuple):
    """A refusal as a dialect writes it."""

    status: int
    content_type: str
    body: bytes


CODES = {  # those that say more than the gRPC status
    "TOO_LARGE": Reason.LARGE,
    "NOT_RUNNING": Reason.UNAVAILABLE,
    "REPLACED": Reason.UNAVAILABLE,
    "NOT_CACHED": Reason.NOT_CACHED,
    "FINGERPRINT_DIFFERS": Reason.FINGERPRINT,
}
STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: Reason.VALIDATION,
    grpc.StatusCode.OUT_OF_RANGE: Reason.LARGE,  # how TEI's server refuses a message over its limit
    grpc.StatusCode.NOT_FOUND: Reason.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION: Reason.BACKEND,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.OVERLOADED,
    grpc.StatusCode.UNIMPLEMENTED: Reason.BACKEND,
    grpc.StatusCode.UNAVAILABLE: Reason.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: Reason.TIMEOUT,
    grpc.StatusCode.CANCELLED: Reason.UNAVAILABLE,
}


class UpstreamWords(NamedTuple):
    """What TEI or grpc says where its status alone stands for several reasons. message: what is said instead."""

    status_reason: Reason
    pattern: re.Pattern[str]
    reason: Reason
    message: str | None = None


# Of TEI 1.9 and grpc 1.80; the first that matches counts.
UPSTREAM_WORDS = (
    UpstreamWords(Reason.VALIDATION, re.compile("cannot be empty"), Reason.EMPTY),
    UpstreamWords(Reason.BACKEND, re.compile("^tokenizer error", re.IGNORECASE), Reason.TOKENIZER),
    UpstreamWords(
        Reason.OVERLOADED,
        re.compile("CLIENT:.*larger than max", re.DOTALL),  # the reply, not the request
        Reason.INTERNAL,
        "The answer is over what one message may have (grpc_max_message_size_mb): ask for less at once",
    ),
    UpstreamWords(Reason.OVERLOADED, re.compile("larger than max"), Reason.LARGE),  # trying again is no help
)
OF_A_TEXT = (Reason.VALIDATION, Reason.EMPTY, Reason.TOKENIZER, Reason.BACKEND)  # what a single text can cause
ROW = re.compile(r"^Row \d+: ")
RETRY_UNKNOWN_MS = 1000  # TEI refuses without saying for how long


def refusal_from_rpc(error: grpc.RpcError, offset: int = 0, row: int | None = None) -> Refusal:
    """A failed call of grpcio as a refusal. offset: rows before those of this call; row: the one at fault, where
    known."""
    return refusal_from_status(error.code(), error.details(), error.trailing_metadata() or (), offset, row)


def refusal_from_status(
    status: grpc.StatusCode,
    details: str,
    trailers: Sequence[tuple[str, str | bytes]],
    offset: int = 0,
    row: int | None = None,
) -> Refusal:
    """The end of a call as a refusal."""
    trailing = {key: value for key, value in trailers if isinstance(value, str)}
    code = trailing.get(CODE_KEY, "")
    message = ROW.sub("", details or status.name)
    reason = CODES.get(code) or STATUSES.get(status, Reason.INTERNAL)
    if not code and (words := known_words(reason, message)):
        reason, message = words.reason, words.message or message
    row = number_in(trailing, ROW_KEY, row)
    if row is not None and not code and reason in OF_A_TEXT:
        message = f"{message} (input {offset + row})"
    retry_ms = None
    if reason in (Reason.OVERLOADED, Reason.UNAVAILABLE):
        again = reason is Reason.OVERLOADED or code == "REPLACED"
        retry_ms = number_in(trailing, RETRY_KEY, RETRY_UNKNOWN_MS if again else None)
    return Refusal(reason, message, retry_ms, code)


def known_words(reason: Reason, message: str) -> UpstreamWords | None:
    matching = (words for words in UPSTREAM_WORDS if words.status_reason is reason and words.pattern.search(message))
    return next(matching, None)


def number_in(trailing: dict[str, str], key: str, default: int | None) -> int | None:
    number = check.decimal(trailing.get(key, ""))
    return default if number is None else number
