"""Low-rank adapters (LoRA) in a graph: each row of a batch is computed with the one that it chose, or with none.

With an adapter, a layer's weight W [out, in] is W + s B A, where A is [rank, in] and B [out, rank]. Rows of different
adapters share a batch, so the product is never made: a row's x W' gets s (x A') B' added, some 2 x rank / width of the
layer's own work. The file has all adapters of a layer in one tensor, [adapters, rank, in] and [adapters, out, rank];
of a table of embeddings, [adapters, words, rank] and [adapters, rank, width].
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from appliance.engine.graph.nodes import FUSED, Nodes

INPUT = "adapters"  # of the graph, int64 [rows]: the number of each row's adapter, -1 for none


class AdapterGraph:
    """What adapters add to the layers of a model that has them. scale: of all of them."""

    def __init__(self, nodes: Nodes, scale: float) -> None:
        self.nodes, self.scale = nodes, scale

    @cached_property
    def chosen(self) -> str:
        """[rows]; where there is none, any: its strength is 0."""
        return self.nodes.op("Max", INPUT, self.nodes.constant(0))

    @cached_property
    def strength(self) -> str:
        """[rows, 1, 1]"""
        nodes = self.nodes
        has_one = nodes.op("GreaterOrEqual", INPUT, nodes.constant(0))
        factors = nodes.constant(self.scale, np.float32), nodes.constant(0, np.float32)
        return nodes.op("Reshape", nodes.op("Where", has_one, *factors), nodes.constant([-1, 1, 1]))

    def add_to_layer(self, y: str, x: str, layer: str) -> str:
        """y: what the layer made of x, both [rows, tokens, ...]."""
        nodes = self.nodes
        if (parts := self.parts(layer)) is None:
            return y
        down, up = (nodes.op("Gather", nodes.weight(part), self.chosen) for part in parts)
        inner = nodes.op("FusedMatMul", x, down, domain=FUSED, transB=1)
        return nodes.op("Add", y, nodes.op("FusedMatMul", self.weighed(inner), up, domain=FUSED, transB=1))

    def add_to_table(self, y: str, ids: str, table: str) -> str:
        """y: the rows of the table for ids, [rows, tokens, width]."""
        nodes = self.nodes
        if (parts := self.parts(table)) is None:
            return y
        down, up = parts
        _, words, rank = nodes.tensors[str(nodes.full_name(down))].shape
        joined = nodes.op("Reshape", nodes.weight(down), nodes.constant([-1, rank]))
        first = nodes.op("Mul", nodes.op("Unsqueeze", self.chosen, nodes.constant([1])), nodes.constant(words))
        inner = nodes.op("Gather", joined, nodes.op("Add", ids, first))
        return nodes.op(
            "Add", y, nodes.op("MatMul", self.weighed(inner), nodes.op("Gather", nodes.weight(up), self.chosen))
        )

    def weighed(self, inner: str) -> str:
        return self.nodes.op("Mul", inner, self.strength)

    def parts(self, layer: str) -> tuple[str, str] | None:
        """The names of A and B; None for a layer that has no adapters."""
        down, up = (f"{layer}.parametrizations.weight.0.lora_{part}" for part in "AB")
        return (down, up) if self.nodes.full_name(down) else None
