"""The arithmetic of `bench --quality`, without an appliance; tests/e2e/test_bench_client.py runs it against one."""

from pathlib import Path

import numpy as np
import pytest

from appliance.cli import quality
from appliance.core.problems import Problem
from appliance.wire.quantization import CONVERSIONS


def test_ndcg_is_of_the_rank_of_the_document_of_each_query() -> None:
    best = np.array([[0, 1, 2], [0, 1, 2], [0, 1, 9]])
    assert quality.ndcg(best) == pytest.approx((1 + 1 / np.log2(3) + 0) / 3)


def test_signs_rank_as_the_number_of_equal_ones() -> None:
    vectors = np.random.default_rng(5).normal(size=(30, 64)).astype(np.float32)
    signs = quality.as_floats("binary", CONVERSIONS["binary"](vectors))
    equal = ((vectors[:5, None] > 0) == (vectors[None, 5:] > 0)).sum(axis=-1)
    best = quality.ranked(signs, 5)
    assert [equal[row, at] for row in range(5) for at in best[row]] == [
        count for row in range(5) for count in sorted(equal[row], reverse=True)[:10]
    ]


def test_lines_of_a_file_are_cut_into_query_and_document(tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("".join(f"one two three four five six {n}\n" for n in range(11)) + "too short\n")
    assert quality.pairs_of(str(file))[:2] == [("one two three", f"four five six {n}") for n in range(2)]
    file.write_text("one two three four five six\n" * 50)
    with pytest.raises(Problem, match="over 10 different lines"):
        quality.pairs_of(str(file))
    with pytest.raises(Problem, match="Cannot read the texts"):
        quality.pairs_of(str(tmp_path / "none"))
