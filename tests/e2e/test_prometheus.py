"""Plots from the operator's own Prometheus: a real one scrapes a real appliance."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from testing.running import TINY, RunningAppliance, eventually, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.processes]
SCRAPED = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: tei-appliance
    honor_labels: true
    static_configs: [{{targets: ["127.0.0.1:{port}"], labels: {{appliance: local}}}}]
"""


@contextmanager
def prometheus(folder: Path, port: int, scraped: int) -> Iterator[None]:
    config = folder / "prometheus.yml"
    config.write_text(SCRAPED.format(port=scraped))
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    process = subprocess.Popen(
        [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=20)


def test_series_come_from_prometheus_and_from_the_monitor_while_it_is_away(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    settings = f'prometheus_url = "{url}"\nprometheus_labels = \'appliance="local"\'\n'
    with RunningAppliance(tmp_path, seeds="", settings=settings) as box:

        def series() -> dict[str, Any]:
            found: dict[str, Any] = box.get("/instances/tiny/series", minutes=15).json()
            return found

        box.create("tiny", model_id=TINY)
        box.wait_ready("tiny")
        assert series()["source"] == "monitor"
        assert f"Prometheus at {url} does not answer" in series()["problem"]  # and is left alone for half a minute
        with prometheus(tmp_path, port, box.api_port):

            def is_told() -> bool:
                stub = box.stub()
                for number in range(5):
                    stub.Embed(request(number), timeout=20)
                found = series()
                return found["source"] == url and any(found["texts"]) and any(found["p95_ms"])

            eventually(is_told, 90, every=1)
            # Each of the two workers leaves a Prometheus alone for half a minute that did not answer.
            eventually(lambda: all(series()["source"] == url for _ in range(10)), 60, every=1)
            found = series()
            assert found["problem"] is None
            assert (len(found["texts"]), found["step_secs"]) == (90, 10)
            assert [value for value in found["ready"] if value is not None][-1] == 1
            page = box.get("/console/instances/tiny").text
            assert url in page
        assert series()["source"] == "monitor"
        assert "does not answer" in box.get("/console/instances/tiny").text


def request(number: int) -> Any:
    from appliance.wire.tei.v1 import tei_pb2 as tei
    from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux

    return mux.EmbedRequest(
        target=mux.Target(instance_name="tiny"), request=tei.EmbedRequest(inputs=f"text {number}", truncate=True)
    )
