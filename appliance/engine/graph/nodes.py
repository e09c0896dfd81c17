"""The nodes and initializers of a graph in the making. A value is a name.

ONNX "external data" names a file, an offset and a length, and safetensors stores tensors little endian and row-major,
as ONNX requires: so every weight is a reference into the model's own file. The graph has some 50 kB, no weight is
copied on disk, and onnxruntime maps the weights. An F16 or BF16 tensor gets a Cast, which onnxruntime folds at load
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from appliance.core.architecture import Linear, Norm
from appliance.core.families.common import unsupported
from appliance.engine.weights import Tensor, read_float32

FUSED = "com.microsoft"
ONNX_DTYPES = {"F32": TensorProto.FLOAT, "F16": TensorProto.FLOAT16, "BF16": TensorProto.BFLOAT16}
GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh"}
OPSET, IR_VERSION = 23, 11
SIGMOID_FACTORS = {"silu": 1.0, "swish": 1.0, "quick_gelu": 1.702}  # x * sigmoid(factor * x)
SMALLEST = 1e-30  # of a scale: zeros have one, too
SIMPLE = {"relu": "Relu", "tanh": "Tanh"}


class GraphOptions(NamedTuple):
    """long: for one row, with memory that grows with its length only. plain: without those fused operators that
    OpenVINO (2026.4) does not know. int8: the weights of the layers as whole numbers.
    """

    long: bool = False
    plain: bool = False
    int8: bool = False


DEFAULTS = GraphOptions()


class Additions(Protocol):
    """What is added to the layers and tables that have more than their weight."""

    def add_to_layer(self, y: str, x: str, layer: str) -> str:
        """y: what the layer made of x."""

    def add_to_table(self, y: str, ids: str, table: str) -> str:
        """y: the rows of the table for ids."""


class Nodes:
    """tensors: of the model's files; prefixes: what may stand before a name in them."""

    def __init__(
        self, tensors: dict[str, Tensor], prefixes: Sequence[str] = ("",), options: GraphOptions = DEFAULTS
    ) -> None:
        self.tensors, self.prefixes, self.plain = dict(tensors), (*prefixes, ""), options.plain
        self.int8 = options.int8
        self.additions: Additions | None = None
        self.whole: dict[str, tuple[str, str]] = {}  # values that are quantised
        self.nodes: list[NodeProto] = []
        self.initializers: dict[str, TensorProto] = {}
        self.numbers = count()

    def body(self) -> Nodes:
        """The nodes of a loop inside this graph; it sees what is outside, and shares the initializers."""
        inner = Nodes(self.tensors, self.prefixes, GraphOptions(plain=self.plain, int8=self.int8))
        inner.initializers, inner.numbers = self.initializers, self.numbers
        return inner

    def op(self, kind: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        return self.ops(kind, *inputs, outputs=1, domain=domain, **attributes)[0]

    def ops(self, kind: str, *inputs: str, outputs: int, domain: str = "", **attributes: Any) -> list[str]:
        """A node of several outputs."""
        number = next(self.numbers)
        names = [f"{kind}_{number}" + (f"_{index}" if index else "") for index in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, name=names[0], domain=domain, **attributes))
        return names

    def constant(self, value: Any, dtype: type = np.int64) -> str:
        name = f"constant_{len(self.initializers)}"
        self.initializers[name] = numpy_helper.from_array(np.asarray(value, dtype), name)
        return name

    def full_name(self, name: str) -> str | None:
        """The name of a tensor in the file; None when it has none. A weight that adapters are added to has a longer
        one."""
        longer = name.removesuffix(".weight") + ".parametrizations.weight.original"
        names = [prefix + each for each in (name, longer) for prefix in self.prefixes]
        return next((each for each in names if each in self.tensors), None)

    def known_name(self, short: str) -> str:
        """Raises: Problem UNSUPPORTED_MODEL when the file has no such tensor."""
        name = self.full_name(short)
        if name is None:
            raise unsupported(f'a model without the tensor "{short}"')
        return name

    def weight(self, short: str) -> str:
        """A tensor of the model as float32: a reference into its file."""
        name = self.known_name(short)
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

    def parts(self, short: str, count: int) -> list[str]:
        """The names of so many equal parts of a tensor, cut along its first axis."""
        name = self.known_name(short)
        tensor = self.tensors[name]
        rows, length = tensor.shape[0] // count, tensor.length // count
        for at in range(count):
            part = replace(tensor, shape=(rows, *tensor.shape[1:]), offset=tensor.offset + at * length, length=length)
            self.tensors[f"{name}[{at}]"] = part
        return [f"{short}[{at}]" for at in range(count)]

    def matmul(self, x: str, weight: str, as_it_is: bool = False) -> str:
        """The file has a weight as [out, in], or ``as_it_is`` multiplied, [in, out]."""
        if self.int8:
            return self.quantized_matmul(x, weight, as_it_is)
        # onnxruntime would keep the result of a Transpose as a copy.
        return self.op("FusedMatMul", x, self.weight(weight), domain=FUSED, transB=int(not as_it_is))

    def quantized_matmul(self, x: str, short: str, as_it_is: bool) -> str:
        """Whole numbers times whole numbers. The weight is kept in the graph, [in, out] int8, with the scale of each
        output; x gets a scale for each token, so that no token depends on what else is in its batch."""
        name = self.known_name(short)
        kept, scales = f"{name}.int8", f"{name}.scales"
        if kept not in self.initializers:
            weight = read_float32(self.tensors[name])
            weight = weight.T if as_it_is else weight
            scale = np.maximum(np.abs(weight).max(axis=1), SMALLEST) / 127
            whole = np.rint(weight / scale[:, np.newaxis]).astype(np.int8)
            self.initializers[kept] = numpy_helper.from_array(np.ascontiguousarray(whole.T), kept)
            self.initializers[scales] = numpy_helper.from_array(scale.astype(np.float32), scales)
        whole_x, scale_x = self.quantized(x)
        product = self.op("MatMulInteger", whole_x, kept, self.constant(128, np.uint8))
        return self.op("Mul", self.op("Mul", self.op("Cast", product, to=TensorProto.FLOAT), scale_x), scales)

    def quantized(self, x: str) -> tuple[str, str]:
        """(x as 1 to 255, 128 for zero; the scale of each token); once for all layers that take it."""
        if x not in self.whole:
            largest = self.op("ReduceMax", self.op("Abs", x), self.constant([-1]), keepdims=1)
            least = self.constant(SMALLEST, np.float32)
            scale = self.op("Div", self.op("Max", largest, least), self.constant(127, np.float32))
            rounded = self.op("Add", self.op("Round", self.op("Div", x, scale)), self.constant(128, np.float32))
            self.whole[x] = self.op("Cast", rounded, to=TensorProto.UINT8), scale
        return self.whole[x]

    def linear(self, x: str, layer: Linear, number: int = 0) -> str:
        name = layer.name.format(number)
        product = self.matmul(x, f"{name}.weight")
        if self.additions:
            product = self.additions.add_to_layer(product, x, name)
        return self.op("Add", product, self.weight(f"{name}.bias")) if layer.bias else product

    def table(self, weight: str, ids: str) -> str:
        """The rows of a weight."""
        found = self.op("Gather", self.weight(weight), ids)
        return self.additions.add_to_table(found, ids, weight.removesuffix(".weight")) if self.additions else found

    def norm(self, x: str, norm: Norm, pattern: str, number: int = 0) -> str:
        name = pattern.format(number)
        # Very old checkpoints call the two tensors gamma and beta.
        old = self.full_name(f"{name}.gamma") is not None
        scale = self.weight(f"{name}.gamma" if old else f"{name}.weight")
        if norm.kind == "layer":
            shift = [self.weight(f"{name}.beta" if old else f"{name}.bias")] if norm.bias else []
            return self.op("LayerNormalization", x, scale, *shift, axis=-1, epsilon=norm.epsilon)
        if norm.kind == "rms+1":
            scale = self.op("Add", scale, self.constant(1, np.float32))
        if not self.plain:
            return self.op("RMSNormalization", x, scale, axis=-1, epsilon=norm.epsilon)
        squares = self.op("ReduceMean", self.op("Mul", x, x), self.constant([-1]), keepdims=1)
        root = self.op("Sqrt", self.op("Add", squares, self.constant(norm.epsilon, np.float32)))
        return self.op("Mul", self.op("Div", x, root), scale)

    def activate(self, x: str, activation: str) -> str:
        if self.plain and activation in SIGMOID_FACTORS:
            return self.gated(x, self.op("Mul", x, self.constant(SIGMOID_FACTORS[activation], np.float32)))
        if self.plain and GELU.get(activation) == "tanh":
            cube = self.op("Mul", self.op("Mul", x, x), self.op("Mul", x, self.constant(0.044715, np.float32)))
            bent = self.op("Add", x, cube)
            return self.gated(x, self.op("Mul", bent, self.constant(2 * np.sqrt(2 / np.pi), np.float32)))
        if activation in GELU:
            return self.op("Gelu", x, approximate=GELU[activation])
        if activation in SIGMOID_FACTORS:
            return self.op("QuickGelu", x, domain=FUSED, alpha=SIGMOID_FACTORS[activation])
        return self.op(SIMPLE[activation], x)

    def gated(self, x: str, gate: str) -> str:
        """x * sigmoid(gate), as 0.5 x (1 + tanh(gate / 2)). OpenVINO (2026.4) knows the plainer forms again and fuses
        them with the layers around; in bfloat16 that ended the process with a division by zero."""
        half = self.constant(0.5, np.float32)
        raised = self.op("Add", self.op("Tanh", self.op("Mul", gate, half)), self.constant(1, np.float32))
        return self.op("Mul", self.op("Mul", x, half), raised)

    def graph(self, name: str, inputs: list[ValueInfoProto], outputs: list[ValueInfoProto]) -> GraphProto:
        """With those initializers that its nodes use, those of loops included; of a body, without any."""
        used = set(uses(self.nodes))
        initializers = [tensor for key, tensor in self.initializers.items() if key in used]
        return helper.make_graph(self.nodes, name, inputs, outputs, initializers)


def uses(nodes: Sequence[NodeProto]) -> list[str]:
    """The values that nodes take in, also those inside loops."""
    found = [value for node in nodes for value in node.input]
    for node in nodes:
        for attribute in node.attribute:
            found += uses(attribute.g.node) if attribute.HasField("g") else []
    return found
