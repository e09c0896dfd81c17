"""torch's files are read without torch: the tensors come back, and a pickle that holds anything else is refused."""

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.core.problems import Problem
from appliance.engine.checkpoint import tensors_in
from testing.engines import HEADS

SPARSE, COLBERT = HEADS / "bge-m3" / "sparse_linear.pt", HEADS / "bge-m3" / "colbert_linear.pt"


def test_tensors_are_read_with_their_names_and_shapes() -> None:
    assert {name: value.shape for name, value in tensors_in(SPARSE).items()} == {"weight": (1, 32), "bias": (1,)}
    half = tensors_in(COLBERT)["weight"]
    assert half.shape == (16, 32)
    assert half.dtype == np.float32
    assert 0.05 < np.abs(half).mean() < 0.2  # torch draws them from -1 / sqrt(32) to 1 / sqrt(32)


class Runs:
    """A pickle that would run a command."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/ran",)


def rezipped(target: Path, pickled: bytes | None = None, keep: float = 1.0) -> Path:
    """The sparse head with another pickle, or with a part of each tensor's bytes."""
    with zipfile.ZipFile(SPARSE) as source, zipfile.ZipFile(target, "w") as copy:
        for name in source.namelist():
            raw = source.read(name)
            if name.endswith("data.pkl") and pickled is not None:
                raw = pickled
            elif "/data/" in name:
                raw = raw[: int(len(raw) * keep)]
            copy.writestr(name, raw)
    return target


def dumped(value: Any) -> bytes:
    file = io.BytesIO()
    pickle.dump(value, file, protocol=2)
    return file.getvalue()


@pytest.mark.parametrize(
    ("pickled", "keep", "words"),
    [
        (dumped(Runs()), 1.0, "it asks for posix.system, which no tensor needs"),
        (dumped({"weight": eval}), 1.0, "it asks for __builtin__.eval"),
        (dumped({"weight": [1.0]}), 1.0, "it holds other things than tensors"),
        (b"", 1.0, "Cannot read the weights"),
        (b"\x80\x02garbage", 1.0, "Cannot read the weights"),
        (None, 0.5, "shorter than its description"),
    ],
)
def test_what_is_no_tensor_is_refused(tmp_path: Path, pickled: bytes | None, keep: float, words: str) -> None:
    with pytest.raises(Problem, match=words):
        tensors_in(rezipped(tmp_path / "head.pt", pickled, keep))


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    raw = SPARSE.read_bytes()
    for length in range(0, len(raw), 97):
        (tmp_path / "cut.pt").write_bytes(raw[:length])
        with pytest.raises(Problem, match="Cannot read the weights"):
            tensors_in(tmp_path / "cut.pt")
