"""What KEDA asks Prometheus, answered by Prometheus' own engine (promtool), and the names of metrics that there are."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from appliance.core.kubernetes import workloads
from appliance.export.kubernetes_scaling import BACKLOG, scaled_object
from testing.specs import spec
from tests.core.test_kubernetes import CLUSTER

UP_TO_EIGHT = replace(CLUSTER, max_replicas=8)
FROM_ZERO = replace(UP_TO_EIGHT, from_zero=True)
LABELS = 'namespace="models",pod="appliance-front-7d9f-x2x4z",instance="a"'
REPLICA = 'te_queue_size{namespace="models",pod="tei-a-6c5d8f7b9c-abcde"}'
WAITING = f"tei_manager_queue_size{{{LABELS}}}"
REFUSED = f'tei_manager_grpc_requests_total{{{LABELS},method="Embed",code="UNAVAILABLE"}}'


class Case(NamedTuple):
    """series: with their values, one in 15 s. answers: to the queries after ten minutes, by the names of the triggers;
    None: nothing."""

    series: dict[str, str]
    answers: dict[str, float | None]
    from_zero: bool = True


CASES = {
    "nothing was ever scraped": Case({}, {"backlog": 0, "calls": 0}),
    "nothing was ever scraped, and it never scales to zero": Case({}, {"backlog": None}, from_zero=False),
    "replicas and front are full": Case({REPLICA: "100x60", WAITING: "50x60"}, {"backlog": 150}, from_zero=False),
    "nobody waits in the front yet": Case({REPLICA: "100x60"}, {"backlog": 100}, from_zero=False),
    "two replicas": Case(
        {REPLICA: "10x60", REPLICA.replace("abcde", "fghij"): "30x60"}, {"backlog": 40}, from_zero=False
    ),
    "the first call ever, a minute ago": Case({REFUSED: "_x36 1x20"}, {"backlog": 0, "calls": 1}),
    "a call ten minutes ago": Case({REFUSED: "1x60"}, {"backlog": 0, "calls": 0}),
    "another call of one that had some": Case({REFUSED: "1x38 2x20"}, {"backlog": 0, "calls": 1}),
    "others are none of its business": Case(
        {
            REPLICA.replace("tei-a-", "tei-a-b-"): "100x60",
            REPLICA.replace("models", "others"): "100x60",
            WAITING.replace('"a"', '"b"'): "50x60",
            REFUSED.replace('"a"', '"b"'): "0+9x60",
        },
        {"backlog": 0, "calls": 0},
    ),
}


def queries(from_zero: bool) -> dict[str, str]:
    (one,) = workloads([spec("a")], [], {"a": "tei"}, 300, {}, False)
    triggers = scaled_object(one, FROM_ZERO if from_zero else UP_TO_EIGHT)["spec"]["triggers"]
    return {each["name"]: each["metadata"]["query"] for each in triggers}


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_prometheus_answers(name: str, tmp_path: Path) -> None:
    """Increases are looked at for being there: Prometheus guesses their size beyond the samples."""
    series, answers, from_zero = CASES[name]
    asked = queries(from_zero)
    assert set(asked) == set(answers)
    steps = []
    for trigger, value in answers.items():
        query = asked[trigger] if trigger == "backlog" else f"clamp_max(({asked[trigger]}) > bool 0, 1)"
        expected = [] if value is None else [{"labels": "{}", "value": value}]
        steps.append({"expr": query, "eval_time": "10m", "exp_samples": expected})
    inputs = [{"series": each, "values": values} for each, values in series.items()]
    tests = [{"interval": "15s", "input_series": inputs, "promql_expr_test": steps}]
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"tests": tests}))
    program = shutil.which("promtool")
    assert program, "promtool is needed: run scripts/promtool.sh, as make test does"
    done = subprocess.run([program, "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_metrics_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    described = set(re.findall(r"^\| `(te\w+)`", page, re.M))
    named = set(re.findall(r"\b(te\w+)\{", " ".join(queries(from_zero=True).values())))
    assert len(named) == 3
    assert named <= described


def test_how_far_it_is_scaled() -> None:
    def spec_of(from_zero: bool, replicas: int) -> dict[str, Any]:
        (one,) = workloads([spec("a", replicas=replicas)], [], {"a": "tei"}, 300, {}, False)
        return dict(scaled_object(one, FROM_ZERO if from_zero else UP_TO_EIGHT)["spec"])

    least, most = "minReplicaCount", "maxReplicaCount"
    assert (spec_of(False, 2)[least], spec_of(False, 2)[most]) == (2, 8)
    assert (spec_of(True, 2)[least], spec_of(True, 2)[most]) == (0, 8)
    assert spec_of(False, 20)[most] == 20
    assert spec_of(True, 2)["cooldownPeriod"] == 600
    assert spec_of(True, 2)["fallback"] == {"failureThreshold": 3, "replicas": 2}
    (backlog,) = spec_of(False, 1)["triggers"]
    assert backlog["metadata"]["threshold"] == str(BACKLOG)
