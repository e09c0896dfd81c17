"""Positions as distances: MPNet's learnt bias, and DeBERTa's scores of content and distance.

DeBERTa has a vector for each bucket of distances. Its scores of a query i and a key j are query . vector(i - j) and
key . vector(i - j). Both are computed for all distances that a row has, as [tokens, 2 x tokens - 1], and then each line
is shifted to its own place: with that, no index of [heads, tokens, tokens] is needed.
"""

from __future__ import annotations

import math

import numpy as np

from appliance.core.architecture import Architecture, Linear
from appliance.core.families.common import unsupported
from appliance.engine.graph.nodes import Nodes


def learnt_bias(nodes: Nodes, architecture: Architecture) -> str:
    """MPNet's bias by relative position, [1, heads, tokens, tokens]."""
    relative = architecture.relative
    assert relative
    buckets = relative_buckets(architecture.positions, relative.buckets)
    length = nodes.op("Shape", "input_ids", start=1, end=2)
    square = nodes.op("Concat", length, length, axis=0)
    cut = nodes.op("Slice", nodes.constant(buckets), nodes.constant([0, 0]), square, nodes.constant([0, 1]))
    bias = nodes.op("Gather", nodes.weight(relative.embeddings), cut)
    return nodes.op("Unsqueeze", nodes.op("Transpose", bias, perm=[2, 0, 1]), nodes.constant([0]))


def relative_buckets(length: int, buckets: int, far: int = 128) -> np.ndarray:
    """T5's bucket of every (query, key) distance, [length, length]: exact when near, logarithmic when far."""
    position = np.arange(length)
    distance = position[:, None] - position[None]
    half = buckets // 2
    side = (distance < 0) * half
    distance, exact = np.abs(distance), half // 2
    growth = np.log(np.maximum(distance, 1) / exact) / math.log(far / exact) * (half - exact)
    return side + np.where(distance < exact, distance, np.minimum(exact + growth.astype(np.int64), half - 1))


class ContentPositions:
    """DeBERTa's scores by content and distance, for all layers of a model."""

    def __init__(self, nodes: Nodes, architecture: Architecture) -> None:
        relative = architecture.relative
        assert relative
        assert relative.query
        assert relative.key
        self.nodes, self.form = nodes, architecture.attention
        self.query, self.key = Linear(relative.query), Linear(relative.key)
        self.span = relative.buckets or architecture.positions
        table = nodes.weight(relative.embeddings)
        name = nodes.full_name(relative.embeddings)
        if name and nodes.tensors[name].shape[0] < 2 * self.span:
            raise unsupported(f'a model whose tensor "{name}" has fewer than {2 * self.span} rows')
        self.vectors = nodes.norm(table, architecture.norm, relative.norm) if relative.norm else table
        self.length = nodes.op("Shape", "input_ids", start=1, end=2)
        # Row index of every distance i - j, from the largest down; a row of n tokens has the middle 2n - 1 of them.
        most = architecture.positions
        distances = np.arange(most - 1, -most, -1)
        rows = np.clip(log_buckets(distances, relative.buckets, most) + self.span, 0, 2 * self.span - 1)
        ends = nodes.constant([most - 1]), nodes.constant([most])
        begin = nodes.op("Sub", ends[1], self.length)
        end = nodes.op("Add", ends[0], self.length)
        self.falling = nodes.op("Slice", nodes.constant(rows), begin, end, nodes.constant([0]))
        self.rising = nodes.op("Slice", nodes.constant(rows[::-1]), begin, end, nodes.constant([0]))

    def scores(self, query: str, key: str, number: int) -> str:
        """query: [rows, heads, tokens, size], key: [rows, heads, size, tokens]; to [rows, heads, tokens, tokens]."""
        nodes = self.nodes
        by_query = self.shifted(nodes.op("MatMul", query, self.each(self.key, self.falling, number)))
        keys = nodes.op("Transpose", key, perm=[0, 1, 3, 2])
        by_key = self.shifted(nodes.op("MatMul", keys, self.each(self.query, self.rising, number)))
        return nodes.op("Add", by_query, nodes.op("Transpose", by_key, perm=[0, 1, 3, 2]))

    def each(self, layer: Linear, rows: str, number: int) -> str:
        """The projected vectors of all distances of a row, [heads, size, 2 x tokens - 1]."""
        nodes, form = self.nodes, self.form
        projected = nodes.linear(self.vectors, layer, number)
        split = nodes.op("Reshape", projected, nodes.constant([-1, form.heads, form.head_size]))
        return nodes.op("Gather", nodes.op("Transpose", split, perm=[1, 2, 0]), rows, axis=2)

    def shifted(self, scores: str) -> str:
        """[..., n, 2n - 1] to [..., n, n]: line i from its column n - 1 - i on.

        Written one line after the other with one number between them, line i begins 2n numbers after line i - 1, and
        what is wanted of it 2n - 1.
        """
        nodes = self.nodes
        one, last = nodes.constant([1]), nodes.constant([3])
        padded = nodes.op("Pad", scores, nodes.constant([0, 0, 0, 0, 0, 0, 0, 1]))
        flat = nodes.op("Reshape", padded, nodes.constant([0, 0, -1]))
        wide = nodes.op("Sub", nodes.op("Add", self.length, self.length), one)
        begin = nodes.op("Sub", self.length, one)
        end = nodes.op("Add", begin, nodes.op("Mul", self.length, wide))
        cut = nodes.op("Slice", flat, begin, end, nodes.constant([2]))
        lines = nodes.op("Reshape", cut, nodes.op("Concat", nodes.constant([0, 0]), self.length, wide, axis=0))
        return nodes.op("Slice", lines, nodes.constant([0]), self.length, last)


def log_buckets(distances: np.ndarray, buckets: int, farthest: int) -> np.ndarray:
    """DeBERTa's bucket of each distance: exact up to half of the buckets, then logarithmic; without buckets it is the
    distance. In float32, as torch computes it, for the roundings decide."""
    if not buckets:
        return distances
    middle = buckets // 2
    size = np.where(np.abs(distances) < middle, middle - 1, np.abs(distances)).astype(np.float32)
    growth = np.log(size / np.float32(middle)) / np.log(np.float32((farthest - 1) / middle)) * np.float32(middle - 1)
    far = (np.ceil(growth) + middle) * np.sign(distances)
    return np.where(size <= middle, distances, far).astype(np.int64)
