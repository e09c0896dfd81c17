"""What Envoy has measured of the express lane, under the names of the multiplexer's own metrics.

The series have one label more, `way="express"`: they begin anew with Envoy. Calls that Envoy passed on to the
multiplexer in the end are not here: it has counted them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from appliance.core.series import Counts
from appliance.drivers import envoy
from appliance.drivers.metrics import PREFIX, WELL
from appliance.node.context import Node
from appliance.wire.calls import Code

EXPRESS_WAY = "express"
MICROSECONDS = 1e6


def families(node: Node) -> list[Metric]:
    """Empty while there is no lane, or Envoy does not answer."""
    return families_in(asked(node) or "")


def asked(node: Node) -> str | None:
    """None where Envoy does not answer."""
    return envoy.ask(Path(node.layout.express_socket), "GET", "/stats/prometheus?filter=^express\\.")


def families_in(text: str) -> list[Metric]:
    measured = {family.name: family.samples for family in text_string_to_metric_families(text)}
    direct = {
        name: [sample for sample in samples if sample.labels.get("direct") != "False"]
        for name, samples in measured.items()
    }
    calls, durations = direct.get("envoy_express_calls", []), direct.get("envoy_express_durations", [])
    return [*counted(calls), timed(durations)] if calls else []


def counts_by_instance(node: Node) -> dict[str, Counts] | None:
    """What Envoy has counted of each instance since it began; None where it does not answer."""
    if (text := asked(node)) is None:
        return None
    found = families_in(text)
    requests, texts, durations = (family.samples for family in found) if found else ((), (), ())
    within: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for sample in durations:
        if sample.name.endswith("_bucket"):
            within[sample.labels["instance"]][float(sample.labels["le"])] += sample.value
    calls, answered = total_by_instance(requests), total_by_instance(texts)
    errors = total_by_instance(sample for sample in requests if sample.labels["code"] not in WELL)
    return {
        name: Counts(answered.get(name, 0.0), calls[name], errors.get(name, 0.0), durations=within[name])
        for name in calls
    }


def total_by_instance(samples: Iterable[Sample]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for sample in samples:
        totals[sample.labels["instance"]] += sample.value
    return totals


def counted(calls: list[Sample]) -> Iterator[Metric]:
    """The calls, and the texts of those that were answered: one each."""
    requests = CounterMetricFamily(f"{PREFIX}grpc_requests", "", labels=("method", "instance", "code", "way"))
    texts = CounterMetricFamily(f"{PREFIX}texts", "", labels=("instance", "method", "way"))
    for sample in calls:
        method, instance, code = method_of(sample), sample.labels["instance"], code_of(sample)
        requests.add_metric((method, instance, code, EXPRESS_WAY), sample.value)
        if code == Code.OK.name:
            texts.add_metric((instance, method, EXPRESS_WAY), sample.value)
    yield requests
    yield texts


def timed(durations: list[Sample]) -> Metric:
    """In seconds; Envoy has microseconds."""
    family = HistogramMetricFamily(f"{PREFIX}grpc_request_duration_seconds", "")
    for sample in durations:
        kind = sample.name.rpartition("_")[2]  # bucket, count or sum
        labels = {"method": method_of(sample), "instance": sample.labels["instance"], "way": EXPRESS_WAY}
        if kind == "bucket":
            labels["le"] = floatToGoString(float(sample.labels["le"]) / MICROSECONDS)
        value = sample.value / MICROSECONDS if kind == "sum" else sample.value
        family.add_sample(f"{family.name}_{kind}", labels, value)
    return family


def method_of(sample: Sample) -> str:
    """The name of the method, of its path."""
    return str(sample.labels["method"].rpartition("/")[2])


def code_of(sample: Sample) -> str:
    """gRPC's word; a caller that left has no code."""
    number = sample.labels["code"]
    return Code(int(number)).name if number.isdigit() and int(number) in set(Code) else Code.CANCELLED.name
