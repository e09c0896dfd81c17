"""The engine's own counters of running batches: what runs, for how long, and what a token costs."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from appliance.engine.metrics import KINDS, EngineMetrics, RunningBatches
from appliance.engine.model import kinds_of


def test_running_batches_are_counted_while_they_run() -> None:
    batches = RunningBatches()
    with batches.computing(2, 10), batches.computing(3, 20):
        assert (batches.running_texts(), batches.running_tokens()) == (5, 30)
        assert batches.oldest_secs() > 0
        assert batches.token_secs() == 0
    assert (batches.running_texts(), batches.running_tokens(), batches.oldest_secs()) == (0, 0, 0)
    assert batches.token_secs() > 0


def test_a_batch_that_fails_costs_nothing() -> None:
    batches = RunningBatches()
    with pytest.raises(MemoryError), batches.computing(1, 10):
        raise MemoryError
    assert (batches.running_texts(), batches.token_secs()) == (0, 0)


def test_names_are_those_of_tei() -> None:
    metrics = EngineMetrics(512)
    metrics.requests.labels("single").inc()
    metrics.input_done("embed", [4, 1, 1, 2])
    text = metrics.text()
    assert 'te_request_count{method="single"} 1.0' in text
    assert "te_embed_success 1.0" in text
    assert "te_embed_inference_duration_sum 2.0" in text


@pytest.mark.parametrize(
    ("tasks", "shown"),
    [
        ({"embedding"}, {"embed"}),
        ({"splade"}, {"embed"}),
        ({"classifier"}, {"predict"}),
        ({"reranker"}, {"predict"}),
        ({"multivector"}, {"embed", "predict"}),
        ({"embedding", "sparse", "multivector"}, {"embed", "predict"}),
    ],
)
def test_durations_are_shown_of_what_the_model_answers(tasks: set[str], shown: set[str]) -> None:
    text = EngineMetrics(512, kinds_of(frozenset(tasks))).text()
    assert {kind for kind in KINDS if f"te_{kind}_duration_count" in text} == shown
    assert all(f"te_{kind}_count 0" in text for kind in KINDS)


def test_a_page_has_what_was_observed_before_it() -> None:
    metrics = EngineMetrics(512)
    for seen in range(1, 4):
        metrics.requests.labels("single").inc()
        with metrics.batch([3]):
            assert f"te_batch_next_tokens_sum {3.0 * seen}" in metrics.text()
            assert "te_batch_running_tokens 3.0" in metrics.text()
        metrics.input_length.observe(5)
        for _ in range(2):
            text = metrics.text()
            assert f'te_request_count{{method="single"}} {seen:.1f}' in text
            assert f"te_request_input_length_sum {5.0 * seen}" in text
            assert "te_batch_running_tokens 0.0" in text


def test_a_page_that_was_made_beside_observations_is_not_kept_without_them() -> None:
    metrics = EngineMetrics(512)
    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(lambda: [metrics.input_done("embed", [4, 1, 1, 2]) for _ in range(500)])
        for _ in range(20):
            metrics.text()
    assert "te_embed_inference_duration_sum 4000.0" in metrics.text()
