"""Reads the tensors of a small file that torch.save wrote, without torch and without running what a pickle may hold.

Such a file is a zip: a pickle that describes a dictionary of tensors, and the bytes of each. Only the four names that
describe tensors are resolved; every other name in the pickle is refused.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from appliance.core.problems import invalid
from appliance.engine.weights import from_bfloat16

LARGEST = 256 * 1024 * 1024  # bytes of a tensor; BGE-M3's largest has 4 MB
DTYPES: dict[str, np.dtype] = {
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype("<u2"),
}


def tensors_in(path: Path) -> dict[str, np.ndarray]:
    """The tensors by name, as float32. Raises: Problem for a file that is anything else."""
    try:
        with zipfile.ZipFile(path) as archive:
            (described,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            found = TensorUnpickler(archive, described).load()
        if not isinstance(found, dict) or not all(isinstance(value, np.ndarray) for value in found.values()):
            raise ValueError("it holds other things than tensors")
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise invalid(f"Cannot read the weights {path}: {error}", "UNSUPPORTED_MODEL") from error
    return {str(name): value for name, value in found.items()}


class TensorUnpickler(pickle.Unpickler):
    """described: the name of the pickle; the bytes of the tensors are in the folder `data` beside it."""

    def __init__(self, archive: zipfile.ZipFile, described: str) -> None:
        super().__init__(archive.open(described))
        self.archive, self.folder = archive, described.removesuffix("data.pkl")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return rebuilt
        if module == "torch" and name in DTYPES:
            return name
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no tensor needs")

    def persistent_load(self, pid: Any) -> np.ndarray:
        """pid: ("storage", its class, its file, device, numbers)."""
        _, kind, key, _, count = pid
        dtype = DTYPES[kind]
        if count * dtype.itemsize > LARGEST:
            raise ValueError(f"a tensor of it has {count} numbers")
        with self.archive.open(f"{self.folder}data/{key}") as file:
            raw = file.read(LARGEST + 1)
        flat = np.frombuffer(raw, dtype)
        if len(flat) != count:
            raise ValueError("it is shorter than its description says; was the download cut off?")
        return from_bfloat16(flat) if kind == "BFloat16Storage" else flat.astype(np.float32)


def rebuilt(flat: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> np.ndarray:
    """A contiguous tensor of a storage."""
    count = int(np.prod(shape, dtype=np.int64))
    if not 0 <= offset <= offset + count <= len(flat) or strides != contiguous(shape):
        raise ValueError("a tensor of it is not laid out in one piece")
    return flat[offset : offset + count].reshape(shape)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[at + 1 :], dtype=np.int64)) for at in range(len(shape)))
