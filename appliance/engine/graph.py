"""The ONNX graph of a BERT-like encoder, built from its config.json and safetensors file without torch.

Theory of operation. ONNX "external data" names a file, an offset and a length, and safetensors stores tensors little
endian and row-major, as ONNX requires: so every weight is a reference into the model's own file. The graph has some
50 kB, no weight is copied on disk, and onnxruntime maps the weights. An F16 or BF16 tensor gets a Cast, which
onnxruntime folds at load time.

    family       model types                       positions               names of the layers
    BERT         bert                              0, 1, 2, ...            encoder.layer.N.attention.self.query, ...
    RoBERTa      roberta, xlm-roberta, camembert   padding index + 1, ...  as BERT
    DistilBERT   distilbert                        0, 1, 2, ...            transformer.layer.N.attention.q_lin, ...
    MPNet        mpnet                             padding index + 1, ...  encoder.layer.N.attention.attn.q, ...
                 (and a bias by relative position, shared by all layers)

Heads: none (hidden states), `sparse` (SPLADE), `scores` (sequence classification). A *long* graph has no mask and uses
the fused attention of onnxruntime, whose memory grows with the length and not with its square (8,192 tokens of a
1,024-wide model: 0.7 GB instead of about 10); it takes only rows of one length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from appliance.core.families import FAMILIES, TensorNames
from appliance.core.servable import GELU, activation_of, refuse_unbuildable, unsupported
from appliance.engine.weights import Tensor

OPSET, IR_VERSION = 20, 10
FUSED = "com.microsoft"
ONNX_DTYPES = {"F32": TensorProto.FLOAT, "F16": TensorProto.FLOAT16, "BF16": TensorProto.BFLOAT16}


@dataclass(frozen=True)
class EncoderShape:
    """The sizes of an encoder, under one name for all families."""

    layers: int
    hidden: int
    heads: int
    epsilon: float
    activation: str

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> EncoderShape:
        return cls(
            layers=config.get("num_hidden_layers") or config["n_layers"],
            hidden=config.get("hidden_size") or config["dim"],
            heads=config.get("num_attention_heads") or config["n_heads"],
            epsilon=config.get("layer_norm_eps", 1e-12),
            activation=activation_of(config),
        )


@dataclass
class Nodes:
    """The nodes and initializers of a graph so far. A value is a name."""

    tensors: dict[str, Tensor]
    nodes: list[NodeProto] = field(default_factory=list)
    initializers: dict[str, TensorProto] = field(default_factory=dict)

    def op(self, kind: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        name = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, domain=domain, **attributes))
        return name

    def constant(self, value: Any, dtype: type = np.int64) -> str:
        name = f"constant_{len(self.initializers)}"
        self.initializers[name] = numpy_helper.from_array(np.asarray(value, dtype), name)
        return name

    def weight(self, name: str) -> str:
        """A tensor of the model as float32: a reference into its file."""
        if name not in self.tensors:
            raise unsupported(f'a model without the tensor "{name}"')
        tensor = self.tensors[name]
        if tensor.dtype not in ONNX_DTYPES:
            raise unsupported(f'a model whose tensor "{name}" is {tensor.dtype}')
        if name not in self.initializers:
            reference = TensorProto(name=name, data_type=ONNX_DTYPES[tensor.dtype], dims=tensor.shape)
            reference.data_location = TensorProto.EXTERNAL
            location = {"location": tensor.file.name, "offset": tensor.offset, "length": tensor.length}
            for key, value in location.items():
                reference.external_data.add(key=key, value=str(value))
            self.initializers[name] = reference
        return name if tensor.dtype == "F32" else self.op("Cast", name, to=TensorProto.FLOAT)

    def matmul(self, x: str, weight: str) -> str:
        # The file has a weight as [out, in]; onnxruntime would keep the result of a Transpose as a copy.
        return self.op("FusedMatMul", x, self.weight(weight), domain=FUSED, transB=1)

    def linear(self, x: str, name: str) -> str:
        return self.op("Add", self.matmul(x, f"{name}.weight"), self.weight(f"{name}.bias"))

    def norm(self, x: str, name: str, epsilon: float) -> str:
        # Very old checkpoints call the two tensors gamma and beta.
        scale, shift = ("gamma", "beta") if f"{name}.gamma" in self.tensors else ("weight", "bias")
        parts = self.weight(f"{name}.{scale}"), self.weight(f"{name}.{shift}")
        return self.op("LayerNormalization", x, *parts, axis=-1, epsilon=epsilon)

    def activate(self, x: str, activation: str) -> str:
        return self.op("Relu", x) if activation == "relu" else self.op("Gelu", x, approximate=GELU[activation])


def build(config: dict[str, Any], tensors: dict[str, Tensor], head: str, long: bool = False) -> ModelProto:
    """The graph of one model. head: `hidden`, `sparse` or `scores`, which is also the name of its output.

    Inputs: input_ids, attention_mask, token_type_ids (those that the model uses), int64 [batch, tokens]. Output,
    float32: hidden [batch, tokens, width]; sparse [batch, vocabulary]; scores [batch, labels].
    Raises: Problem UNSUPPORTED_MODEL, with what can be done.
    """
    refuse_unbuildable(config)
    encoder = Encoder(config, Nodes(tensors), FAMILIES[config["model_type"]], EncoderShape.from_config(config))
    hidden = encoder.hidden_states(long)
    if head == "sparse":
        output, sizes = encoder.sparse(hidden), ["batch", config["vocab_size"]]
    elif head == "scores":
        output, sizes = encoder.scores(hidden), ["batch", "labels"]
    else:
        output, sizes = hidden, ["batch", "tokens", encoder.shape.hidden]
    return encoder.model(output, head, sizes)


class Encoder:
    """Builds the parts of one encoder."""

    def __init__(self, config: dict[str, Any], nodes: Nodes, names: TensorNames, shape: EncoderShape) -> None:
        self.config, self.nodes, self.names, self.shape = config, nodes, names, shape
        self.kind = config["model_type"]
        bare = not any(name.startswith(names.prefix) for name in nodes.tensors)
        self.prefix = "" if bare else names.prefix
        self.embeddings = f"{self.prefix}embeddings."
        self.head_size = shape.hidden // shape.heads

    def hidden_states(self, long: bool) -> str:
        x = self.embed()
        bias = "" if long else self.attention_bias()
        for number in range(self.shape.layers):
            x = self.layer(x, self.prefix + self.names.layer.format(number), bias)
        return x

    def embed(self) -> str:
        nodes = self.nodes
        x = nodes.op("Gather", nodes.weight(f"{self.embeddings}word_embeddings.weight"), "input_ids")
        position = nodes.op("Gather", nodes.weight(f"{self.embeddings}position_embeddings.weight"), self.positions())
        x = nodes.op("Add", x, position)
        types = f"{self.embeddings}token_type_embeddings.weight"
        if types in nodes.tensors:
            x = nodes.op("Add", x, nodes.op("Gather", nodes.weight(types), "token_type_ids"))
        return nodes.norm(x, f"{self.embeddings}LayerNorm", self.shape.epsilon)

    def positions(self) -> str:
        nodes = self.nodes
        if self.kind in ("bert", "distilbert"):
            length = nodes.op("Squeeze", nodes.op("Shape", "input_ids", start=1, end=2))
            return nodes.op("Range", nodes.constant(0), length, nodes.constant(1))
        # RoBERTa: padding index + 1 + the position among the real tokens; padding has the padding index.
        counted = nodes.op("Mul", nodes.op("CumSum", "attention_mask", nodes.constant(1)), "attention_mask")
        return nodes.op("Add", counted, nodes.constant(self.config.get("pad_token_id", 1)))

    def attention_bias(self) -> str:
        """0 for real tokens and the lowest float for padding, as [batch, 1, 1, tokens]."""
        nodes = self.nodes
        mask = nodes.op("Unsqueeze", "attention_mask", nodes.constant([1, 2]))
        away = nodes.op("Sub", nodes.constant(1, np.float32), nodes.op("Cast", mask, to=TensorProto.FLOAT))
        bias = nodes.op("Mul", away, nodes.constant(np.finfo(np.float32).min, np.float32))
        return nodes.op("Add", bias, self.relative_bias()) if self.kind == "mpnet" else bias

    def relative_bias(self) -> str:
        """MPNet's bias by relative position, [1, heads, tokens, tokens]."""
        nodes = self.nodes
        buckets = relative_buckets(
            self.config["max_position_embeddings"], self.config.get("relative_attention_num_buckets", 32)
        )
        length = nodes.op("Shape", "input_ids", start=1, end=2)
        square = nodes.op("Concat", length, length, axis=0)
        cut = nodes.op("Slice", nodes.constant(buckets), nodes.constant([0, 0]), square, nodes.constant([0, 1]))
        bias = nodes.op("Gather", nodes.weight(f"{self.prefix}encoder.relative_attention_bias.weight"), cut)
        return nodes.op("Unsqueeze", nodes.op("Transpose", bias, perm=[2, 0, 1]), nodes.constant([0]))

    def layer(self, x: str, at: str, bias: str) -> str:
        nodes, names, epsilon = self.nodes, self.names, self.shape.epsilon
        attended = nodes.linear(self.attention(x, at, bias), at + names.attended)
        x = nodes.norm(nodes.op("Add", attended, x), at + names.attended_norm, epsilon)
        inner = nodes.activate(nodes.linear(x, at + names.up), self.shape.activation)
        return nodes.norm(nodes.op("Add", nodes.linear(inner, at + names.down), x), at + names.norm, epsilon)

    def attention(self, x: str, at: str, bias: str) -> str:
        nodes, names = self.nodes, self.names
        query, key, value = (nodes.linear(x, at + name) for name in (names.query, names.key, names.value))
        if not bias:
            return nodes.op("MultiHeadAttention", query, key, value, domain=FUSED, num_heads=self.shape.heads)
        split = nodes.constant([0, 0, self.shape.heads, self.head_size])
        query, key, value = (
            nodes.op("Transpose", nodes.op("Reshape", part, split), perm=perm)
            for part, perm in ((query, [0, 2, 1, 3]), (key, [0, 2, 3, 1]), (value, [0, 2, 1, 3]))
        )
        scale = nodes.constant(math.sqrt(self.head_size), np.float32)
        scores = nodes.op("Add", nodes.op("Div", nodes.op("MatMul", query, key), scale), bias)
        mixed = nodes.op("MatMul", nodes.op("Softmax", scores, axis=-1), value)
        joined = nodes.constant([0, 0, self.shape.hidden])
        return nodes.op("Reshape", nodes.op("Transpose", mixed, perm=[0, 2, 1, 3]), joined)

    def sparse(self, hidden: str) -> str:
        """SPLADE: log(1 + relu(logits)), the largest over the tokens; [batch, vocabulary].

        The maximum is taken first, which is the same since log and relu are monotonic: so the large tensor of tokens x
        vocabulary is reduced before log and relu are computed.
        """
        nodes = self.nodes
        dense, norm, decoder, bias = self.names.lm_head
        y = nodes.norm(nodes.activate(nodes.linear(hidden, dense), self.shape.activation), norm, self.shape.epsilon)
        tied = f"{self.embeddings}word_embeddings.weight"
        logits = nodes.op("Add", nodes.matmul(y, decoder if decoder in nodes.tensors else tied), nodes.weight(bias))
        mask = nodes.op("Cast", nodes.op("Unsqueeze", "attention_mask", nodes.constant([2])), to=TensorProto.FLOAT)
        padding = nodes.op("Sub", nodes.constant(1, np.float32), mask)
        masked = nodes.op("Sub", logits, nodes.op("Mul", padding, nodes.constant(1e9, np.float32)))
        largest = nodes.op("ReduceMax", masked, nodes.constant([1]), keepdims=0)
        return nodes.op("Log", nodes.op("Add", nodes.op("Relu", largest), nodes.constant(1, np.float32)))

    def scores(self, hidden: str) -> str:
        """The raw scores of sequence classification from the first token; [batch, labels]."""
        nodes = self.nodes
        dense, activation, output = self.names.head
        first = nodes.op("Gather", hidden, nodes.constant(0), axis=1)
        return nodes.linear(nodes.op(activation, nodes.linear(first, dense)), output)

    def model(self, output: str, name: str, sizes: list[Any]) -> ModelProto:
        nodes = self.nodes
        nodes.nodes.append(helper.make_node("Identity", [output], [name]))
        used = {value for node in nodes.nodes for value in node.input}
        inputs = [tokens(value) for value in ("input_ids", "attention_mask", "token_type_ids") if value in used]
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes)]
        initializers = [tensor for key, tensor in nodes.initializers.items() if key in used]
        graph = helper.make_graph(nodes.nodes, self.kind, inputs, outputs, initializers)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(FUSED, 1)]
        return helper.make_model(graph, ir_version=IR_VERSION, opset_imports=opsets)


def tokens(name: str) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "tokens"])


def relative_buckets(length: int, buckets: int, far: int = 128) -> np.ndarray:
    """T5's bucket of every (query, key) distance, [length, length]: exact when near, logarithmic when far."""
    position = np.arange(length)
    distance = position[:, None] - position[None]
    half = buckets // 2
    side = (distance < 0) * half
    distance, exact = np.abs(distance), half // 2
    growth = np.log(np.maximum(distance, 1) / exact) / math.log(far / exact) * (half - exact)
    return side + np.where(distance < exact, distance, np.minimum(exact + growth.astype(np.int64), half - 1))
