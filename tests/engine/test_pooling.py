"""Pooling, projection and scores by hand."""

import numpy as np
import pytest

from appliance.engine.pooling import DenseLayer, descending, normalized, pooled, probabilities, projected

HIDDEN = np.array([[1, 2], [3, 4], [5, 9]], np.float32)


@pytest.mark.parametrize(("pooling", "vector"), [("cls", [1, 2]), ("last-token", [5, 9]), ("mean", [3, 5])])
def test_a_text_is_pooled(pooling: str, vector: list[float]) -> None:
    assert pooled(HIDDEN, pooling).tolist() == vector


def test_layers_are_applied_in_order() -> None:
    weight = np.array([[1, 0], [0, 2], [1, 1]], np.float32)
    layers = [
        DenseLayer(weight, np.array([0, 0, 1], np.float32), False),
        DenseLayer(np.eye(3, dtype=np.float32), None, True),
    ]
    np.testing.assert_allclose(projected(np.array([1, 2], np.float32), layers), np.tanh([1, 4, 4]), rtol=1e-6)


def test_a_layer_may_add_its_input_or_another_product_of_it() -> None:
    x, weight = np.array([1, 2], np.float32), np.array([[0, 1], [2, 0]], np.float32)
    added = projected(x, [DenseLayer(weight, None, True, np.eye(2, dtype=np.float32))])
    np.testing.assert_allclose(added, np.tanh([2, 2]) + [1, 2], rtol=1e-6)
    wider = DenseLayer(np.zeros((3, 2), np.float32), None, False, np.array([[1, 0], [0, 1], [1, 1]], np.float32))
    np.testing.assert_allclose(projected(np.stack([x, x], axis=1), [wider]), [[1, 1], [2, 2], [3, 3]])


def test_a_vector_is_scaled_to_length_1() -> None:
    assert normalized(np.array([3, 4], np.float32)).tolist() == pytest.approx([0.6, 0.8])
    assert normalized(np.array([3e38, -3e38], np.float32)).tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert normalized(np.array([0, 1e-38], np.float32)).tolist() == pytest.approx([0, 1])


@pytest.mark.parametrize("value", [0.0, 1e-44, 2e-39, float("nan"), float("inf"), float("-inf")])
def test_a_vector_without_a_direction_has_no_answer(value: float) -> None:
    with pytest.raises(ArithmeticError):
        normalized(np.array([0, value], np.float32))


@pytest.mark.parametrize("scores", [[0.0], [-800.0], [800.0, 0.0], [1.0, 2.0, 3.0]])
def test_probabilities_are_finite_and_complete(scores: list[float]) -> None:
    with np.errstate(over="ignore"):
        result = probabilities(np.array(scores, np.float32))
    assert np.isfinite(result).all()
    assert len(scores) == 1 or float(result.sum()) == pytest.approx(1.0)


def test_of_equal_scores_the_later_comes_first() -> None:
    assert descending(np.array([1, 3, 1, 2], np.float32)) == [1, 3, 2, 0]
