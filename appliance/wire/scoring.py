"""How well vectors go together, and how several orders of the same things become one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

AT_ONCE = 64
RRF_K = 60  # of the paper on reciprocal rank fusion: the larger, the less the first places count for


def maxsim(query: np.ndarray, document: np.ndarray) -> float:
    """Of each vector of the query the best product with one of the document, added up. [tokens, width] each.

    Some vectors of the query at a time: all products of two long texts would be 256 MiB.
    """
    if not len(document):
        return 0.0
    parts = (query[begin : begin + AT_ONCE] for begin in range(0, len(query), AT_ONCE))
    return float(sum((part @ document.T).max(axis=1).sum(dtype=np.float64) for part in parts))


def sparse_product(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> float:
    """Of two sparse vectors, each its indices and its values."""
    _, here, there = np.intersect1d(one[0], other[0], assume_unique=True, return_indices=True)
    return float(np.dot(one[1][here], other[1][there]))


def ranks_of(scores: np.ndarray) -> np.ndarray:
    """[n]: the rank of each, from 1; of equal ones the first comes first."""
    ranks = np.empty(len(scores), np.int64)
    ranks[np.argsort(-scores, kind="stable")] = np.arange(1, len(scores) + 1)
    return ranks


def reciprocal_ranks(scores: np.ndarray) -> np.ndarray:
    """[n]: what each score gives in reciprocal rank fusion."""
    return 1.0 / (RRF_K + ranks_of(scores))


def between_0_and_1(scores: np.ndarray) -> np.ndarray:
    """[n]: the largest is 1, the smallest 0; all 0 where they are equal."""
    low, high = scores.min(), scores.max()
    return (scores - low) / (high - low) if high > low else np.zeros_like(scores)


def weighted_sum(parts: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """[n] of several [n]."""
    total: np.ndarray = np.sum([weight * part for part, weight in zip(parts, weights, strict=True)], axis=0)
    return total
