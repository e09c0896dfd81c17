"""Models with random weights, of any size: what takes long is computed, and not pretended."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np

from testing.engines import FAMILIES

PATTERN = "bert-cls"


def random_model(folder: Path, width: int, layers: int, positions: int) -> Path:
    """A BERT of ``layers`` layers and ``positions`` tokens in ``folder``, with the tokenizer of a small one."""
    pattern = FAMILIES / PATTERN
    shutil.copytree(pattern, folder)
    sizes = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "max_position_embeddings": positions,
    }
    config = json.loads((pattern / "config.json").read_text()) | sizes
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder / "model.safetensors", shapes(config))
    return folder


def shapes(config: dict[str, int]) -> dict[str, tuple[int, ...]]:
    width, inner = config["hidden_size"], config["intermediate_size"]
    rows = {"word": config["vocab_size"], "position": config["max_position_embeddings"], "token_type": 2}
    shapes: dict[str, tuple[int, ...]] = {f"embeddings.{kind}_embeddings.weight": (rows[kind], width) for kind in rows}
    linear = {
        **{f"attention.self.{part}": (width, width) for part in ("query", "key", "value")},
        "attention.output.dense": (width, width),
        "intermediate.dense": (inner, width),
        "output.dense": (width, inner),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}."
        norms += [f"{at}attention.output.LayerNorm", f"{at}output.LayerNorm"]
        shapes |= {f"{at}{name}.weight": shape for name, shape in linear.items()}
        shapes |= {f"{at}{name}.bias": shape[:1] for name, shape in linear.items()}
    return shapes | {f"{name}.{part}": (width,) for name in norms for part in ("weight", "bias")}


def write_weights(path: Path, wanted: dict[str, tuple[int, ...]]) -> None:
    """safetensors: the length of a JSON header, the header, then all values in its order."""
    header, offset = {}, 0
    for name, shape in wanted.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    raw_header = json.dumps(header).encode()
    values = np.random.default_rng(0).standard_normal(offset // 4, np.float32) * np.float32(0.02)
    path.write_bytes(struct.pack("<Q", len(raw_header)) + raw_header + values.tobytes())
