"""What comes after the hidden states: the sparse vector of SPLADE, and the scores of classification."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from appliance.core.architecture import Architecture, ScoreHead
from appliance.engine.graph.nodes import FUSED, Nodes

BLOCK = 256  # tokens of a long row whose logits exist at once


def sparse(nodes: Nodes, architecture: Architecture, hidden: str, long: bool) -> str:
    """SPLADE: log(1 + relu(logits)), the largest over the tokens; [batch, vocabulary].

    The maximum is taken first, which is the same since log and relu are monotonic: so the large tensor of tokens x
    vocabulary is reduced before log and relu are computed. Of a long row only some tokens have theirs at once.
    """
    if long:
        largest = largest_by_blocks(nodes, architecture, hidden)
    else:
        mask = nodes.op("Cast", nodes.op("Unsqueeze", "attention_mask", nodes.constant([2])), to=TensorProto.FLOAT)
        padding = nodes.op("Sub", nodes.constant(1, np.float32), mask)
        far = nodes.op("Mul", padding, nodes.constant(1e9, np.float32))
        masked = nodes.op("Sub", logits(nodes, architecture, hidden), far)
        largest = nodes.op("ReduceMax", masked, nodes.constant([1]), keepdims=0)
    return nodes.op("Log", nodes.op("Add", nodes.op("Relu", largest), nodes.constant(1, np.float32)))


def logits(nodes: Nodes, architecture: Architecture, hidden: str) -> str:
    head = architecture.language_head
    assert head
    y = nodes.norm(nodes.activate(nodes.linear(hidden, head.dense), head.activation), architecture.norm, head.norm)
    has_own = nodes.full_name(head.decoder) is not None
    product = nodes.matmul(y, head.decoder if has_own else architecture.embeddings.words)
    return nodes.op("Add", product, nodes.weight(head.bias)) if head.bias else product


def largest_by_blocks(nodes: Nodes, architecture: Architecture, hidden: str) -> str:
    """The largest logits of one row. The last block is filled up with its last token, which changes no maximum."""
    length = nodes.op("Shape", hidden, start=1, end=2)
    block = nodes.constant([BLOCK])
    blocks = nodes.op("Div", nodes.op("Add", length, nodes.constant([BLOCK - 1])), block)
    missing = nodes.op("Sub", nodes.op("Mul", blocks, block), length)
    pads = nodes.op("Concat", nodes.constant([0, 0, 0, 0]), missing, nodes.constant([0]), axis=0)
    padded = nodes.op("Pad", hidden, pads, mode="edge")
    cut = nodes.op("Reshape", padded, nodes.constant([-1, BLOCK, architecture.hidden]))
    body, tag = nodes.body(), next(nodes.numbers)
    before, part, after = f"largest_{tag}", f"tokens_{tag}", f"larger_{tag}"
    own = body.op("ReduceMax", logits(body, architecture, part), body.constant([0]), keepdims=0)
    body.nodes.append(helper.make_node("Max", [before, own], [after]))
    sizes = [architecture.vocabulary]
    state = [helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes) for name in (before, after)]
    tokens = helper.make_tensor_value_info(part, TensorProto.FLOAT, [BLOCK, architecture.hidden])
    graph = helper.make_graph(body.nodes, f"tokens_{tag}", [state[0], tokens], [state[1]])
    lowest = nodes.constant(np.full(sizes, np.finfo(np.float32).min), np.float32)
    largest = nodes.op("Scan", lowest, cut, num_scan_inputs=1, body=graph)
    return nodes.op("Unsqueeze", largest, nodes.constant([0]))


def scores(nodes: Nodes, architecture: Architecture, hidden: str, long: bool) -> str:
    """The raw scores of sequence classification; [batch, labels]."""
    head = architecture.score_head
    assert head
    x = pooled(nodes, hidden, head.pool, long)
    if head.dense:
        x = nodes.activate(nodes.linear(x, head.dense), head.activation)
    if head.norm:
        x = nodes.norm(x, architecture.norm, head.norm)
    return answer(nodes, architecture, x, head) if head.tokens else nodes.linear(x, head.output)


def answer(nodes: Nodes, architecture: Architecture, x: str, head: ScoreHead) -> str:
    """[batch, 1]: the logit of the first token, minus that of the second. Only these rows of the weight are used."""
    own = f"{head.output.name}.weight"
    weight = nodes.weight(own if nodes.full_name(own) else architecture.embeddings.words)
    rows = [nodes.op("Gather", weight, nodes.constant([token])) for token in head.tokens]
    row = rows[0] if len(rows) == 1 else nodes.op("Sub", *rows)
    return nodes.op("FusedMatMul", x, row, domain=FUSED, transB=1)


def pooled(nodes: Nodes, hidden: str, pool: str, long: bool) -> str:
    """[batch, tokens, width] to [batch, width]: the first token, the last real one, or the mean of the real ones."""
    if pool == "first":
        return nodes.op("Gather", hidden, nodes.constant(0), axis=1)
    if long:  # one row, without padding
        if pool == "last":
            return nodes.op("Gather", hidden, nodes.constant(-1), axis=1)
        return nodes.op("ReduceMean", hidden, nodes.constant([1]), keepdims=0)
    counts = nodes.op("ReduceSum", "attention_mask", nodes.constant([1]), keepdims=1)  # [batch, 1]
    if pool == "last":
        at = nodes.op("Unsqueeze", nodes.op("Sub", counts, nodes.constant(1)), nodes.constant([2]))
        width = nodes.op("Shape", hidden, start=2, end=3)
        rows = nodes.op("Shape", hidden, start=0, end=1)
        index = nodes.op("Expand", at, nodes.op("Concat", rows, nodes.constant([1]), width, axis=0))
        return nodes.op("Squeeze", nodes.op("GatherElements", hidden, index, axis=1), nodes.constant([1]))
    mask = nodes.op("Cast", nodes.op("Unsqueeze", "attention_mask", nodes.constant([2])), to=TensorProto.FLOAT)
    total = nodes.op("ReduceSum", nodes.op("Mul", hidden, mask), nodes.constant([1]), keepdims=0)
    return nodes.op("Div", total, nodes.op("Cast", counts, to=TensorProto.FLOAT))
