"""Scores of vectors, and orders that become one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.wire import scoring

SCORES = st.lists(st.integers(-50, 50), min_size=1, max_size=30).map(lambda values: np.array(values, float))


def test_maxsim_adds_up_the_best_products() -> None:
    query, document = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[0.5, 0.5], [0.9, -0.1]])
    assert scoring.maxsim(query, document) == pytest.approx(0.9 + 0.5)
    assert scoring.maxsim(query, document[:0]) == 0.0
    many = np.random.default_rng(3).normal(size=(200, 8))
    assert scoring.maxsim(many, document @ np.eye(2, 8)) == pytest.approx(
        (many @ (document @ np.eye(2, 8)).T).max(axis=1).sum()
    )


def test_sparse_vectors_multiply_where_both_have_a_value() -> None:
    one = (np.array([9, 2, 5], np.uint32), np.array([1.0, 2.0, 3.0], np.float32))
    other = (np.array([5, 7, 9], np.uint32), np.array([10.0, 20.0, 30.0], np.float32))
    assert scoring.sparse_product(one, other) == 30.0 + 30.0
    assert scoring.sparse_product(one, (other[0][:0], other[1][:0])) == 0.0


@given(SCORES)
def test_ranks_are_each_once_and_follow_the_scores(scores: np.ndarray) -> None:
    ranks = scoring.ranks_of(scores)
    assert sorted(ranks) == list(range(1, len(scores) + 1))
    order = np.argsort(ranks)
    assert all(scores[order][:-1] >= scores[order][1:])
    np.testing.assert_array_equal(np.argsort(-scoring.reciprocal_ranks(scores), kind="stable"), order)


@given(SCORES)
def test_scaled_scores_are_between_0_and_1_in_the_same_order(scores: np.ndarray) -> None:
    scaled = scoring.between_0_and_1(scores)
    assert scaled.min() == 0.0
    assert scaled.max() == (1.0 if scores.max() > scores.min() else 0.0)
    np.testing.assert_array_equal(scoring.ranks_of(scaled), scoring.ranks_of(scores))


def test_a_weighted_sum_is_of_all_parts() -> None:
    parts = [np.array([1.0, 2.0]), np.array([10.0, 0.0])]
    np.testing.assert_array_equal(scoring.weighted_sum(parts, [2.0, 0.5]), [7.0, 4.0])
