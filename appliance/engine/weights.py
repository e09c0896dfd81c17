"""safetensors files: which tensors they hold and where their bytes are. A tensor is read only on request."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from appliance.core.problems import invalid

HEADER_LIMIT = 100 * 1024 * 1024


@dataclass(frozen=True)
class Tensor:
    """Where one tensor is: the real file, the offset of its first byte, its length in bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of model.safetensors, or of the shards its index names. Raises: Problem on a damaged file."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors.update(header_of(folder / name))
    return tensors


def header_of(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, by name. Raises: Problem on a damaged file."""
    # The hub cache is made of symbolic links, and onnxruntime refuses external data behind one that leaves the folder.
    real = path.resolve()
    try:
        size_on_disk = real.stat().st_size
        with real.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > min(HEADER_LIMIT, size_on_disk):
                raise ValueError(f"its header claims {size} bytes")
            header = json.loads(file.read(size))
        tensors = {name: tensor_at(real, info, 8 + size) for name, info in header.items() if name != "__metadata__"}
        if any(tensor.offset + tensor.length > size_on_disk for tensor in tensors.values()):
            raise ValueError("it is shorter than its header says; was the download cut off?")
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise invalid(f"Cannot read the weights {path}: {error}") from error
    return tensors


def tensor_at(file: Path, info: dict[str, Any], base: int) -> Tensor:
    begin, end = info["data_offsets"]
    return Tensor(file, info["dtype"], tuple(info["shape"]), base + begin, end - begin)


def read_float32(tensor: Tensor) -> np.ndarray:
    """One tensor as a float32 array (F32, F16 and BF16)."""
    dtype = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[tensor.dtype]
    count = int(np.prod(tensor.shape, dtype=np.int64))
    flat = np.fromfile(tensor.file, dtype=dtype, count=count, offset=tensor.offset).reshape(tensor.shape)
    return from_bfloat16(flat) if tensor.dtype == "BF16" else flat.astype(np.float32)


def from_bfloat16(upper: np.ndarray) -> np.ndarray:
    """float32 from the upper halves of their bits, as uint16."""
    return (upper.astype(np.uint32) << 16).view(np.float32)
