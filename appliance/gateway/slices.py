"""Slices of a list whose texts, and whose answers, fit into one message to the multiplexer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from appliance.drivers.modelfolder import Card

WIDEST = 4096  # numbers of a vector for which a slice of rows must fit into a message
SPECIAL_TOKENS = 16  # of a text, at most
UNKNOWN_WIDTH, UNKNOWN_TOKENS = 1024, 512  # of a model whose files are elsewhere
AnswerBytes = Callable[[np.ndarray], np.ndarray]  # of texts with so many bytes each: those of their answers, at most


def of_one_vector(sizes: np.ndarray) -> np.ndarray:
    return np.full(len(sizes), 4 * WIDEST)


def of_token_vectors(card: Card | None) -> AnswerBytes:
    """card: of the model, where its files are here. A token has a byte at least, but for special ones, and those of a
    prompt. An answer that was a little too large for one message would be computed, and then refused."""
    width = int((card and card.config.get("hidden_size")) or UNKNOWN_WIDTH)
    longest = card.max_tokens if card else UNKNOWN_TOKENS
    prompt = max((len(each.encode()) for each in card.prompts.values()), default=0) if card else 0
    return lambda sizes: np.minimum(sizes + prompt + SPECIAL_TOKENS, longest) * 4 * width


def arrow_of(texts: list[str]) -> pa.Array:
    return pa.array(texts, pa.large_string())


def cut(column: pa.Array, largest: int, answer_bytes: AnswerBytes = of_one_vector) -> Iterator[pa.Array]:
    """Slices whose texts and whose vectors fit into a message of ``largest`` bytes; a text is never cut."""
    import pyarrow.compute  # only now: pyarrow itself does not bring it along, and single texts do without

    sizes = pyarrow.compute.binary_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    answer_ends = np.concatenate([[0], np.cumsum(answer_bytes(sizes), dtype=np.int64)])
    most = largest * 9 // 10  # the rest is for Arrow's and protobuf's own bytes
    begin = 0
    while begin < len(column) or begin == 0:
        fitting = int(np.searchsorted(ends, ends[begin] + largest // 2, side="right")) - 1
        answered = int(np.searchsorted(answer_ends, answer_ends[begin] + most, side="right")) - 1
        end = max(begin + 1, min(fitting, answered))
        yield column.slice(begin, end - begin)
        begin = end
