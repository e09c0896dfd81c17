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
from appliance.engine.metrics import EngineMetrics
print(EngineMetrics(512).text() + metrics.gauges(present([])))
meters = metrics.Meters(Path(sys.argv[1]), "control")
meters.cache()
print(generate_latest(meters.registry).decode())
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


def promtool(*arguments: str | Path) -> None:
    """Must find nothing wrong."""
    program = shutil.which("promtool")
    assert program, "promtool is needed: run scripts/promtool.sh, as make test does"
    found = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout + found.stderr


def documented() -> dict[str, tuple[str, list[str]]]:
    """name -> (type, labels) of each metric in the tables of the page."""
    rows = re.findall(r"^\| (`te.*?) \| (counter|gauge|histogram) \| (.*?) \|", DOCS.read_text(), re.M)
    return {
        name: (kind, re.findall(r"`(\w+)`", labels) + (["instance", "replica"] if name.startswith("te_") else []))
        for names, kind, labels in rows
        for name in NAME.findall(names)
    }


def invented(appliance: str) -> dict[str, str]:
    """Samples of each metric as promtool wants them: "minilm" with a replica that answers and one that does not, and
    "stopped" with one that shall not; all that counts goes on counting."""
    values = {"instance": "minilm", "replica": "0", "event": "quarantined", "method": "Embed"}
    found = {}
    for name, (kind, labels) in documented().items():
        own = [("appliance", appliance), *((label, values.get(label, "any")) for label in labels)]
        parts = [("", ""), ("_bucket", "1"), ("_bucket", "+Inf"), ("_sum", ""), ("_count", "")]
        for part, le in parts[1:] if kind == "histogram" else parts[:1]:
            text = ", ".join(f'{label}="{value}"' for label, value in [*own, *([("le", le)] if le else [])])
            found[f"{name}{part}{{{text}}}"] = "1x40" if kind == "gauge" else "0+1x40"
    for name in ("minilm", "stopped"):
        found[f'tei_manager_instance_up{{appliance="{appliance}", instance="{name}", replica="1"}}'] = "0x40"
    found[f'tei_manager_instance_wanted{{appliance="{appliance}", instance="stopped"}}'] = "0x40"
    return found


def answers(folder: Path, *asked: tuple[str, float], appliance: str = ".*") -> None:
    """Prometheus, which has two appliances, must answer each query with this one number without labels.

    appliance: which of them is chosen on the dashboard.
    """
    variables = {"$__rate_interval": "2m", "$appliance": appliance, "$instance": ".*"}
    steps = []
    for query, value in asked:
        for variable, chosen in variables.items():
            query = query.replace(variable, chosen)
        steps.append({"expr": query, "eval_time": "8m", "exp_samples": [{"labels": "{}", "value": value}]})
    series = [{"series": name, "values": values} for node in ("one", "two") for name, values in invented(node).items()]
    case = {"interval": "15s", "input_series": series, "promql_expr_test": steps}
    (folder / "test.yml").write_text(yaml.safe_dump({"tests": [case]}))
    promtool("test", "rules", folder / "test.yml")


def targets() -> list[tuple[str, str, str]]:
    """(title of the panel, query, legend)"""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [
        (panel["title"], each["expr"], each["legendFormat"]) for panel in panels for each in panel.get("targets", ())
    ]


@pytest.mark.processes
def test_each_metric_is_described_with_its_type_and_no_other_is(families: dict[str, str]) -> None:
    assert {name: kind for name, (kind, _) in documented().items()} == families


@pytest.mark.processes
def test_what_the_text_and_its_queries_name_exists(families: dict[str, str]) -> None:
    text = DOCS.read_text()
    assert set(NAME.findall(text)) <= series(families) | set(families)


@pytest.mark.processes
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


@pytest.mark.processes
def test_each_alert_asks_for_metrics_that_exist_and_says_what_to_do(families: dict[str, str]) -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert set(NAME.findall(rule["expr"])) <= series(families), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "action"}, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]


@pytest.mark.processes
def test_each_panel_asks_for_metrics_that_exist(families: dict[str, str]) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        asked = {name for target in panel.get("targets", ()) for name in NAME.findall(target["expr"])}
        assert asked <= series(families), panel["title"]
        assert asked or panel["type"] == "row", panel["title"]


def test_each_panel_shows_something_of_what_is_exported_and_names_it_apart(tmp_path: Path) -> None:
    """Series that a legend does not tell apart would be drawn under one name."""
    shown = [query for _, query, _ in targets()]
    legends = [", ".join(re.findall(r"{{(\w+)}}", legend)) for _, _, legend in targets()]
    apart = [f"max(count by ({labels}) ({query}))" for query, labels in zip(shown, legends, strict=True)]
    answers(tmp_path, *((f"count({query}) > bool 0", 1) for query in shown), *((query, 1) for query in apart))


def test_the_dashboard_chooses_the_appliance_and_then_its_instances() -> None:
    datasource, appliance, instance = json.loads(DASHBOARD.read_text())["templating"]["list"]
    assert (datasource["name"], appliance["name"], instance["name"]) == ("datasource", "appliance", "instance")
    assert appliance["query"] == "label_values(tei_manager_instances_count, appliance)"
    assert instance["query"] == 'label_values(tei_manager_instance_up{appliance=~"$appliance"}, instance)'
    for title, query, _ in targets():
        assert len(NAME.findall(query)) == query.count('{appliance=~"$appliance"'), title


def test_stopped_instances_do_not_count_as_replicas_that_do_not_answer(tmp_path: Path) -> None:
    panels = {title: query for title, query, _ in targets()}
    replicas = f"count({panels['Replicas']})"
    answers(tmp_path, (panels["Replicas that answer"], 2), (panels["Replicas that do not"], 2), (replicas, 4))
    one = (
        (panels["Replicas that answer"], 1),
        (panels["Replicas that do not"], 1),
        (replicas, 2),
        (panels["Instances"], 1),
    )
    answers(tmp_path, *one, appliance="one")


def test_the_queries_of_the_text_are_answered(tmp_path: Path) -> None:
    text = DOCS.read_text()
    queries = re.findall(r"^\| [^|`]+ \| `(.*)` \|$", text.partition("## Questions")[2], re.M)
    queries += re.findall(r"^ +query: (.*)$", text, re.M)
    assert len(queries) == 6
    answers(tmp_path, *((f"count({query}) > bool 0", 1) for query in queries))


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
