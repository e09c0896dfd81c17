"""Answers: JSON of numbers that never were Python floats, and the headers that say what they cost.

orjson writes float32 in its shortest form, as TEI does; NaN, which it would write as null, never comes so far
(`gateway/replies.py`). A long answer is sent in pieces, so that its text, ten times the size of its numbers, is never
in memory as a whole; it begins only when every row is there.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import falcon
import numpy as np
import orjson

from appliance.gateway.bodies import Place
from appliance.gateway.embedding import WHOLE_ROWS, Spent

PIECE_ROWS = 256


def dumps(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


class Pieces:
    """A long answer on its way; its request's place is free when the last piece is sent."""

    def __init__(self, pieces: Iterator[bytes], place: Place) -> None:
        self.pieces = pieces
        self.place = place

    def __iter__(self) -> Iterator[bytes]:
        return self.pieces

    def close(self) -> None:
        self.place.release()


def send(request: falcon.Request, response: falcon.Response, spent: Spent, pieces: Iterator[bytes], rows: int) -> None:
    """A JSON answer of ``rows`` rows with its headers."""
    response.content_type = falcon.MEDIA_JSON
    for name, value in headers(spent).items():
        response.set_header(name, value)
    if rows <= WHOLE_ROWS:
        response.data = b"".join(pieces)
    else:
        place = request.context.place
        response.stream = Pieces(pieces, place)
        request.context.place = Place(place.reserve)  # it goes along with the pieces


def listed(blocks: Sequence[np.ndarray], entry: Callable[[int, np.ndarray], Any]) -> Iterator[bytes]:
    """A JSON list with ``entry(i, row i)`` for each row of all blocks."""
    yield b"["
    at = 0
    for block in blocks:
        for begin in range(0, len(block), PIECE_ROWS):
            part = block[begin : begin + PIECE_ROWS]
            yield (b"," if at else b"") + dumps([entry(at + place, row) for place, row in enumerate(part)])[1:-1]
            at += len(part)
    yield b"]"


def numbers(values: np.ndarray) -> list[str]:
    """Each number as JSON writes it; [n] float32."""
    return dumps(np.ascontiguousarray(values))[1:-1].decode().split(",") if len(values) else []


def base64_of(row: np.ndarray) -> str:
    """OpenAI's `base64`: little-endian float32."""
    return base64.b64encode(np.ascontiguousarray(row, "<f4").tobytes()).decode()


def headers(spent: Spent) -> dict[str, str]:
    """TEI's x-compute-*, milliseconds; Server-Timing with the replica's part and ours; who answered."""
    total = spent.total_ns / 1e6
    tokenize, queue = spent.mean_ms(spent.tokenization_ns), spent.mean_ms(spent.queue_ns)
    inference = spent.mean_ms(spent.inference_ns)
    overhead = max(0.0, (time.monotonic() - spent.began) * 1000 - total)
    found = {
        "X-TEI-Instance": spent.instance,
        "Server-Timing": f"queue;dur={queue:.3f}, tokenize;dur={tokenize:.3f}, inference;dur={inference:.3f}, "
        f"overhead;dur={overhead:.3f}",
    }
    if spent.decoded:
        found["X-TEI-Token-Ids"] = "decoded"
    if spent.rows:
        found |= {
            "X-Compute-Type": "tei-appliance",
            "X-Compute-Time": f"{total:.0f}",
            "X-Total-Time": f"{total:.0f}",
            "X-Compute-Characters": str(spent.chars),
            "X-Compute-Tokens": str(spent.tokens),
            "X-Tokenization-Time": f"{tokenize:.0f}",
            "X-Queue-Time": f"{queue:.0f}",
            "X-Inference-Time": f"{inference:.0f}",
        }
    return found
