"""The body of a model in a graph: embeddings, then layers of attention and feed-forward, to hidden states."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from appliance.core.architecture import Architecture, Convolution
from appliance.engine.graph.attention import AttentionGraph
from appliance.engine.graph.mixture import mixed
from appliance.engine.graph.nodes import Nodes


class EncoderGraph:
    """Builds the hidden states of one architecture."""

    def __init__(self, nodes: Nodes, architecture: Architecture, long: bool) -> None:
        self.nodes, self.architecture = nodes, architecture
        self.attention = AttentionGraph(nodes, architecture, long)

    def hidden_states(self) -> str:
        """[rows, tokens, width]."""
        x = self.layers(self.embed())
        final = self.architecture.final_norm
        return self.nodes.norm(x, self.architecture.norm, final) if final else x

    def layers(self, x: str) -> str:
        first = x
        for number in range(len(self.architecture.reaches)):
            x = self.layer(x, number)
            if number == 0 and self.architecture.convolution:
                x = self.convolved(first, x, self.architecture.convolution)
        return x

    def convolved(self, first: str, x: str, form: Convolution) -> str:
        """first: the embeddings, of which padding counts as zeros to its neighbours."""
        nodes = self.nodes
        real = nodes.op("Cast", nodes.op("Unsqueeze", "attention_mask", nodes.constant([2])), to=TensorProto.FLOAT)
        lines = nodes.op("Transpose", nodes.op("Mul", first, real), perm=[0, 2, 1])
        weight, bias = nodes.weight(f"{form.layer}.weight"), nodes.weight(f"{form.layer}.bias")
        y = nodes.op("Conv", lines, weight, bias, auto_pad="SAME_UPPER", group=form.groups)
        y = nodes.activate(nodes.op("Transpose", y, perm=[0, 2, 1]), form.activation)
        return nodes.norm(nodes.op("Add", x, y), self.architecture.norm, form.norm)

    def embed(self) -> str:
        nodes, parts, norm = self.nodes, self.architecture.embeddings, self.architecture.norm
        x = nodes.table(parts.words, "input_ids")
        if parts.scale != 1.0:
            x = nodes.op("Mul", x, nodes.constant(parts.scale, np.float32))
        if parts.positions:
            x = nodes.op("Add", x, nodes.table(parts.positions, self.positions()))
        if parts.types and nodes.full_name(parts.types):  # DistilBERT has none, nor do some old RoBERTas
            x = nodes.op("Add", x, nodes.table(parts.types, "token_type_ids"))
        if parts.projection:
            x = nodes.matmul(x, f"{parts.projection}.weight")
        return nodes.norm(x, norm, parts.norm) if parts.norm else x

    def positions(self) -> str:
        nodes, first = self.nodes, self.architecture.embeddings.first_position
        if first is None:
            return self.attention.places()
        # RoBERTa: the first position + that among the real tokens; padding has the one before.
        counted = nodes.op("Mul", nodes.op("CumSum", "attention_mask", nodes.constant(1)), "attention_mask")
        return nodes.op("Add", counted, nodes.constant(first - 1))

    def layer(self, x: str, number: int) -> str:
        nodes, names, norm = self.nodes, self.architecture.names, self.architecture.norm
        if self.architecture.placement == "post":
            attended = nodes.op("Add", self.attention.attend(x, number), x)
            if names.attended:
                attended = nodes.op("Add", nodes.norm(attended, norm, names.attended, number), x)
            x = nodes.norm(attended, norm, names.attention, number)
            return nodes.norm(nodes.op("Add", self.feed_forward(x, number), x), norm, names.feed_forward, number)
        first = number > 0 or self.architecture.first_attention_norm
        attended = self.attention.attend(nodes.norm(x, norm, names.attention, number) if first else x, number)
        x = nodes.op("Add", x, self.after(attended, names.after_attention, number))
        inner = self.feed_forward(nodes.norm(x, norm, names.feed_forward, number), number)
        return nodes.op("Add", x, self.after(inner, names.after_feed_forward, number))

    def after(self, x: str, name: str | None, number: int) -> str:
        return self.nodes.norm(x, self.architecture.norm, name, number) if name else x

    def feed_forward(self, x: str, number: int) -> str:
        nodes, form, mixture = self.nodes, self.architecture.feed_forward, self.architecture.mixture
        if mixture and number in mixture.layers:
            return mixed(nodes, mixture, x, number)
        inputs = [nodes.linear(x, layer, number) for layer in form.inputs]
        if form.halves:
            inputs = nodes.ops("Split", inputs[0], outputs=2, axis=-1, num_outputs=2)
            inputs = inputs if form.halves == "gate first" else inputs[::-1]
        inner = nodes.activate(inputs[0], form.activation)
        if len(inputs) == 2:
            inner = nodes.op("Mul", inner, inputs[1])
        return nodes.linear(inner, form.output, number)
