"""What becomes of hidden states beside one pooled vector: a vector for each token, and weights of words (BGE-M3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from appliance.core.multivector import DOCUMENT, QUERY
from appliance.core.problems import invalid
from appliance.drivers.modelfolder import SPARSE_HEAD, TOKEN_HEAD, Card
from appliance.engine.checkpoint import tensors_in
from appliance.engine.pooling import DenseLayer, projected
from appliance.engine.weights import read_float32, tensors_of

ENTRY = np.dtype([("index", "<u4"), ("value", "<f4")])  # of a sparse vector; an array of them is sorted by index


@dataclass(frozen=True)
class TokenHead:
    """skipped: ids of tokens without a vector, in texts of ``skipped_in``; first: whether the first token has one."""

    layers: list[DenseLayer]
    normalize: bool
    skipped: np.ndarray
    skipped_in: tuple[str, ...]
    first: bool = True

    def vectors(self, hidden: np.ndarray, ids: Sequence[int], query: bool) -> np.ndarray:
        """[tokens, width] to [tokens that count, width of the head]. query: what the text is for."""
        if len(self.skipped) and (QUERY if query else DOCUMENT) in self.skipped_in:
            hidden = hidden[~np.isin(ids, self.skipped)]
        if not self.first:
            hidden = hidden[1:]
        rows: np.ndarray = projected(hidden.T, self.layers).T
        if self.normalize:
            rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        return np.ascontiguousarray(rows, np.float32)


@dataclass(frozen=True)
class SparseHead:
    """A weight for each token; a word's is the largest of its tokens. ignored: the special tokens."""

    layer: DenseLayer
    ignored: np.ndarray

    def entries(self, hidden: np.ndarray, ids: Sequence[int]) -> np.ndarray:
        """[tokens, width] to [words] of ENTRY."""
        weights = projected(hidden.T, [self.layer])[0]
        words, places = np.unique(np.asarray(ids), return_inverse=True)
        largest = np.zeros(len(words), np.float32)
        np.maximum.at(largest, places, weights)  # those below 0 count as 0
        counts = (largest > 0) & ~np.isin(words, self.ignored)
        return entries_of(words[counts], largest[counts])


def entries_of(indices: np.ndarray, values: np.ndarray) -> np.ndarray:
    entries = np.empty(len(indices), ENTRY)
    entries["index"], entries["value"] = indices, values
    return entries


def token_head(card: Card, dense: list[DenseLayer], tokenizer: Tokenizer) -> TokenHead | None:
    """Of a model of token vectors, or of BGE-M3. dense: the layers of its modules. Raises: Problem."""
    if card.has_all_heads:
        return TokenHead([layer_of(card, TOKEN_HEAD)], True, np.zeros(0, np.int64), (), first=False)
    own = card.multivector
    if own is None:
        return None
    if not card.dense and "linear.weight" in (tensors := tensors_of(card.folder)):  # the first ColBERT keeps it there
        dense = [DenseLayer(read_float32(tensors["linear.weight"]), None, tanh=False)]
    known = [tokenizer.token_to_id(word) for word in own.skipped]
    skipped = np.array([number for number in known if number is not None], np.int64)
    return TokenHead(dense, own.normalize, skipped, own.skipped_in)


def sparse_head(card: Card, tokenizer: Tokenizer) -> SparseHead | None:
    """Of BGE-M3. Raises: Problem."""
    if not card.has_all_heads:
        return None
    special = [number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    return SparseHead(layer_of(card, SPARSE_HEAD), np.array(special, np.int64))


def layer_of(card: Card, name: str) -> DenseLayer:
    tensors = tensors_in(card.folder / name)
    if tensors.get("weight", np.zeros(0)).ndim != 2:
        raise invalid(f"{card.folder / name} has no weight of a linear layer", "UNSUPPORTED_MODEL")
    return DenseLayer(tensors["weight"], tensors.get("bias"), tanh=False)
