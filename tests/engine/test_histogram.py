"""Our histogram has the samples of the client library's."""

import threading

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from appliance.engine.histogram import Histogram
from appliance.engine.metrics import DURATIONS, POWERS

BUCKETS = {"durations": DURATIONS, "powers": POWERS}


@given(
    st.sampled_from(sorted(BUCKETS)),
    st.lists(st.floats(0, 2e6, allow_subnormal=False) | st.sampled_from([*DURATIONS, *POWERS])),
)
def test_it_is_written_as_that_of_the_client_library(name: str, values: list[float]) -> None:
    prometheus_client.disable_created_metrics()
    registry = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram(name, "Words", buckets=BUCKETS[name], registry=registry)
    ours = Histogram(name, "Words", BUCKETS[name])
    for value in values:
        theirs.observe(value)
        ours.observe(value)
    (expected,) = text_string_to_metric_families(prometheus_client.generate_latest(registry).decode())
    (written,) = text_string_to_metric_families(ours.text())
    assert written == expected


def test_no_observation_of_many_threads_is_lost() -> None:
    histogram = Histogram("name", "Words", POWERS)
    threads = [threading.Thread(target=lambda: [histogram.observe(3) for _ in range(2000)]) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert histogram.text().endswith("name_count 16000\nname_sum 48000.0\n")
