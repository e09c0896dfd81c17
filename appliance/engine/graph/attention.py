"""Attention in a graph: every kind that the families have, for batches and for long rows.

A batch has a mask of [rows or 1, heads or 1, tokens, tokens]: what a token may see, and by how much it counts. Its
memory grows with the square of the length. A *long* graph takes one row, which has no padding. Where every token sees
all others it uses the fused attention of onnxruntime; else a loop over blocks of queries, each of which takes the keys
that it may see. So the memory grows with the length alone (8,192 tokens of a 1,024-wide model: 0.7 GB instead of about
10), and with a window the time does, too.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from appliance.core.architecture import Architecture, Reach
from appliance.core.families.bert import slopes
from appliance.engine.graph.nodes import FUSED, Nodes
from appliance.engine.graph.relative import ContentPositions, learnt_bias

LOWEST = float(np.finfo(np.float32).min)
BLOCK = 256  # queries of a long row at once


class AttentionGraph:
    """The attention of all layers of one architecture. What several layers need is computed once."""

    def __init__(self, nodes: Nodes, architecture: Architecture, long: bool) -> None:
        self.nodes, self.architecture, self.long = nodes, architecture, long
        self.form = architecture.attention
        self.masks: dict[int | None, str] = {}  # by window
        self.rotations: dict[tuple[float, float], tuple[str, str]] = {}  # by theta and stretch
        self.content = ContentPositions(nodes, architecture) if self.form.relative == "deberta" else None

    def attend(self, x: str, number: int) -> str:
        """x: [rows, tokens, width]. The output layer included."""
        reach = self.architecture.reaches[number]
        query, key, value = self.projected(x, number)
        query = self.positioned(
            self.normed(query, self.form.query_norm, self.form.heads, number), self.form.heads, reach
        )
        keys = self.form.key_heads
        key = self.positioned(self.normed(key, self.form.key_norm, keys, number), keys, reach)
        if not self.long:
            mixed = self.masked(query, key, value, number, reach)
        elif self.sees_all(reach):
            mixed = self.nodes.op(
                "MultiHeadAttention",
                *(query, key, value),
                domain=FUSED,
                num_heads=self.form.heads,
                scale=self.form.scale,
            )
        else:
            mixed = self.blockwise(query, key, value, reach)
        return self.nodes.linear(mixed, self.form.output, number)

    def sees_all(self, reach: Reach) -> bool:
        form = self.form
        return form.heads == form.key_heads and not (form.causal or form.relative or reach.window)

    # -- queries, keys, values, each [rows, tokens, heads x size] ------------------------------------------------------

    def projected(self, x: str, number: int) -> list[str]:
        form = self.form
        if len(form.inputs) == 3:
            return [self.nodes.linear(x, layer, number) for layer in form.inputs]
        keys = form.key_heads * form.head_size
        sizes = self.nodes.constant([form.heads * form.head_size, keys, keys])
        joint = self.nodes.linear(x, form.inputs[0], number)
        return self.nodes.ops("Split", joint, sizes, outputs=3, axis=-1)

    def normed(self, x: str, name: str | None, heads: int, number: int) -> str:
        if name is None:
            return x
        nodes, norm = self.nodes, self.architecture.norm
        if not self.form.norm_heads:
            return nodes.norm(x, norm, name, number)
        each = nodes.op("Reshape", x, nodes.constant([0, 0, heads, self.form.head_size]))
        joined = nodes.constant([0, 0, heads * self.form.head_size])
        return nodes.op("Reshape", nodes.norm(each, norm, name, number), joined)

    def positioned(self, x: str, heads: int, reach: Reach) -> str:
        if reach.theta is None:
            return x
        cosines, sines = self.rotation(reach.theta, reach.stretch)
        if self.nodes.plain:
            return self.rotated(x, heads, cosines, sines)
        first = self.nodes.constant([0])
        return self.nodes.op("RotaryEmbedding", x, first, cosines, sines, domain=FUSED, num_heads=heads)

    def rotated(self, x: str, heads: int, cosines: str, sines: str) -> str:
        """What RotaryEmbedding computes: the two halves of each head are turned against each other."""
        nodes, size = self.nodes, self.form.head_size
        each = nodes.op("Reshape", x, nodes.constant([0, 0, heads, size]))
        one, other = nodes.ops("Split", each, outputs=2, axis=-1, num_outputs=2)
        cosines, sines = (nodes.op("Unsqueeze", angles, nodes.constant([1])) for angles in (cosines, sines))
        first = nodes.op("Sub", nodes.op("Mul", one, cosines), nodes.op("Mul", other, sines))
        second = nodes.op("Add", nodes.op("Mul", other, cosines), nodes.op("Mul", one, sines))
        joined = nodes.op("Concat", first, second, axis=-1)
        return nodes.op("Reshape", joined, nodes.constant([0, 0, heads * size]))

    def rotation(self, theta: float, stretch: float) -> tuple[str, str]:
        """Cosines and sines of all positions of a row, each [tokens, size / 2]."""
        if (theta, stretch) not in self.rotations:
            nodes, size = self.nodes, self.form.head_size
            frequencies = 1.0 / theta ** (np.arange(0, size, 2, dtype=np.float32) / np.float32(size)) / stretch
            column = nodes.op("Unsqueeze", self.places(), nodes.constant([1]))
            positions = nodes.op("Cast", column, to=TensorProto.FLOAT)
            angles = nodes.op("Mul", positions, nodes.constant(frequencies, np.float32))
            self.rotations[theta, stretch] = nodes.op("Cos", angles), nodes.op("Sin", angles)
        return self.rotations[theta, stretch]

    def places(self) -> str:
        """0, 1, 2, ... for all tokens of a row."""
        nodes = self.nodes
        length = nodes.op("Squeeze", nodes.op("Shape", "input_ids", start=1, end=2))
        return nodes.op("Range", nodes.constant(0), length, nodes.constant(1))

    # -- batches -----------------------------------------------------------------------------------------------------

    def masked(self, query: str, key: str, value: str, number: int, reach: Reach) -> str:
        nodes, form = self.nodes, self.form
        query, key, value = self.split(query, key, value)
        products = nodes.op("MatMul", query, key)
        if self.content:
            products = nodes.op("Add", products, self.content.scores(query, key, number))
        scores = nodes.op("Mul", products, nodes.constant(form.scale, np.float32))
        scores = nodes.op("Add", scores, self.mask(reach.window))
        return self.mix(scores, value)

    def split(self, query: str, key: str, value: str) -> tuple[str, str, str]:
        """query and value: [rows, heads, tokens, size], key: [rows, heads, size, tokens]."""
        nodes, form = self.nodes, self.form
        heads, keys = (nodes.constant([0, 0, count, form.head_size]) for count in (form.heads, form.key_heads))
        query = nodes.op("Transpose", nodes.op("Reshape", query, heads), perm=[0, 2, 1, 3])
        key = nodes.op("Transpose", nodes.op("Reshape", key, keys), perm=[0, 2, 3, 1])
        value = nodes.op("Transpose", nodes.op("Reshape", value, keys), perm=[0, 2, 1, 3])
        if form.heads == form.key_heads:
            return query, key, value
        shared = nodes.constant(np.repeat(np.arange(form.key_heads), form.heads // form.key_heads))
        return query, nodes.op("Gather", key, shared, axis=1), nodes.op("Gather", value, shared, axis=1)

    def mix(self, scores: str, value: str, nodes: Nodes | None = None) -> str:
        """Softmax and the weighted values, as [rows, tokens, heads x size]."""
        nodes = nodes or self.nodes
        mixed = nodes.op("MatMul", nodes.op("Softmax", scores, axis=-1), value)
        joined = nodes.constant([0, 0, self.form.heads * self.form.head_size])
        return nodes.op("Reshape", nodes.op("Transpose", mixed, perm=[0, 2, 1, 3]), joined)

    def mask(self, window: int | None) -> str:
        """0, or the bias of the distance, for what a token may see; the lowest float for all else."""
        if window not in self.masks:
            nodes, form = self.nodes, self.form
            real = nodes.op(
                "Cast", nodes.op("Unsqueeze", "attention_mask", nodes.constant([1, 2])), to=TensorProto.BOOL
            )
            seen = real
            if form.causal or window is not None:
                places = self.places()
                ahead = nodes.op("Sub", places, nodes.op("Unsqueeze", places, nodes.constant([1])))
                seen = nodes.op("And", real, self.visible(nodes, ahead, window))
            bias = nodes.constant(0, np.float32)
            if form.relative == "mpnet":
                bias = learnt_bias(nodes, self.architecture)
            elif form.relative == "alibi":
                places = self.places()
                bias = self.slope(nodes, nodes.op("Sub", places, nodes.op("Unsqueeze", places, nodes.constant([1]))))
            self.masks[window] = nodes.op("Where", seen, bias, nodes.constant(LOWEST, np.float32))
        return self.masks[window]

    def visible(self, nodes: Nodes, ahead: str, window: int | None) -> str:
        """ahead: by how much the key stands after the query, [queries, keys]."""
        if window is None:
            return nodes.op("LessOrEqual", ahead, nodes.constant(0))
        within = nodes.op("LessOrEqual", nodes.op("Abs", ahead), nodes.constant(window))
        return nodes.op("And", within, self.visible(nodes, ahead, None)) if self.form.causal else within

    def slope(self, nodes: Nodes, ahead: str) -> str:
        """ALiBi: [heads, queries, keys]."""
        distances = nodes.op("Cast", nodes.op("Abs", ahead), to=TensorProto.FLOAT)
        falling = -np.array(slopes(self.form.heads), np.float32)[:, None, None]
        return nodes.op("Mul", distances, nodes.constant(falling, np.float32))

    # -- long rows ---------------------------------------------------------------------------------------------------

    def blockwise(self, query: str, key: str, value: str, reach: Reach) -> str:
        """A loop over blocks of queries. The last block is filled up with zeros, whose answers are cut off."""
        nodes, form = self.nodes, self.form
        query, key, value = self.split(query, key, value)
        length = nodes.op("Shape", "input_ids", start=1, end=2)
        block = nodes.constant([BLOCK])
        blocks = nodes.op("Div", nodes.op("Add", length, nodes.constant([BLOCK - 1])), block)
        missing = nodes.op("Sub", nodes.op("Mul", blocks, block), length)
        padded = nodes.op(
            "Pad", query, nodes.op("Concat", nodes.constant([0] * 6), missing, nodes.constant([0]), axis=0)
        )
        cut = nodes.op("Reshape", padded, nodes.constant([form.heads, -1, BLOCK, form.head_size]))
        each = nodes.op("Transpose", cut, perm=[1, 0, 2, 3])  # [blocks, heads, BLOCK, size]
        count = nodes.op("Squeeze", blocks)
        starts = nodes.op("Mul", nodes.op("Range", nodes.constant(0), count, nodes.constant(1)), block)
        body = self.block_body(key, value, length, reach)
        answers = nodes.op("Scan", each, starts, num_scan_inputs=2, body=body)  # [blocks, BLOCK, heads x size]
        row = nodes.op("Reshape", answers, nodes.constant([1, -1, form.heads * form.head_size]))
        return nodes.op("Slice", row, nodes.constant([0]), length, nodes.constant([1]))

    def block_body(self, key: str, value: str, length: str, reach: Reach) -> object:
        """The graph of one block. Its inputs: the queries [heads, BLOCK, size], and the place of the first."""
        nodes, form = self.nodes.body(), self.form
        tag = next(nodes.numbers)
        query, start, answer = f"block_{tag}", f"start_{tag}", f"answer_{tag}"
        begin = nodes.op("Unsqueeze", start, nodes.constant([0]))
        first, last = nodes.constant([0]), length
        if reach.window is not None:
            first = nodes.op("Max", first, nodes.op("Sub", begin, nodes.constant([reach.window])))
        if form.causal or reach.window is not None:
            beyond = BLOCK + (0 if form.causal else reach.window or 0)
            last = nodes.op("Min", length, nodes.op("Add", begin, nodes.constant([beyond])))
        own_keys = nodes.op("Slice", key, first, last, nodes.constant([3]))
        own_values = nodes.op("Slice", value, first, last, nodes.constant([2]))
        scores = nodes.op("MatMul", nodes.op("Unsqueeze", query, nodes.constant([0])), own_keys)
        scores = nodes.op("Mul", scores, nodes.constant(form.scale, np.float32))
        ends = (nodes.op("Squeeze", first), nodes.op("Squeeze", last))
        key_places = nodes.op("Range", *ends, nodes.constant(1))
        query_places = nodes.op("Add", begin, nodes.constant(np.arange(BLOCK)))
        ahead = nodes.op("Sub", key_places, nodes.op("Unsqueeze", query_places, nodes.constant([1])))
        if form.relative == "alibi":
            scores = nodes.op("Add", scores, self.slope(nodes, ahead))
        if form.causal or reach.window is not None:
            seen = self.visible(nodes, ahead, reach.window)
            scores = nodes.op("Where", seen, scores, nodes.constant(LOWEST, np.float32))
        mixed = nodes.op("Squeeze", self.mix(scores, own_values, nodes), nodes.constant([0]))
        nodes.nodes.append(helper.make_node("Identity", [mixed], [answer]))
        inputs = [
            helper.make_tensor_value_info(query, TensorProto.FLOAT, [form.heads, BLOCK, form.head_size]),
            helper.make_tensor_value_info(start, TensorProto.INT64, []),
        ]
        width = form.heads * form.head_size
        outputs = [helper.make_tensor_value_info(answer, TensorProto.FLOAT, [BLOCK, width])]
        return helper.make_graph(nodes.nodes, f"block_{tag}", inputs, outputs)
