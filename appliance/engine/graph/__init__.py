"""The ONNX graph of a model, built from its config.json and safetensors file without torch.

`core/families` says what a model computes; here is how: `nodes` (weights and operations), `encoder` (embeddings and
layers), `attention` (its kinds, for batches and long rows), `relative` (positions as distances), `mixture` (of
experts), `adapters`, `heads`.
"""

from __future__ import annotations

from typing import Any

from onnx import ModelProto, TensorProto, helper

from appliance.core.families import architecture_of
from appliance.engine.graph import adapters, heads
from appliance.engine.graph.encoder import EncoderGraph
from appliance.engine.graph.nodes import DEFAULTS, FUSED, IR_VERSION, OPSET, GraphOptions, Nodes, uses
from appliance.engine.weights import Tensor

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def build(
    config: dict[str, Any], tensors: dict[str, Tensor], head: str, options: GraphOptions = DEFAULTS
) -> ModelProto:
    """The graph of one model. head: `hidden`, `sparse` or `scores`, which is also the name of its output.

    Inputs: input_ids, attention_mask, token_type_ids (those that the model uses), int64 [batch, tokens]; adapters
    (where it has some), int64 [batch]. Output, float32: hidden [batch, tokens, width]; sparse [batch, vocabulary];
    scores [batch, labels].
    Raises: Problem UNSUPPORTED_MODEL, with what can be done.
    """
    architecture = architecture_of(config, head)
    nodes, long = Nodes(tensors, architecture.prefixes, options), options.long
    if architecture.adapter_scale is not None:
        nodes.additions = adapters.AdapterGraph(nodes, architecture.adapter_scale)
    hidden = EncoderGraph(nodes, architecture, long).hidden_states()
    nodes.int8 = False  # a head is small, or decides: it stays as it is
    if head == "sparse":
        output, sizes = heads.sparse(nodes, architecture, hidden, long), ["batch", "vocabulary"]
    elif head == "scores":
        output, sizes = heads.scores(nodes, architecture, hidden, long), ["batch", "labels"]
    else:
        output, sizes = hidden, ["batch", "tokens", "width"]
    nodes.nodes.append(helper.make_node("Identity", [output], [head]))
    used = set(uses(nodes.nodes))
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "tokens"]) for name in INPUTS if name in used
    ]
    if adapters.INPUT in used:
        inputs.append(helper.make_tensor_value_info(adapters.INPUT, TensorProto.INT64, ["batch"]))
    outputs = [helper.make_tensor_value_info(head, TensorProto.FLOAT, sizes)]
    graph = nodes.graph(config["model_type"], inputs, outputs)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(FUSED, 1)]
    return helper.make_model(graph, ir_version=IR_VERSION, opset_imports=opsets)
