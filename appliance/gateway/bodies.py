"""Request bodies: bounded before and after expansion, and read once.

A request whose body or whose texts are large needs one of a few permits, and keeps it until its answer is computed: so
the memory of a worker is bounded, however many such requests come at once. Its reservation stays until the answer is
sent, which takes as long as its client likes. Few may wait for a permit, as each of them has a thread.
"""

from __future__ import annotations

import errno
import tempfile
import threading
from typing import Any

import falcon
import orjson
import pyarrow as pa

from appliance.core.budget import BODY, ITEM
from appliance.core.problems import Problem
from appliance.drivers import memory
from appliance.gateway.refusals import Reason, Refusal

LARGEST_BYTES = 64 * 1024 * 1024
SMALL_BYTES = 1024 * 1024
LARGE_REQUESTS = 2  # in work at once, in each worker
LARGE_WAIT_SECS = 30.0
LARGE_WAITING = 16  # in each worker, a quarter of its threads: the others are for those who send little
MOST_NESTED = 4_000_000  # lists and objects of one body: each costs some 60 bytes once it is parsed
CODECS = {"gzip": "gzip", "x-gzip": "gzip", "lz4": "lz4", "zstd": "zstd"}  # HTTP's name -> pyarrow's
ARROW = "application/vnd.apache.arrow.stream"

large_permits = threading.BoundedSemaphore(LARGE_REQUESTS)
may_wait = threading.BoundedSemaphore(LARGE_WAITING)


class RequestMemory:
    """What one request may use of its worker's memory: its reservation and, where it is large, its permit."""

    def __init__(self, budget: memory.Reserve) -> None:
        self.budget = budget
        self.reservation = budget.reservation()
        self.has_permit = self.was_large = False

    def reserve(self, size: int, bounded: bool = True) -> None:
        """Raises: Refusal when there is no room for ``size`` bytes. bounded: see `Budget.book`."""
        try:
            self.reservation.grow(size, bounded)
        except Problem as problem:
            reason = Reason.LARGE if problem.retry_after_ms is None else Reason.OVERLOADED
            raise Refusal(reason, problem.message, problem.retry_after_ms) from None

    def acquire_large_permit(self) -> None:
        """Nothing where the request has it already. Raises: Refusal when none was free in time, or many wait."""
        if self.has_permit:
            return
        if not (large_permits.acquire(blocking=False) or waited_for_permit()):
            raise Refusal(Reason.OVERLOADED, f"{LARGE_REQUESTS} large requests are in work already: try again", 5000)
        self.has_permit = self.was_large = True

    def release_permit(self) -> None:
        """When nothing more is computed; may be called more than once."""
        if self.has_permit:
            self.has_permit = False
            trim()
            large_permits.release()

    def release(self) -> None:
        """Give back everything; may be called at any time, and more than once."""
        self.reservation.release()
        if self.has_permit:
            self.release_permit()
        elif self.was_large:
            trim()
        self.was_large = False


def waited_for_permit() -> bool:
    """Whether one was free in time, which is not waited for where many do."""
    if not may_wait.acquire(blocking=False):
        return False
    try:
        return large_permits.acquire(timeout=LARGE_WAIT_SECS)
    finally:
        may_wait.release()


def trim() -> None:
    """Give hundreds of megabytes back to the system."""
    pa.default_memory_pool().release_unused()
    memory.collect_and_trim()


def media_type(request: falcon.Request) -> str:
    return (request.content_type or "").partition(";")[0].strip().lower()


def read(request: falcon.Request) -> bytes:
    """The body, expanded. Raises: Refusal when it is too large, cut short, or not in the encoding that it names."""
    codec = codec_of(request)
    if (request.content_length or 0) > LARGEST_BYTES:
        raise too_large("The body")
    raw = receive(request)
    if codec is None:
        return raw
    try:
        with pa.CompressedInputStream(pa.BufferReader(raw), codec) as stream:
            head = stream.read(SMALL_BYTES + 1)
            if len(head) <= SMALL_BYTES:
                return bytes(head)
            request.context.memory.acquire_large_permit()
            plain = bytes(head + stream.read(LARGEST_BYTES + 1 - len(head)))
    except (pa.ArrowException, OSError) as error:
        raise Refusal(Reason.MALFORMED, f"The body is not {codec}, as Content-Encoding says: {error}") from None
    if len(plain) > LARGEST_BYTES:
        raise too_large("The body, expanded,")
    return plain


def codec_of(request: falcon.Request) -> str | None:
    encoding = (request.get_header("Content-Encoding") or "identity").strip().lower()
    if encoding == "identity":
        return None
    if encoding not in CODECS:
        raise Refusal(Reason.MEDIA, "Send the body as it is, or with Content-Encoding gzip, lz4 or zstd")
    return CODECS[encoding]


def receive(request: falcon.Request) -> bytes:
    """What the client sent. It is read in pieces, so that each has its own time to arrive (`drivers.httpserver`).

    A large body is collected in a file, and acquires its permit when it is complete: a slow sender blocks no other.
    """
    with tempfile.SpooledTemporaryFile(max_size=SMALL_BYTES) as spool:
        try:
            # Not bounded_stream: that takes a chunked body for an empty one.
            while spool.tell() <= LARGEST_BYTES and (piece := request.stream.read(SMALL_BYTES)):
                spool.write(piece)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise Refusal(Reason.OVERLOADED, "There is no room on disk for so large a body", 60_000) from None
            raise Refusal(Reason.MALFORMED, f"The body cannot be read: {error}") from None
        except Exception as error:  # the server's own, which have no common base
            raise Refusal(Reason.MALFORMED, f"The body cannot be read: {type(error).__name__} {error}") from None
        size = spool.tell()
        if size > LARGEST_BYTES:
            raise too_large("The body")
        if size < (request.content_length or 0):
            raise Refusal(Reason.MALFORMED, f"The body ended after {size} of {request.content_length} bytes")
        if size > SMALL_BYTES:
            request.context.memory.acquire_large_permit()
        spool.seek(0)
        return spool.read()


def too_large(what: str) -> Refusal:
    return Refusal(Reason.LARGE, f"{what} is over {LARGEST_BYTES // 1024 // 1024} MiB: send less at once")


def read_object(request: falcon.Request, any_type: bool = False) -> dict[str, Any]:
    """The body as a JSON object. any_type: whatever its Content-Type says. Raises: Refusal."""
    kind = media_type(request)
    if kind and not any_type and not (kind == "application/json" or kind.endswith("+json")):  # none is taken for JSON
        raise Refusal(Reason.MEDIA, "Expected request with `Content-Type: application/json`")
    raw = read(request)
    if raw.count(b"[") + raw.count(b"{") > MOST_NESTED:
        raise Refusal(Reason.LARGE, f"The body has over {MOST_NESTED} lists and objects: send less at once")
    request.context.memory.reserve(BODY * len(raw) + ITEM * sum(map(raw.count, b",[{")))
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refusal(Reason.MALFORMED, f"The body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refusal(Reason.SHAPE, "The body must be a JSON object")
    return body
