"""`--runtime torch` on the CPU. Where the extra `torch` is not installed, nothing of it can be shown."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from appliance.core.problems import Problem
from appliance.drivers.modelfolder import read_card
from appliance.engine.runtime import PaddedBatch, Runtime
from testing.engines import FAMILIES

pytest.importorskip("torch")
pytest.importorskip("transformers")
IDS = np.arange(1, 9, dtype=np.int64)[None]
FEED = PaddedBatch(IDS, np.ones_like(IDS), np.zeros_like(IDS), np.array([-1]))


def test_weights_that_are_missing_are_no_random_numbers(tmp_path: Path) -> None:
    """Each replica had vectors of its own."""
    shutil.copytree(FAMILIES / "bert-cls", folder := tmp_path / "model")
    Runtime(read_card(folder), tmp_path, 1, "torch", None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] + 1}))
    with pytest.raises(Problem, match=r"no weights for \d+ tensors .* such as encoder\.layer\.") as refused:
        Runtime(read_card(folder), tmp_path, 1, "torch", None)
    assert refused.value.code == "UNSUPPORTED_MODEL"


def test_a_pooler_that_no_vector_needs_may_be_missing(tmp_path: Path) -> None:
    """One that fills masks has none."""
    card = read_card(FAMILIES / "bert-splade", "mean")
    one, other = (Runtime(card, tmp_path, 1, name, None).run(FEED) for name in ("torch", "onnxruntime"))
    np.testing.assert_allclose(one, other, atol=1e-4)
