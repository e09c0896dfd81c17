"""Scores of what a model gave: what is not finite is refused before it becomes a probability."""

import numpy as np
import pytest

from appliance.core.problems import Problem
from appliance.engine.answers import pair_scores


def row(value: float) -> np.ndarray:
    return np.array([value], np.float32)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_an_infinite_score_is_no_certainty(value: float, raw: bool) -> None:
    with pytest.raises(Problem, match="not a finite number"):
        pair_scores([row(1), row(value)], raw)


def test_finite_scores_are_probabilities_unless_raw() -> None:
    rows = [row(0), row(100)]
    assert pair_scores(rows, raw=True).tolist() == [0, 100]
    assert pair_scores(rows, raw=False).tolist() == [0.5, 1]
