"""`appliance bench` against a running appliance: every mode answers every text, failures show in the exit status."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testing.running import RunningAppliance
from testing.texts import mixed_texts

pytestmark = pytest.mark.e2e
TEXTS = mixed_texts(20)


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
    nobody = appliance.cli("bench", "-i", "nobody", "-n", "3", "--json")  # and not three failures
    assert (nobody.returncode, nobody.stdout) == (1, "")
    assert "NOT_FOUND" in nobody.stderr
    for flags in (("--noop",), ("-n", "0"), ("--texts", "/nowhere"), ("--cert", "/nowhere")):
        wrong = appliance.cli("bench", "-i", "minilm", *flags)
        assert wrong.returncode == 1
        assert wrong.stderr.startswith("appliance: ")
    assert appliance.cli("bench").returncode == 2


def test_it_takes_the_flags_of_other_managers_clients(appliance: RunningAppliance) -> None:
    """`bench-client -e http://... -m standard -b 4`: JSON where nobody looks, and -b requests in flight."""
    client = Path(sys.executable).parent / "bench-client"
    endpoint = f"http://127.0.0.1:{appliance.grpc_port}"
    command = [str(client), "-e", endpoint, "-i", "minilm", "-m", "standard", "-n", "20", "-b", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["successful"], found["num_requests"], found["batch_size"]) == (20, 20, 4)
    command[command.index("standard")] = "arrow"
    done = subprocess.run([*command, "--max-message-size-mb", "100"], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["num_requests"] == 5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("-e", "ftp://127.0.0.1:1"), "give host:port"),
        (("-e", "http://"), "give host:port"),
        (("-e", "http://127.0.0.1:1", "--insecure"), "without TLS"),
        (("-e", "https://127.0.0.1:1", "--insecure"), "Cannot read 127.0.0.1:1"),
        (("--max-message-size-mb", "0"), "--max-message-size-mb"),
    ],
    ids=str,
)
def test_endpoints_and_limits_that_mean_nothing_are_refused(
    appliance: RunningAppliance, flags: tuple[str, ...], words: str
) -> None:
    wrong = appliance.cli("bench", "-i", "minilm", *flags)
    assert (wrong.returncode, words in wrong.stderr) == (1, True), wrong.stderr


@pytest.mark.timeout(400)
def test_quality_says_what_smaller_vectors_cost(appliance: RunningAppliance, tmp_path: Path) -> None:
    result = appliance.cli("bench", "-i", "minilm", "--quality", "--json", timeout=180)  # 2,800 texts
    rows = {(row["output_dtype"], row["dimensions"]): row for row in json.loads(result.stdout)}
    assert list(rows)[:4] == [("float32", 384), ("float16", 384), ("int8", 384), ("binary", 384)]
    full = rows["float32", 384]
    assert (full["bytes"], rows["int8", 192]["bytes"], rows["binary", 384]["bytes"]) == (1536, 192, 48)
    assert full["ndcg_at_10"] > 0.5  # of 200 documents: chance would give 0.02
    assert rows["int8", 384]["kept"] > 0.95
    assert rows["binary", 384]["ndcg_at_10"] < full["ndcg_at_10"]
    (tmp_path / "texts").write_text("\n".join(TEXTS))
    flags = ("--quality", "--texts", str(tmp_path / "texts"))
    shown = appliance.cli("bench", "-i", "minilm", *flags, timeout=180).stdout.splitlines()
    assert shown[0].split() == ["FORMAT", "DIMENSIONS", "BYTES", "NDCG@10", "CHANGE", "KEPT"]
    assert len(shown) == 1 + len(rows)
