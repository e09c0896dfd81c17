"""Every way in which the gateway says no, and the multiplexer's refusals among them. Each dialect has its own words."""

from __future__ import annotations

import re
from enum import StrEnum

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
    NO_PATH = "no_path"
    METHOD = "method"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    INTERNAL = "internal"


class Refusal(Exception):
    """``retry_after_ms``: when trying again makes sense, where that is known. ``code``: the multiplexer's own."""

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


REASONS = {
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
# The multiplexer's codes that say more than the gRPC status.
CODES = {"TOO_LARGE": Reason.LARGE, "NOT_RUNNING": Reason.UNAVAILABLE}
OF_A_TEXT = (Reason.VALIDATION, Reason.EMPTY, Reason.TOKENIZER, Reason.BACKEND)  # what one text can be guilty of
ROW = re.compile(r"^Row \d+: ")
RETRY_UNKNOWN_MS = 1000  # TEI itself refuses without saying for how long


def refused(error: grpc.RpcError, offset: int = 0, row: int | None = None) -> Refusal:
    """A failed call as a refusal. offset: rows before those of this call; row: the one at fault, where known."""
    trailing = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    code = trailing.get(CODE_KEY, "")
    message = ROW.sub("", error.details() or error.code().name)
    reason = CODES.get(code) or REASONS.get(error.code(), Reason.INTERNAL)
    if reason is Reason.OVERLOADED and "larger than max" in message:  # grpc's own words; trying again is no help
        reason = Reason.LARGE
        if "CLIENT:" in message:  # it was not the request
            reason = Reason.INTERNAL
            message = "The answer is over what one message may have (grpc_max_message_size_mb): ask for less at once"
    if reason is Reason.VALIDATION and "cannot be empty" in message:
        reason = Reason.EMPTY
    if reason is Reason.BACKEND and message.lower().startswith("tokenizer error"):
        reason = Reason.TOKENIZER
    if (told := check.decimal(trailing.get(ROW_KEY, ""))) is not None:
        row = told
    if row is not None and not code and reason in OF_A_TEXT:
        message = f"{message} (input {offset + row})"
    retry: int | None = None
    if reason is Reason.OVERLOADED:
        told = check.decimal(trailing.get(RETRY_KEY, ""))
        retry = RETRY_UNKNOWN_MS if told is None else told
    return Refusal(reason, message, retry, code)
