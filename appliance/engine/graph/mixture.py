"""A mixture of experts in a graph: every expert computes the tokens that chose it, and no others."""

from __future__ import annotations

import numpy as np

from appliance.core.architecture import Mixture
from appliance.engine.graph.nodes import FUSED, Nodes


def mixed(nodes: Nodes, form: Mixture, x: str, number: int) -> str:
    """x: [rows, tokens, width], and so is the answer."""
    router, up, down, bias = (name.format(number) for name in (form.router, form.up, form.down, form.bias))
    shape = nodes.op("Shape", x)
    width = nodes.op("Shape", x, start=2)
    flat = nodes.op("Reshape", x, nodes.op("Concat", nodes.constant([-1]), width, axis=0))  # [all tokens, width]
    shares = routed(nodes, form, flat, router)
    total = nodes.op("ConstantOfShape", nodes.op("Shape", flat))
    experts = zip(nodes.parts(up, form.experts), nodes.parts(down, form.experts), strict=True)
    for expert, (own_up, own_down) in enumerate(experts):
        share = nodes.op("Gather", shares, nodes.constant(expert), axis=1)
        chosen = nodes.op("Transpose", nodes.op("NonZero", share), perm=[1, 0])  # [its tokens, 1]
        # The first token, too, which counts nothing: some operators give no rows a wrong shape (onnxruntime 1.31.1).
        rows = nodes.op("Concat", nodes.constant([[0]]), chosen, axis=0)
        counts = nodes.op("Concat", nodes.constant([[0]], np.float32), nodes.op("Gather", share, chosen), axis=0)
        own = nodes.op("GatherND", flat, rows)
        inner = nodes.activate(nodes.matmul(own, own_up), form.activation)
        answer = nodes.matmul(inner, own_down, as_it_is=True)
        total = nodes.op("ScatterND", total, rows, nodes.op("Mul", answer, counts), reduction="add")
    return nodes.op("Reshape", nodes.op("Add", total, nodes.weight(bias)), shape)


def routed(nodes: Nodes, form: Mixture, flat: str, router: str) -> str:
    """[all tokens, experts]: how much each expert counts, 0 where it was not chosen."""
    thought = nodes.op("FusedMatMul", flat, nodes.weight(router), domain=FUSED, transB=1)
    chances = nodes.op("Softmax", thought, axis=-1)
    most, experts = nodes.ops("TopK", chances, nodes.constant([form.chosen]), outputs=2, axis=-1)
    nothing = nodes.op("Mul", chances, nodes.constant(0, np.float32))
    return nodes.op("ScatterElements", nothing, experts, most, axis=1)
