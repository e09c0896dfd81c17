"""`appliance bench` against a running appliance: every mode answers every text, failures show in the exit status."""

import json
from pathlib import Path
from typing import Any

import pytest

from testing.running import RunningAppliance

pytestmark = pytest.mark.e2e


def bench(running: RunningAppliance, *flags: str) -> tuple[int, dict[str, Any]]:
    result = running.cli("bench", "-i", "minilm", "--json", *flags)
    return result.returncode, json.loads(result.stdout) if result.stdout else {"stderr": result.stderr}


@pytest.mark.parametrize("mode", ["standard", "stream", "arrow"])
def test_every_mode_answers_every_text(appliance: RunningAppliance, mode: str) -> None:
    status, found = bench(appliance, "--mode", mode, "-n", "50", "-b", "20", "--concurrency", "2")
    assert status == 0
    assert (found["mode"], found["instance_name"], found["num_texts"]) == (mode, "minilm", 50)
    assert (found["successful"], found["failed"]) == (50, 0)
    assert found["num_requests"] == (50 if mode == "standard" else 3)
    assert found["throughput_per_sec"] > 0
    assert found["latency_ms"]["p50"] <= found["latency_ms"]["p99"] <= found["latency_ms"]["max"]


def test_noop_texts_from_a_file_and_a_plot(appliance: RunningAppliance, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("one\n\ntwo\n")
    plot = tmp_path / "plot.png"
    flags = ("--mode", "arrow", "--noop", "-n", "1000", "--texts", str(tmp_path / "texts"), "--plot", str(plot))
    status, found = bench(appliance, *flags)
    assert (status, found["successful"]) == (0, 1000)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_failures_and_wrong_options_show_in_the_exit_status(appliance: RunningAppliance) -> None:
    failed = appliance.cli("bench", "-i", "nobody", "-n", "3", "--json")
    assert failed.returncode == 1
    assert json.loads(failed.stdout)["failed"] == 3
    assert "NOT_FOUND" in json.loads(failed.stdout)["first_error"]
    for flags in (("--noop",), ("-n", "0"), ("--texts", "/nowhere"), ("--cert", "/nowhere")):
        wrong = appliance.cli("bench", "-i", "minilm", *flags)
        assert wrong.returncode == 1
        assert wrong.stderr.startswith("appliance: ")
    assert appliance.cli("bench").returncode == 2
