"""The answers of a batch, kept until all are there, and written as one Arrow reply.

Vectors never become Python floats: the packed floats of each reply are copied into their place of one buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pyarrow as pa

from appliance.core.budget import ANSWERED, MIB
from appliance.core.cachekey import CachedEmbedding
from appliance.core.problems import Kind, Problem, invalid
from appliance.multiplexer import cached_replies
from appliance.multiplexer.batch_run import TextFailure
from appliance.multiplexer.usage import Usage
from appliance.wire import arrow, quantization, validity, vectors
from appliance.wire.arrow import Rows
from appliance.wire.methods import IMAGES
from appliance.wire.quantization import CONVERSIONS, UNFIT, refuse_unless_unit
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_appliance.v1.images_pb2 import EmbedImageRequest
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux

NOOP_DIM = 384
IMAGE, IMAGE_STREAM = IMAGES
IMAGE_COST = 200  # of an image, where the cost of a text is its length
COPIED_BYTES = 128 * 1024  # at a time: a larger block would be fresh pages of the kernel each time
SPARSE_TEXT = 64  # bytes, beside its entries
Book = Callable[..., None]  # `Reservation.grow`


def reply_too_large(size: int, limit: int, stream: str = "EmbedArrowStream") -> Problem:
    return Problem(
        Kind.EXHAUSTED,
        "TOO_LARGE",
        f"The reply would have about {size} bytes, and grpc_max_message_size_mb allows {limit}: send fewer rows a "
        f"call, or use {stream}",
    )


def refuse_images(rows: Rows) -> None:
    if rows.images:
        raise invalid("Images have dense vectors alone: send them with EmbedArrow, or a column of strings")


def dtype_of(request: Any) -> str:
    """The name of the `output_dtype` of a request. Raises: Problem for a number that has none."""
    if request.output_dtype not in mux.OutputDtype.values():
        raise invalid(f"Unknown output_dtype {request.output_dtype}: 0 to {len(CONVERSIONS) - 1} are known")
    return list(CONVERSIONS)[request.output_dtype]


@dataclass
class DenseCollector:
    """Vectors: line i of ``vectors`` belongs to text i. limit: bytes of the reply."""

    request = mux.EmbedArrowRequest
    reply = mux.EmbedArrowResponse
    method, path = "Embed", "/tei.v1.Embed/EmbedStream"
    noop_row_bytes = 4 * NOOP_DIM
    has_width = True

    texts: int
    rows: int
    limit: int
    normalized: bool
    output_dtype: str
    images: bool
    book: Book
    vectors: np.ndarray | None = None  # [texts, width] float32, once the width is known

    @classmethod
    def for_request(cls, request: mux.EmbedArrowRequest, rows: Rows, limit: int, book: Book) -> DenseCollector:
        dtype = dtype_of(request)
        refuse_unless_unit(dtype, request.normalize)
        return cls(len(rows.texts), len(rows), limit, request.normalize, dtype, rows.images, book)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.usage = Usage(self.texts)
        self.cost = IMAGE_COST if self.images else None
        if self.images:
            self.method, self.path = IMAGE.name, IMAGE_STREAM.path

    def options(self, request: mux.EmbedArrowRequest) -> bytes:
        """What follows the text in TEI's request, or the image in ours."""
        if self.images:
            dimensions = request.dimensions if request.HasField("dimensions") else None
            return EmbedImageRequest(normalize=request.normalize, dimensions=dimensions).SerializeToString()
        options = tei.EmbedRequest(
            truncate=request.truncate,
            normalize=request.normalize,
            truncation_direction=request.truncation_direction,
            prompt_name=request.prompt_name if request.HasField("prompt_name") else None,
            dimensions=request.dimensions if request.HasField("dimensions") else None,
        )
        return options.SerializeToString()

    @staticmethod
    def noop(rows: int) -> pa.Buffer:
        return arrow.dense_reply(np.zeros((rows, NOOP_DIM), np.float32), np.arange(rows), None)

    def accept(self, text: int, reply: bytes) -> None:
        """Raises: ValueError for an answer that cannot be right; Problem when the reply would be too large."""
        vector, rest = vectors.unpack(reply)
        if flaw := validity.vector_flaw(vector, self.normalized):
            raise ValueError(flaw)
        if self.vectors is None:
            self.allocate(len(vector))
        assert self.vectors is not None
        if len(vector) != (width := self.vectors.shape[1]):
            raise ValueError(f"a vector of {len(vector)} numbers beside those of {width}")
        self.vectors[text] = vector
        self.usage.note(text, tei.EmbedResponse.FromString(rest).metadata)

    def accept_entries(self, of_text: Mapping[int, CachedEmbedding]) -> None:
        """Those of the cache, which were looked at when they were computed. Raises: Problem when the reply would be too
        large, ValueError for vectors of another width."""
        texts, entries = list(of_text), list(of_text.values())
        if not entries:
            return
        if self.vectors is None:
            self.allocate(len(entries[0].vector) // 4)
        assert self.vectors is not None
        width = self.vectors.shape[1]
        if any(len(entry.vector) != 4 * width for entry in entries):
            raise ValueError(f"a vector of another width beside those of {width}")
        together = max(1, COPIED_BYTES // (4 * width))
        for begin in range(0, len(texts), together):
            some = slice(begin, begin + together)
            joined = np.frombuffer(b"".join([entry.vector for entry in entries[some]]), "<f4")
            self.vectors[texts[some]] = joined.reshape(-1, width)
        self.usage.note_computed_before(texts, entries)

    def learn_width(self, reply: bytes) -> None:
        """From a reply to a text or an image of our own."""
        self.allocate(len(vectors.unpack(reply)[0]))

    def allocate(self, width: int) -> None:
        """The first answer tells the width, and whether the reply can be sent at all. Raises: Problem."""
        row = CONVERSIONS[self.output_dtype](np.zeros(width, np.float32))
        if (size := self.rows * row.nbytes) > self.limit:
            raise reply_too_large(size, self.limit)
        with self.lock:
            if self.vectors is None:
                self.book(ANSWERED * max(self.rows, self.texts) * width * 4)
                self.vectors = np.zeros((self.texts, width), np.float32)

    def unfit(self) -> dict[int, TextFailure]:
        """The texts whose vectors the dtype cannot hold; for when all are there."""
        if self.vectors is None:
            return {}
        texts = quantization.unfit(self.output_dtype, self.vectors)
        self.vectors[texts] = 0  # in a null row
        return dict.fromkeys(texts, unheld(self.output_dtype)) if texts else {}

    def write(self, rows: Rows, failures: dict[int, TextFailure], keep_failures: bool) -> pa.Buffer:
        assert self.vectors is not None
        text_of_row, errors = without_failed(rows, failures, keep_failures)
        return arrow.dense_reply(CONVERSIONS[self.output_dtype](self.vectors), text_of_row, errors)


@dataclass
class SparseCollector:
    """Sparse vectors: (indices, values) of each text. limit: bytes of the reply."""

    request = mux.EmbedSparseArrowRequest
    reply = mux.EmbedSparseArrowResponse
    method, path = "EmbedSparse", "/tei.v1.Embed/EmbedSparseStream"
    noop_row_bytes = 4 + 3 * 8
    has_width = False
    cost = None

    texts: int
    limit: int
    book: Book

    @classmethod
    def for_request(cls, request: mux.EmbedSparseArrowRequest, rows: Rows, limit: int, book: Book) -> SparseCollector:
        refuse_images(rows)
        return cls(len(rows.texts), limit, book)

    def __post_init__(self) -> None:
        self.vectors: list[Any] = [None] * self.texts
        self.lock = threading.Lock()
        self.unused_bytes = 0  # booked, and not used yet
        self.usage = Usage(self.texts)

    @staticmethod
    def options(request: mux.EmbedSparseArrowRequest) -> bytes:
        """What follows the text in TEI's request."""
        options = tei.EmbedSparseRequest(
            truncate=request.truncate,
            truncation_direction=request.truncation_direction,
            prompt_name=request.prompt_name if request.HasField("prompt_name") else None,
        )
        return options.SerializeToString()

    @staticmethod
    def noop(rows: int) -> pa.Buffer:
        indices = np.arange(rows)[:, None] + np.array([0, 100, 200])
        values = np.tile(np.array([1.0, 0.5, 0.25], np.float32), rows)
        return arrow.flat_sparse_reply(np.full(rows, 3), indices.ravel(), values, np.zeros(rows, bool), None)

    def accept(self, text: int, reply: bytes) -> None:
        """Raises: ValueError for an answer that cannot be right; Problem when there is no memory for it."""
        answer = tei.EmbedSparseResponse.FromString(reply)
        self.usage.note(text, answer.metadata)
        entries = answer.sparse_embeddings
        self.book_bytes(ANSWERED * (SPARSE_TEXT + 8 * len(entries)))
        indices = np.array([entry.index for entry in entries], np.uint32)
        values = np.array([entry.value for entry in entries], np.float32)
        if flaw := validity.vector_flaw(values, normalized=False):
            raise ValueError(flaw)
        self.vectors[text] = (indices, values)

    def accept_entries(self, of_text: Mapping[int, CachedEmbedding]) -> None:
        """As `DenseCollector.accept_entries`."""
        for text, entry in of_text.items():
            indices, values = cached_replies.sparse_of(entry)
            self.book_bytes(ANSWERED * (SPARSE_TEXT + 8 * len(indices)))
            self.vectors[text] = (indices, values)
        if of_text:
            self.usage.note_computed_before(list(of_text), list(of_text.values()))

    def book_bytes(self, size: int) -> None:
        """A MiB at a time, because each booking takes a lock of the whole process."""
        with self.lock:
            if size > self.unused_bytes:
                self.book(size + MIB, False)
                self.unused_bytes += size + MIB
            self.unused_bytes -= size

    def unfit(self) -> dict[int, TextFailure]:
        return {}

    def write(self, rows: Rows, failures: dict[int, TextFailure], keep_failures: bool) -> pa.Buffer:
        """Raises: Problem when the reply would be too large."""
        text_of_row, errors = without_failed(rows, failures, keep_failures)
        counts = [len(vector[0]) if vector else 0 for vector in self.vectors]
        entries = np.array([*counts, 0], np.int64)  # the last one is for -1, a null row
        if (size := 4 * len(text_of_row) + 8 * int(entries[text_of_row].sum())) > self.limit:
            raise reply_too_large(size, self.limit)
        return arrow.sparse_reply([self.vectors[text] if text >= 0 else None for text in text_of_row.tolist()], errors)


@dataclass
class TokensCollector:
    """Vectors of the tokens of each text. limit: bytes of the reply."""

    request = mux.EmbedAllArrowRequest
    reply = mux.EmbedAllArrowResponse
    method, path = "EmbedAll", "/tei.v1.Embed/EmbedAllStream"
    noop_row_bytes = 4 * NOOP_DIM
    has_width = True
    cost = None

    rows_of_text: np.ndarray
    limit: int
    output_dtype: str
    book: Book

    @classmethod
    def for_request(cls, request: mux.EmbedAllArrowRequest, rows: Rows, limit: int, book: Book) -> TokensCollector:
        refuse_images(rows)
        counts = np.bincount(rows.text_of_row[rows.text_of_row >= 0], minlength=len(rows.texts))
        return cls(counts, limit, dtype_of(request), book)

    def __post_init__(self) -> None:
        self.vectors: list[np.ndarray | None] = [None] * len(self.rows_of_text)
        self.empty = np.zeros((0, 0), np.float32)  # with the width, once that is known
        self.unheld: dict[int, TextFailure] = {}
        self.size = 0  # bytes of the reply so far
        self.lock = threading.Lock()
        self.usage = Usage(len(self.rows_of_text))

    @staticmethod
    def options(request: mux.EmbedAllArrowRequest) -> bytes:
        """What follows the text in TEI's request."""
        options = tei.EmbedAllRequest(
            truncate=request.truncate,
            truncation_direction=request.truncation_direction,
            prompt_name=request.prompt_name if request.HasField("prompt_name") else None,
        )
        return options.SerializeToString()

    @staticmethod
    def noop(rows: int) -> pa.Buffer:
        row = np.zeros((1, NOOP_DIM), np.float32)
        return arrow.tokens_reply([row] * rows, row[:0], None)

    def accept(self, text: int, reply: bytes) -> None:
        """Raises: ValueError for an answer that cannot be right; Problem when the reply would be too large."""
        tokens, rest = vectors.unpack_all(reply)
        if not np.isfinite(tokens).all():
            raise ValueError("a number of its vectors is not finite")
        if quantization.unfit(self.output_dtype, tokens):
            self.unheld[text] = unheld(self.output_dtype)
            tokens = tokens[:0]
        kept = CONVERSIONS[self.output_dtype](tokens)
        with self.lock:
            if self.empty.shape[1] not in (0, kept.shape[1]):
                raise ValueError(f"its vectors have {kept.shape[1]} numbers, others {self.empty.shape[1]}")
            self.empty = kept[:0]
            self.size += kept.nbytes * int(self.rows_of_text[text])
            if self.size > self.limit:
                raise reply_too_large(self.size, self.limit, "EmbedAllArrowStream")
            self.book(ANSWERED * kept.nbytes * max(1, int(self.rows_of_text[text])), False)
        self.vectors[text] = kept
        self.usage.note(text, tei.EmbedAllResponse.FromString(rest).metadata)

    def accept_entries(self, of_text: Mapping[int, CachedEmbedding]) -> None:
        """Token vectors are not cached."""

    def learn_width(self, reply: bytes) -> None:
        self.empty = CONVERSIONS[self.output_dtype](vectors.unpack_all(reply)[0])[:0]

    def unfit(self) -> dict[int, TextFailure]:
        return self.unheld

    def write(self, rows: Rows, failures: dict[int, TextFailure], keep_failures: bool) -> pa.Buffer:
        text_of_row, errors = without_failed(rows, failures, keep_failures)
        chosen = [self.vectors[text] if text >= 0 else None for text in text_of_row.tolist()]
        return arrow.tokens_reply(chosen, self.empty, errors)


def unheld(dtype: str) -> TextFailure:
    return TextFailure(grpc.StatusCode.INVALID_ARGUMENT, UNFIT[dtype])


def without_failed(
    rows: Rows, failures: dict[int, TextFailure], keep_failures: bool
) -> tuple[np.ndarray, list[str | None] | None]:
    """(the text of each row or -1, the error of each row): a failed text is null in all its rows."""
    if not keep_failures:
        return rows.text_of_row, None
    if not failures:
        return rows.text_of_row, [None] * len(rows)
    words = {text: f"{failure.code.name}: {failure.details}" for text, failure in failures.items()}
    errors = [words.get(text) for text in rows.text_of_row.tolist()]
    return np.where(np.isin(rows.text_of_row, list(failures)), -1, rows.text_of_row), errors
