"""What a collector books is what its reply takes: equal rows have one text, and a vector each in the reply."""

import grpc
import numpy as np
import pyarrow as pa
import pytest

from appliance.core.budget import ANSWERED
from appliance.core.cachekey import CachedEmbedding
from appliance.core.problems import Problem
from appliance.multiplexer.batch_run import TextFailure
from appliance.multiplexer.collectors import DenseCollector, TokensCollector
from appliance.wire import vectors
from appliance.wire.arrow import Rows
from appliance.wire.quantization import UNFIT
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux

ROWS = 100
TOKENS = tei.EmbedAllResponse(token_embeddings=[tei.TokenEmbedding(embeddings=[0.5] * 8) for _ in range(10)])
TEXT_BYTES = 10 * 8 * 4


def collector(limit: int, booked: list[int]) -> TokensCollector:
    rows = Rows([b"a", b"b"], np.array([0] * ROWS + [1, -1]))
    request = mux.EmbedAllArrowRequest()
    return TokensCollector.for_request(request, rows, limit, lambda size, bounded: booked.append(size))


def test_token_vectors_are_booked_for_each_row() -> None:
    booked: list[int] = []
    tokens = collector(2**20, booked)
    for text in (0, 1):
        tokens.accept(text, TOKENS.SerializeToString())
    assert booked == [ANSWERED * TEXT_BYTES * ROWS, ANSWERED * TEXT_BYTES]


@pytest.mark.parametrize("width", [1, 3, 5])
def test_a_vector_of_another_width_is_refused(width: int) -> None:
    """One number would fill the whole row."""
    dense = DenseCollector(2, 2, 2**20, False, "float32", False, lambda *_: None)
    dense.accept(0, vectors.pack(np.ones(4, np.float32)))
    with pytest.raises(ValueError, match=f"a vector of {width} numbers"):
        dense.accept(1, vectors.pack(np.ones(width, np.float32)))


def test_cached_vectors_of_several_widths_are_refused() -> None:
    """Two whose widths add up would fill shifted rows."""
    dense = DenseCollector(3, 3, 2**20, False, "float32", False, lambda *_: None)
    entries = [CachedEmbedding(bytes(20), 1, 1, 1, bytes(4 * width)) for width in (4, 3, 5)]
    with pytest.raises(ValueError, match="another width"):
        dense.accept_entries(dict(enumerate(entries)))


def test_a_reply_that_would_be_too_large_ends_before_it_is_booked() -> None:
    booked: list[int] = []
    with pytest.raises(Problem, match="EmbedAllArrowStream"):
        collector(TEXT_BYTES * ROWS - 1, booked).accept(0, TOKENS.SerializeToString())
    assert booked == []


def test_a_row_that_its_dtype_cannot_hold_costs_no_other() -> None:
    """One of them failed the whole batch, and nobody was told which."""
    rows = Rows([b"a", b"b", b"c"], np.array([0, 1, 2, 1]))
    request = mux.EmbedArrowRequest(output_dtype=mux.OUTPUT_DTYPE_FLOAT16)
    dense = DenseCollector.for_request(request, rows, 2**20, lambda *_: None)
    for text, value in enumerate((1, 70_000, 2)):
        dense.accept(text, vectors.pack(np.full(4, value, np.float32)))
    failures = dense.unfit()
    assert failures == {1: TextFailure(grpc.StatusCode.INVALID_ARGUMENT, UNFIT["float16"])}
    table = pa.ipc.open_stream(dense.write(rows, failures, keep_failures=True)).read_all()
    assert [row and row[0] for row in table.column(0).to_pylist()] == [1, None, 2, None]
    assert [bool(error) for error in table.column("error").to_pylist()] == [False, True, False, True]


def test_token_vectors_that_their_dtype_cannot_hold_cost_no_other() -> None:
    rows = Rows([b"a", b"b"], np.array([0, 1]))
    request = mux.EmbedAllArrowRequest(output_dtype=mux.OUTPUT_DTYPE_FLOAT16)
    tokens = TokensCollector.for_request(request, rows, 2**20, lambda *_: None)
    large = tei.EmbedAllResponse(token_embeddings=[tei.TokenEmbedding(embeddings=[70_000] * 8)])
    tokens.accept(0, large.SerializeToString())
    tokens.accept(1, TOKENS.SerializeToString())
    failures = tokens.unfit()
    assert list(failures) == [0]
    assert "float16 ends at 65504" in failures[0].details
    table = pa.ipc.open_stream(tokens.write(rows, failures, keep_failures=True)).read_all()
    assert [row and len(row) for row in table.column(0).to_pylist()] == [None, 10]
