"""`/metrics`: the documented names and labels, from all processes through one scrape."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import falcon.testing
import grpc
import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from appliance.control.metrics import MetricsResource
from appliance.core import settings, state
from appliance.core.events import Cause
from appliance.node.authentication import Authenticator
from appliance.node.context import Node
from appliance.wire.exposition import JoinedPages
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing import specs
from testing.children import run
from testing.running import TINY, RunningAppliance, eventually
from tests.test_dashboards import documented

pytestmark = pytest.mark.processes

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    with RunningAppliance(tmp_path_factory.mktemp("metrics")) as running:
        running.wait_ready("minilm")
        yield running


def samples(running: RunningAppliance) -> Samples:
    response = running.get("/metrics")
    assert response.status_code == 200
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return samples_of(response.text)


def samples_of(text: str) -> Samples:
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))  # a family may stand there only once
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(scraped: Samples, name: str, **labels: str) -> float:
    return scraped.get((name, tuple(sorted(labels.items()))), 0.0)


def names_of(scraped: Samples, instance: str) -> set[str]:
    """Of the metrics that have this instance."""
    return {name for name, labels in scraped if ("instance", instance) in labels}


def embed(running: RunningAppliance, name: str = "minilm") -> None:
    request = mux.EmbedRequest(target=mux.Target(instance_name=name), request=tei.EmbedRequest(inputs="hello"))
    running.stub().Embed(request, timeout=20)


def test_calls_are_counted_by_method_instance_and_code(counted: RunningAppliance) -> None:
    before = samples(counted)
    for _ in range(3):
        embed(counted)
    for name in ("nobody", "never-there"):
        with pytest.raises(grpc.RpcError):
            embed(counted, name)
    scraped = samples(counted)
    calls = "tei_manager_grpc_requests_total"
    own = {"method": "Embed", "instance": "minilm", "code": "OK"}
    assert value(scraped, calls, **own) - value(before, calls, **own) == 3
    lost = {"method": "Embed", "instance": "", "code": "NOT_FOUND"}  # callers cannot make labels
    assert value(scraped, calls, **lost) - value(before, calls, **lost) == 2
    texts = {"method": "Embed", "instance": "minilm"}
    name = "tei_manager_texts_total"
    assert value(scraped, name, **texts) - value(before, name, **texts) == 3
    assert value(scraped, "tei_manager_grpc_request_duration_seconds_count", **texts) >= 3
    assert value(scraped, "tei_manager_grpc_overhead_seconds_count", method="Embed") >= 5
    assert value(scraped, "tei_manager_queue_wait_seconds_count") >= 3


def test_every_documented_name_is_there(counted: RunningAppliance) -> None:
    embed(counted)
    eventually(lambda: ("tei_manager_queue_size", (("instance", "minilm"), ("lane", "bulk"))) in samples(counted))
    scraped = samples(counted)
    assert value(scraped, "tei_manager_instances_count") == 1
    assert value(scraped, "tei_manager_instance_up", instance="minilm", replica="0") == 1
    text = counted.get("/metrics").text
    for name in ("health_check_failures_total", "gpu_memory_used_bytes", "gpu_utilization_ratio", "instance_wanted"):
        assert f"# TYPE tei_manager_{name}" in text


def test_the_labels_are_those_of_the_page(counted: RunningAppliance) -> None:
    embed(counted)
    scraped = samples(counted)
    pages = documented()
    checked = set()
    for name, labels in scraped:
        for part in ("", "_bucket", "_sum", "_count", "_total"):  # the parser adds _total to TEI's counters
            if name.endswith(part) and (page := name.removesuffix(part)) in pages:
                assert sorted(pages[page][1]) == sorted(label for label, _ in labels if label != "le"), name
                checked.add(page)
    assert {"tei_manager_grpc_requests_total", "tei_manager_queue_size", "te_request_count"} <= checked
    assert len(checked) > 25


def test_what_alerts_count_begins_at_0(counted: RunningAppliance) -> None:
    eventually(lambda: "tei_manager_health_check_failures_total" in names_of(samples(counted), "minilm"))
    scraped = samples(counted)
    for name, labels in (
        ("events", {"event": "quarantined"}),
        ("events", {"event": "state_repaired"}),
        ("health_check_failures", {"instance": "minilm"}),
        *(("instance_restarts", {"instance": "minilm", "reason": cause}) for cause in Cause),
    ):
        assert scraped[f"tei_manager_{name}_total", tuple(sorted(labels.items()))] == 0, (name, labels)


def test_a_deleted_instance_leaves_at_the_next_scrape_and_its_history_stays(counted: RunningAppliance) -> None:
    """Its queue is a gauge, its calls are counters and histograms, its probes are another process' counters."""
    counted.create("short-lived")
    counted.post("/instances/short-lived/restart")
    counted.wait_ready("short-lived")
    embed(counted, "short-lived")
    lasting = {"tei_manager_instances_created_total", "tei_manager_instances_deleted_total"}
    passing = {f"tei_manager_{name}" for name in ("queue_size", "grpc_requests_total", "health_check_failures_total")}
    eventually(lambda: passing < names_of(samples(counted), "short-lived"))
    restarts = ("tei_manager_instance_restarts_total", (("instance", "short-lived"), ("reason", "asked")))
    assert samples(counted)[restarts] == 1
    counted.delete("/instances/short-lived")
    scraped = samples(counted)
    assert names_of(scraped, "short-lived") == lasting
    assert value(scraped, "tei_manager_instances_created_total", instance="short-lived", model=TINY) == 1
    assert value(scraped, "tei_manager_instances_deleted_total", instance="short-lived") == 1
    assert passing < names_of(scraped, "minilm")


def test_teis_own_metrics_bear_instance_and_replica(counted: RunningAppliance) -> None:
    embed(counted)
    scraped = samples(counted)
    assert ("te_queue_size", (("instance", "minilm"), ("replica", "0"))) in scraped
    counter = "te_request_count_total"  # as the parser names it; TEI writes te_request_count
    assert value(scraped, counter, instance="minilm", replica="0", method="single") >= 1


def test_counters_outlive_their_process_and_nothing_piles_up(counted: RunningAppliance) -> None:
    embed(counted)
    own = {"method": "Embed", "instance": "minilm", "code": "OK"}
    before = value(samples(counted), "tei_manager_grpc_requests_total", **own)
    folder = counted.folder / "metrics"
    files = {path.name for path in folder.iterdir()}
    for _ in range(3):
        (process,) = counted.processes_of("multiplexer")
        process.kill()
        eventually(lambda pid=process.pid: pid not in [each.pid for each in counted.processes_of("multiplexer")])
        eventually(lambda: embed(counted) is None)
    scraped = samples(counted)
    assert value(scraped, "tei_manager_grpc_requests_total", **own) >= before + 3
    assert not {path.name for path in folder.iterdir()} - files


def test_the_gateway_counts_by_route(counted: RunningAppliance) -> None:
    url = f"http://127.0.0.1:{counted.http_port}"
    for path in ("/embed", "/instances/minilm/embed"):
        assert requests.post(url + path, json={"inputs": "a"}, timeout=20).status_code == 200
    requests.get(f"{url}/no/such/path", timeout=20)
    scraped = samples(counted)
    assert value(scraped, "tei_manager_http_requests_total", route="/embed", code="200") == 2
    assert value(scraped, "tei_manager_http_requests_total", route="none", code="404") == 1


def test_without_supervisord_what_was_counted_is_told_of_those_that_exist(tmp_path: Path) -> None:
    node = Node.at(settings.parse({}, {}, {}, str(tmp_path)))
    node.state.update(lambda before: state.with_instance(before, specs.instance(specs.spec("kept"))))
    run("count", node.folder / "metrics", "control", "kept", "gone", "")
    app = falcon.App()
    app.add_route("/metrics", MetricsResource(node, Authenticator.of(node.settings)))
    answer = falcon.testing.simulate_get(app, "/metrics")
    assert answer.status_code == 200
    scraped = samples_of(answer.text)
    calls = {dict(labels)["instance"] for name, labels in scraped if name == "tei_manager_grpc_requests_total"}
    assert calls == {"kept", ""}
    assert value(scraped, "tei_manager_instances_deleted_total", instance="gone") == 1


LISTED = (
    '[[instances]]\nname = "far"\nmodel_id = "org/m"\naddresses = ["192.0.2.1:9001"]\nserver_names = ["192.0.2.1"]\n'
)


@pytest.mark.parametrize(
    ("fields", "file", "expected"),
    [
        ({"peers": ["192.0.2.1:9001"]}, "peers.toml", {"far", "kept", ""}),
        ({"directory": "static:/there"}, "listing.toml", {"far", "kept", ""}),
        ({"directory": "static:/there"}, "", {"far", "gone", "kept", ""}),  # nobody knows yet who is gone
    ],
    ids=["peers", "a listing", "no listing yet"],
)
def test_calls_of_instances_that_others_run_are_told_too(
    tmp_path: Path, fields: dict[str, Any], file: str, expected: set[str]
) -> None:
    node = Node.at(settings.parse(fields, {}, {}, str(tmp_path)))
    node.state.update(lambda before: state.with_instance(before, specs.instance(specs.spec("kept"))))
    if file:
        (tmp_path / file).write_text(LISTED)
    run("count", node.folder / "metrics", "control", "kept", "far", "gone", "")
    app = falcon.App()
    app.add_route("/metrics", MetricsResource(node, Authenticator.of(node.settings)))
    scraped = samples_of(falcon.testing.simulate_get(app, "/metrics").text)
    found = {dict(labels)["instance"] for name, labels in scraped if name == "tei_manager_grpc_requests_total"}
    assert found == expected


def test_families_of_two_replicas_stand_together_once() -> None:
    one = '# HELP te_x X\n# TYPE te_x histogram\nte_x_bucket{le="1.0"} 1\nte_x_count 1\nte_x_sum 0.5\nother 5\n'
    text = JoinedPages("te_").text([({"replica": "0"}, one), ({"replica": "1"}, one)])
    (family,) = text_string_to_metric_families(text)
    assert family.type == "histogram"
    assert [sample.labels["replica"] for sample in family.samples] == ["0"] * 3 + ["1"] * 3
    assert family.samples[0].labels == {"replica": "0", "le": "1.0"}


def test_lines_that_are_no_samples_of_a_replica_are_left_out() -> None:
    """One of them would spoil the page of all."""
    one = 'te_x{err="a } b"} 1\nte_y 2 3 4\nte_\nte_y{err="a"\n# te_y\nother{a="te_z 1"} 5\nte_z{} 6\nte_y 7'
    assert JoinedPages("te_").text([({"replica": "0"}, one), ({"replica": "1"}, "te_x 8\n")]) == (
        'te_x{replica="0",err="a } b"} 1\nte_x{replica="1"} 8\nte_z{replica="0"} 6\nte_y{replica="0"} 7\n'
    )


def test_a_page_that_changed_is_read_anew_and_one_that_is_not_asked_for_is_forgotten() -> None:
    pages = JoinedPages("te_")
    one, two = {"replica": "0"}, {"replica": "1"}
    for value in (1, 1, 2):
        text = pages.text([(one, f"# TYPE te_x counter\nte_x {value}\n"), (two, "# TYPE te_x counter\nte_x 7\n")])
        assert text == f'# TYPE te_x counter\nte_x{{replica="0"}} {value}\nte_x{{replica="1"}} 7\n'
    assert pages.text([(one, "# TYPE te_x gauge\nte_x 2\n")]) == '# TYPE te_x gauge\nte_x{replica="0"} 2\n'
    assert pages.text([(two, "te_x 7\n")]) == 'te_x{replica="1"} 7\n'
    assert len(pages.forms) == 1


def test_a_replica_that_does_not_tell_costs_a_second_at_most(counted: RunningAppliance, tmp_path: Path) -> None:
    (process,) = counted.processes_of("minilm")
    process.suspend()
    try:
        response = counted.get("/metrics")
        assert response.status_code == 200
        assert response.elapsed.total_seconds() < 5
        assert "te_queue_size" not in response.text
    finally:
        process.resume()
