"""The engine's own counters of running batches: what runs, for how long, and what a token costs."""

import pytest

from appliance.engine.metrics import EngineMetrics, RunningBatches


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
