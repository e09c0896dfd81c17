"""The image tower in a graph: patches, the layers of a transformer over them, one pooled vector."""

from __future__ import annotations

from typing import Any

from onnx import ModelProto, TensorProto, helper

from appliance.core.families import images as families
from appliance.core.families.images import ImageTower
from appliance.engine.graph.encoder import EncoderGraph
from appliance.engine.graph.nodes import FUSED, IR_VERSION, OPSET, GraphOptions, Nodes
from appliance.engine.weights import Tensor

OUTPUT = "images"


def build(config: dict[str, Any], tensors: dict[str, Tensor], int8: bool = False) -> ModelProto:
    """Input `pixels`: float32 [batch, 3, height, width], normalised. Output: float32 [batch, width of the space].

    int8: the weights of the layers as whole numbers.
    """
    tower = families.images(config)
    nodes = Nodes(tensors, options=GraphOptions(int8=int8))
    pooled = ImageGraph(nodes, tower).pooled()
    nodes.nodes.append(helper.make_node("Identity", [pooled], [OUTPUT]))
    pixels = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["batch", 3, "height", "width"])
    output = helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["batch", "width"])
    graph = nodes.graph(config["model_type"], [pixels], [output])
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(FUSED, 1)]
    return helper.make_model(graph, ir_version=IR_VERSION, opset_imports=opsets)


class ImageGraph:
    """All patches of a batch see each other: no mask is needed, and the fused attention serves."""

    def __init__(self, nodes: Nodes, tower: ImageTower) -> None:
        self.nodes, self.tower = nodes, tower

    def pooled(self) -> str:
        nodes, tower = self.nodes, self.tower
        x = self.embedded()
        if tower.before:
            x = nodes.norm(x, tower.body.norm, tower.before)
        x = EncoderGraph(nodes, tower.body, long=True).layers(x)
        nodes.int8 = False  # what makes one vector of the patches is small, and decides
        if tower.pool == "attention":
            return self.attended(nodes.norm(x, tower.body.norm, tower.after))
        x = nodes.norm(nodes.op("Gather", x, nodes.constant(0), axis=1), tower.body.norm, tower.after)
        return nodes.matmul(x, f"{tower.projection}.weight") if tower.projection else x

    def embedded(self) -> str:
        """[batch, patches, width], the class token in front where there is one."""
        nodes, tower = self.nodes, self.tower
        weight = nodes.weight(f"{tower.patch.name}.weight")
        size = int(nodes.tensors[str(nodes.full_name(f"{tower.patch.name}.weight"))].shape[-1])
        bias = [nodes.weight(f"{tower.patch.name}.bias")] if tower.patch.bias else []
        grid = nodes.op("Conv", "pixels", weight, *bias, kernel_shape=[size, size], strides=[size, size])
        flat = nodes.op("Reshape", grid, nodes.constant([0, tower.body.hidden, -1]))
        x = nodes.op("Transpose", flat, perm=[0, 2, 1])
        if tower.class_token:
            first = nodes.op("Reshape", nodes.weight(tower.class_token), nodes.constant([1, 1, -1]))
            rows = nodes.op("Shape", x, start=0, end=1)
            shape = nodes.op("Concat", rows, nodes.constant([1, tower.body.hidden]), axis=0)
            x = nodes.op("Concat", nodes.op("Expand", first, shape), x, axis=1)
        return nodes.op("Add", x, nodes.weight(tower.positions))

    def attended(self, x: str) -> str:
        """SigLIP's head: one learnt query over all patches, then a feed-forward of it."""
        nodes, body, head = self.nodes, self.tower.body, self.tower.head
        form = body.attention
        rows = nodes.op("Shape", x, start=0, end=1)
        shape = nodes.op("Concat", rows, nodes.constant([1, body.hidden]), axis=0)
        weights = nodes.ops("Split", nodes.weight(f"{head}.attention.in_proj_weight"), outputs=3, axis=0, num_outputs=3)
        biases = nodes.ops("Split", nodes.weight(f"{head}.attention.in_proj_bias"), outputs=3, axis=0, num_outputs=3)
        inputs = [nodes.op("Expand", nodes.weight(f"{head}.probe"), shape), x, x]
        query, key, value = (
            nodes.op("Add", nodes.op("FusedMatMul", each, weight, domain=FUSED, transB=1), bias)
            for each, weight, bias in zip(inputs, weights, biases, strict=True)
        )
        mixed = nodes.op("MultiHeadAttention", query, key, value, domain=FUSED, num_heads=form.heads, scale=form.scale)
        pooled = nodes.op("Squeeze", mixed, nodes.constant([1]))
        product = nodes.op(
            "FusedMatMul", pooled, nodes.weight(f"{head}.attention.out_proj.weight"), domain=FUSED, transB=1
        )
        pooled = nodes.op("Add", product, nodes.weight(f"{head}.attention.out_proj.bias"))
        inner = nodes.norm(pooled, body.norm, f"{head}.layernorm")
        for layer, activation in (("fc1", body.feed_forward.activation), ("fc2", None)):
            product = nodes.matmul(inner, f"{head}.mlp.{layer}.weight")
            inner = nodes.op("Add", product, nodes.weight(f"{head}.mlp.{layer}.bias"))
            inner = nodes.activate(inner, activation) if activation else inner
        return nodes.op("Add", pooled, inner)
