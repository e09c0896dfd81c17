"""What operators import (scrape configuration, alerts, dashboard) and what they read names metrics that exist."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from appliance.core.settings import Settings

ROOT = Path(__file__).parent.parent
SCRAPING = ROOT / "etc" / "prometheus" / "prometheus.yml"
ALERTS = ROOT / "etc" / "prometheus" / "alerts.yml"
CASES = ROOT / "tests" / "alerts_test.yml"
DASHBOARD = ROOT / "etc" / "grafana" / "appliance.json"
DOCS = ROOT / "docs" / "metrics.md"
NAME = re.compile(r"\b(?:te|tei_manager)_\w+")
# In a process of its own: counting is set up once for a whole process.
EXPOSED = """
import sys
from pathlib import Path
from prometheus_client import generate_latest
from appliance.control.metrics import present
from appliance.drivers import metrics
from appliance.engine.metrics import Metrics
print(Metrics(512).text() + metrics.gauges(present([])))
print(generate_latest(metrics.Meters(Path(sys.argv[1]), "control").registry).decode())
"""


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Every metric that there is, and its type."""
    command = [sys.executable, "-c", EXPOSED, str(tmp_path_factory.mktemp("counted"))]
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout
    return dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M))


def series(families: dict[str, str]) -> set[str]:
    """The names that queries may use."""
    parts = {"histogram": ("_bucket", "_sum", "_count")}
    return {name + part for name, kind in families.items() for part in parts.get(kind, ("",))}


def test_each_metric_is_described_with_its_type_and_no_other_is(families: dict[str, str]) -> None:
    rows = re.findall(r"^\| (`te.*?) \| (counter|gauge|histogram) \|", DOCS.read_text(), re.M)
    assert {name: kind for cell, kind in rows for name in NAME.findall(cell)} == families


def test_what_the_text_and_its_queries_name_exists(families: dict[str, str]) -> None:
    text = DOCS.read_text()
    assert set(NAME.findall(text)) <= series(families) | set(families)
    for path in re.findall(r"`((?:etc|docs)/[\w./-]+)`", text):
        assert (ROOT / path).is_file(), path


def test_the_scaled_object_parses_and_asks_for_metrics_that_exist(families: dict[str, str]) -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", DOCS.read_text(), re.M | re.S)
    found = yaml.safe_load(block)
    assert found["kind"] == "ScaledObject"
    (trigger,) = found["spec"]["triggers"]
    assert "te_queue_size" in NAME.findall(trigger["metadata"]["query"])
    assert set(NAME.findall(trigger["metadata"]["query"])) <= series(families)


def test_the_scrape_asks_control_keeps_our_labels_and_loads_the_alerts() -> None:
    """Without honor_labels Prometheus would rename our label `instance`."""
    found = yaml.safe_load(SCRAPING.read_text())
    (job,) = found["scrape_configs"]
    assert job["honor_labels"] is True
    assert job["static_configs"][0]["targets"] == [f"127.0.0.1:{Settings().api_port}"]
    assert [SCRAPING.parent / path for path in found["rule_files"]] == [ALERTS]
    assert f'up{{job="{job["job_name"]}"}}' in ALERTS.read_text()


def test_each_alert_asks_for_metrics_that_exist_and_says_what_to_do(families: dict[str, str]) -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert set(NAME.findall(rule["expr"])) <= series(families), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "action"}, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]


def test_each_panel_asks_for_metrics_that_exist(families: dict[str, str]) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        asked = {name for target in panel.get("targets", ()) for name in NAME.findall(target["expr"])}
        assert asked <= series(families), panel["title"]
        assert asked or panel["type"] == "row", panel["title"]


def promtool(*arguments: str | Path) -> None:
    """Must find nothing wrong."""
    program = shutil.which("promtool")
    assert program, "promtool is needed: run scripts/promtool.sh, as make test does"
    found = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout + found.stderr


def test_prometheus_itself_accepts_configuration_and_alerts() -> None:
    promtool("check", "config", SCRAPING)
    promtool("check", "rules", ALERTS)


def test_alerts_fire_when_they_should_and_not_otherwise() -> None:
    promtool("test", "rules", CASES)


def test_each_alert_has_a_case_in_which_it_fires() -> None:
    cases = yaml.safe_load(CASES.read_text())["tests"]
    told = [
        each["labels"] for case in cases for step in case["promql_expr_test"] for each in step.get("exp_samples", ())
    ]
    worded = [step["alertname"] for case in cases for step in case.get("alert_rule_test", ()) if step["exp_alerts"]]
    rules = [rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert {*re.findall(r'alertname="(\w+)"', " ".join(told)), *worded} == set(rules)
