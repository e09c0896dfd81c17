"""Answers: JSON written from float32 arrays without Python floats in between, and the headers that say what it cost.

orjson writes float32 in its shortest form, as TEI does. It would write NaN as null, but no NaN comes so far
(`gateway/multiplexer_replies.py`). A long answer is sent in pieces, so that its text, ten times the size of its
numbers, is never in memory as a whole; it begins only when every row is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import falcon
import numpy as np
import orjson

from appliance.gateway.bodies import RequestMemory
from appliance.gateway.multiplexer_calls import WHOLE_ROWS, ResponseUsage

PIECE_ROWS = 256


def dumps(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


class StreamedAnswer:
    """A long answer on its way. What it was computed with is free when the first piece goes; the server closes it after
    the last one, which releases its request's memory."""

    def __init__(self, pieces: Iterator[bytes], memory: RequestMemory) -> None:
        self.pieces = pieces
        self.memory = memory

    def __iter__(self) -> Iterator[bytes]:
        self.memory.release_permit()
        return self.pieces

    def close(self) -> None:
        self.memory.release()


def send_json(
    request: falcon.Request, response: falcon.Response, usage: ResponseUsage, pieces: Iterator[bytes], rows: int
) -> None:
    """A JSON answer of ``rows`` rows with its headers."""
    response.content_type = falcon.MEDIA_JSON
    for name, value in headers(usage).items():
        response.set_header(name, value)
    if rows <= WHOLE_ROWS:
        response.data = b"".join(pieces)
    else:
        memory = request.context.memory
        response.stream = StreamedAnswer(pieces, memory)  # which releases it, and not the end of the request
        request.context.memory = RequestMemory(memory.budget)


def whole(request: falcon.Request, response: falcon.Response) -> bytes:
    """The bytes of an answer that is a part of another one; the request keeps its memory, and books them twice: here,
    and joined with the other parts."""
    raw = response.data or b""
    if isinstance(response.stream, StreamedAnswer):
        request.context.memory = response.stream.memory
        raw = b"".join(response.stream.pieces)
    request.context.memory.reserve(2 * len(raw), bounded=False)
    return raw


def json_list(blocks: Sequence[np.ndarray], entry: Callable[[int, np.ndarray], Any]) -> Iterator[bytes]:
    """A JSON list with ``entry(i, row i)`` for each row of all blocks."""
    yield b"["
    at = 0
    for block in blocks:
        for begin in range(0, len(block), PIECE_ROWS):
            part = block[begin : begin + PIECE_ROWS]
            yield (b"," if at else b"") + dumps([entry(at + offset, row) for offset, row in enumerate(part)])[1:-1]
            at += len(part)
    yield b"]"


def json_numbers(values: np.ndarray) -> list[str]:
    """Each number of [n] float32 as JSON writes it."""
    return dumps(np.ascontiguousarray(values))[1:-1].decode().split(",") if len(values) else []


def headers(usage: ResponseUsage) -> dict[str, str]:
    """TEI's x-compute-* in milliseconds; Server-Timing with the replica's part and ours; the instance that answered."""
    total = usage.total_ns / 1e6
    tokenize, queue = usage.mean_ms(usage.tokenization_ns), usage.mean_ms(usage.queue_ns)
    inference = usage.mean_ms(usage.inference_ns)
    overhead = max(0.0, (time.monotonic() - usage.began) * 1000 - total)
    fields = {
        "X-TEI-Instance": usage.instance,
        "Server-Timing": f"queue;dur={queue:.3f}, tokenize;dur={tokenize:.3f}, inference;dur={inference:.3f}, "
        f"overhead;dur={overhead:.3f}",
    }
    if usage.cached:
        fields["X-TEI-Cache"] = usage.cached
    if usage.fingerprint:
        fields["X-TEI-Fingerprint"] = usage.fingerprint
    if usage.decoded:
        fields["X-TEI-Token-Ids"] = "decoded"
    if usage.rows:
        fields |= {
            "X-Compute-Type": "tei-appliance",
            "X-Compute-Time": f"{total:.0f}",
            "X-Total-Time": f"{total:.0f}",
            "X-Compute-Characters": str(usage.chars),
            "X-Compute-Tokens": str(usage.tokens),
            "X-Tokenization-Time": f"{tokenize:.0f}",
            "X-Queue-Time": f"{queue:.0f}",
            "X-Inference-Time": f"{inference:.0f}",
        }
    return fields
