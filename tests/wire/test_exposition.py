"""What is read out of a replica's metrics: TEI's page as TEI 1.9 writes it, the engine's own, and a stranger's."""

import math

import pytest

from appliance.core.busy import Running, Work
from appliance.core.problems import Kind, Problem
from appliance.engine.metrics import EngineMetrics
from appliance.wire.exposition import work

TEI = """\
# TYPE te_request_count counter
te_request_count{method="single"} 14

# TYPE te_embed_count counter
te_embed_count 14

# TYPE te_embed_success counter
te_embed_success 9

# TYPE te_request_success counter
te_request_success{method="single"} 9

# TYPE te_request_failure counter
te_request_failure{err="overloaded"} 7
te_request_failure{err="tokenization"} 5
te_request_failure{err="inference"} 1
te_request_failure{err="dropped"} 2

# TYPE te_queue_size gauge
te_queue_size 0

# TYPE te_embed_inference_duration histogram
te_embed_inference_duration_bucket{le="0.000015"} 0
te_embed_inference_duration_bucket{le="+Inf"} 9
te_embed_inference_duration_sum 1.8
te_embed_inference_duration_count 9

# TYPE te_batch_next_tokens histogram
te_batch_next_tokens_bucket{le="1"} 4
te_batch_next_tokens_bucket{le="512"} 6
te_batch_next_tokens_bucket{le="8192"} 7
te_batch_next_tokens_bucket{le="+Inf"} 7
te_batch_next_tokens_sum 6000
te_batch_next_tokens_count 7

"""


def test_teis_page() -> None:
    totals = work(TEI)
    assert totals is not None
    assert (totals.answered, totals.begun, totals.ended) == (18, 14, 12)
    assert totals.batches == {1.0: 4, 512.0: 6, 8192.0: 7, math.inf: 7}
    assert totals.token_secs == pytest.approx(0.2 / 2000)  # three batches; four times its queue ran dry
    assert totals.running is None


def test_a_tei_that_has_done_nothing_and_pages_that_are_not_a_replicas() -> None:
    assert work('te_request_count{method="single"} 1\n') == Work()
    assert work("") is None
    assert work("node_cpu_seconds_total 7\n") is None
    with pytest.raises(ValueError, match="many"):
        work("te_embed_count many\n")


def test_the_engines_page_has_what_is_in_progress_and_what_it_costs() -> None:
    metrics = EngineMetrics(8192)
    idle = work(metrics.text())
    assert idle is not None
    assert (idle.running, idle.token_secs) == (Running(0, 0), None)
    with metrics.batch([3, 5]), metrics.batch([8000]):
        busy = work(metrics.text())
        assert "te_batch_running_size 3.0" in metrics.text()
    assert busy is not None
    assert busy.running is not None
    assert busy.running.tokens == 8008
    assert 0 < busy.running.secs < 5
    after = work(metrics.text())
    assert after is not None
    assert after.running == Running(0, 0)
    assert after.token_secs is not None
    assert 0 < after.token_secs < 1
    with pytest.raises(MemoryError), metrics.batch([4000]):
        raise MemoryError
    last = work(metrics.text())
    assert last is not None
    assert (last.running, last.token_secs) == (Running(0, 0), after.token_secs)


def test_the_engines_page_for_probes_tells_the_same_work_in_a_tenth_of_the_bytes() -> None:
    metrics = EngineMetrics(8192)
    assert work(metrics.work_text()) == work(metrics.text())
    for number in range(3):
        with metrics.batch([3, 500 * number]):
            metrics.counts["embed"].inc(2)
        metrics.input_done("embed", [0.4, 0.1, 0.1, 0.2])
        metrics.request_done("single", [0.4, 0.1, 0.1, 0.2])
    metrics.counts["predict"].inc()
    for code in ("OVERLOADED", "BACKEND", "DROPPED"):
        metrics.failed(Problem(Kind.INTERNAL, code, "it did not work"))
    told = work(metrics.work_text())
    assert told == work(metrics.text())
    assert told is not None
    assert (told.answered, told.begun, told.ended) == (6, 7, 5)
    assert 10 * len(metrics.work_text()) < len(metrics.text())
