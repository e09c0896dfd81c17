"""Moving in from tei-manager: its files as they are, and what its clients look at."""

import json
import os
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import requests

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.engines import FAMILIES
from testing.running import RunningAppliance, eventually, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
DOTTED = "bge-large-en-v1.5"
SETTINGS = """
state_file = "{folder}/tei-manager-state.json"
grpc_enabled = true
max_instances = 10
health_check_interval_secs = 1
startup_timeout_secs = 300
max_failures_before_restart = 3
auto_restore_on_restart = true
{binary}
"""
SEED = '\n[auth]\nenabled = false\n\n[[instances]]\nname = "seed"\nmodel_id = "BAAI/bge-small-en-v1.5"\nport = 8080\n'


def instance_table(name: str, family: str, ports: list[int], more: str = "") -> str:
    return f"""
[[instances]]
name = "{name}"
model_id = "{FAMILIES / family}"
port = {ports[0]}
max_batch_tokens = 16384
max_concurrent_requests = 512
prometheus_port = {ports[1]}
extra_args = []
created_at = "2026-01-01T00:00:00.123456789Z"
{more}
"""


class MovedIn(RunningAppliance):
    """Started on a state file of tei-manager. original: its text."""

    def __init__(self, folder: Path, extra: str = "", settings: str = "", seeds: str = SEED) -> None:
        super().__init__(folder, seeds=seeds, settings=SETTINGS.format(folder=folder, binary=settings))
        ports = free_ports(60)[-6:]  # the first 43 are those of the appliance itself
        self.original = 'last_updated = "2026-01-02T03:04:05.678901234Z"\n' + "".join(
            (
                instance_table(DOTTED, "bert-cls", ports[:2]),
                # It lets two have one metrics port.
                instance_table("classes", "roberta-classify", [ports[2], ports[1]]),
                instance_table("quiet", "bert-cls", [ports[4], 0], extra),
            )
        )
        self.asked = [ports[0], ports[2], ports[4]]
        self.state = folder / "tei-manager-state.json"
        self.state.write_text(self.original)


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MovedIn]:
    with MovedIn(tmp_path_factory.mktemp("moved")) as running:
        for name in (DOTTED, "classes", "quiet"):
            running.wait_ready(name)
        yield running


def events(running: RunningAppliance, kind: str) -> list[dict[str, Any]]:
    return [event for event in running.get("/events").json() if event["event"] == kind]


def test_its_instances_run_on_their_ports_and_the_original_is_kept(moved: MovedIn) -> None:
    shown = moved.get("/instances").json()
    assert [each["name"] for each in shown] == [DOTTED, "classes", "quiet"]  # and no seed: it has none with a state
    assert [each["port"] for each in shown] == moved.asked
    assert [each["created_at"] for each in shown] == ["2026-01-01T00:00:00.123456789Z"] * 3
    kept = [path for path in moved.state.parent.glob("tei-manager-state.json.2*") if path.suffix != ".lock"]
    assert [path.read_text() for path in kept] == [moved.original]
    assert tomllib.loads(moved.state.read_text())["count"] == 3
    (event,) = events(moved, "moved_in")
    assert DOTTED in event["message"]
    assert str(kept[0]) in event["message"]
    assert "3 instances of tei-manager were taken over" in moved.output.read_text()


def test_a_metrics_port_that_two_had_stays_with_the_first(moved: MovedIn) -> None:
    ports = {each["name"]: each["prometheus_port"] for each in moved.get("/instances").json()}
    assert f"prometheus_port = {ports[DOTTED]}" in moved.original
    assert ports["classes"] not in (0, None, ports[DOTTED])
    assert "new metrics ports, because none was asked for or another one has it: classes" in moved.output.read_text()


def test_a_name_with_dots_works_everywhere(moved: MovedIn) -> None:
    target = mux.Target(instance_name=DOTTED)
    request = mux.EmbedRequest(target=target, request=tei.EmbedRequest(inputs="hello"))
    vector = list(moved.stub().Embed(request, timeout=20).embeddings)
    answer = requests.post(
        f"http://127.0.0.1:{moved.http_port}/v1/embeddings", json={"model": DOTTED, "input": "hello"}, timeout=20
    )
    assert answer.json()["data"][0]["embedding"] == pytest.approx(vector, abs=1e-6)
    assert moved.get(f"/instances/{DOTTED}/logs").json()["total_lines"] > 0
    assert (moved.folder / "logs" / f"{DOTTED}-0.log").exists()
    assert f"{DOTTED}:{DOTTED}-0" in moved.supervisorctl("status")
    metrics = moved.get("/metrics").text
    assert f'tei_manager_instance_up{{instance="{DOTTED}",replica="0"}} 1' in metrics.replace(".0\n", "\n")
    assert any(line.startswith("te_") and f'instance="{DOTTED}"' in line for line in metrics.splitlines())
    assert moved.post(f"/instances/{DOTTED}/restart").status_code == 200
    moved.wait_ready(DOTTED)
    moved.supervisorctl("stop", f"{DOTTED}:*")
    eventually(lambda: moved.instance(DOTTED)["status"] == "stopped")
    assert moved.post(f"/instances/{DOTTED}/start").status_code == 200
    moved.wait_ready(DOTTED)


def test_metrics_that_are_off_are_not_shown_and_all_else_is(moved: MovedIn) -> None:
    assert (moved.instance("quiet")["prometheus_port"], moved.instance("quiet")["status"]) == (0, "running")
    own = [line for line in moved.get("/metrics").text.splitlines() if line.startswith("te_")]
    assert any('instance="classes"' in line for line in own)
    assert not any('instance="quiet"' in line for line in own)


def test_what_its_users_read_is_there(moved: MovedIn) -> None:
    shown = moved.instance("classes")
    assert isinstance(shown["uptime_secs"], int)
    for path in ("/health", "/ready", "/instances", f"/instances/{DOTTED}", "/models", "/metrics", "/openapi.json"):
        got, head = requests.get(moved.url + path, timeout=20), requests.head(moved.url + path, timeout=20)
        assert (head.status_code, head.text) == (got.status_code, "")
        assert head.headers["Content-Type"] == got.headers["Content-Type"]
    model = next(each for each in moved.get("/models").json() if each["metadata"])
    assert model["added_at"]
    assert {"num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"} <= set(model["metadata"])
    told = subprocess.run([sys.executable, "-m", "appliance", "--version"], capture_output=True, text=True, check=True)
    assert told.stdout.startswith("tei-appliance ")


@pytest.mark.parametrize(
    ("request_fields", "words"),
    [
        ({}, "No routing specified"),
        ({"target": mux.Target()}, "No routing specified"),
        (
            {"target": mux.Target(instance_name=""), "request": tei.EmbedRequest(inputs="a")},
            "Instance name cannot be empty",
        ),
        ({"target": mux.Target(instance_name="x"), "request": tei.EmbedRequest(inputs="a")}, "not found"),
        ({"target": mux.Target(instance_name=DOTTED)}, "Missing embed request"),
    ],
    ids=str,
)
def test_refusals_have_the_words_that_its_clients_look_for(
    moved: MovedIn, request_fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(grpc.RpcError) as refusal:
        moved.stub().Embed(mux.EmbedRequest(**request_fields), timeout=20)
    assert words in refusal.value.details()


def test_so_have_those_of_arrow(moved: MovedIn) -> None:
    target = mux.Target(instance_name=DOTTED)
    with pytest.raises(grpc.RpcError) as refusal:
        moved.stub().EmbedArrow(mux.EmbedArrowRequest(target=target, arrow_ipc=b"none"), timeout=20)
    assert "Invalid Arrow IPC" in refusal.value.details()


def test_it_is_taken_over_once(tmp_path: Path) -> None:
    """The next start has our own state, of which an instance is gone."""
    with MovedIn(tmp_path) as running:
        running.delete(f"/instances/{DOTTED}")
        running.stop()
        running.up()
        assert [each["name"] for each in running.get("/instances").json()] == ["classes", "quiet"]
        assert len(events(running, "moved_in")) == 1


def up_fails(running: RunningAppliance) -> str:
    done = subprocess.run(running.command("up"), env=running.environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    return done.stderr + done.stdout


def test_what_cannot_be_taken_over_stops_the_start_and_nothing_is_changed(tmp_path: Path) -> None:
    running = MovedIn(tmp_path, extra="auto_start = true")
    said = up_fails(running)
    assert 'instances[2] ("quiet")' in said
    assert "auto_start" in said
    assert running.state.read_text() == running.original
    assert not list(tmp_path.glob("*.good"))


def test_a_good_copy_of_ours_beside_its_file_stops_the_start(tmp_path: Path) -> None:
    running = MovedIn(tmp_path)
    good = tmp_path / "tei-manager-state.json.good"
    good.write_text("generation = 1\ncount = 0\nseeded = []\ninstances = []\n")
    assert "remove the one that you do not want" in up_fails(running)
    assert running.state.read_text() == running.original


def test_a_binary_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    running = MovedIn(tmp_path, settings=f'tei_binary_path = "{tmp_path}/text-embeddings-router"')
    assert "tei_binary_path" in up_fails(running)


def test_a_start_that_is_refused_leaves_its_file_alone(tmp_path: Path) -> None:
    """As when tei-manager still runs: on our port, or with a replica on one of its own."""
    running = MovedIn(tmp_path)
    for port, words in ((running.api_port, "api_port"), (running.asked[1], f'port {running.asked[1]} of "classes"')):
        with socket.create_server(("127.0.0.1", port)):
            said = up_fails(running)
        assert words in said
        assert running.state.read_text() == running.original
    assert str(os.getpid()) in said  # who has the port of the replica: this test


def test_without_restore_it_begins_with_the_seeds_and_the_original_is_kept(tmp_path: Path) -> None:
    seeds = f'[[instances]]\nname = "seed"\nmodel_id = "{FAMILIES / "bert-cls"}"\n'
    running = MovedIn(tmp_path, seeds=seeds)
    running.config.write_text(running.config.read_text().replace("restart = true", "restart = false"))
    with running:
        assert [each["name"] for each in running.get("/instances").json()] == ["seed"]
        kept = [path for path in tmp_path.glob("tei-manager-state.json.2*") if path.suffix != ".lock"]
        assert [path.read_text() for path in kept] == [running.original]


def test_a_torn_file_of_its_default_name_is_not_taken_for_nothing(tmp_path: Path) -> None:
    running = RunningAppliance(tmp_path, seeds="")
    running.folder.mkdir()
    (running.folder / "tei-manager-state.toml").write_text('last_updated = "2026"\n[[instances]]\nname = "a')
    assert "tei-manager-state.toml" in up_fails(running)


def test_its_default_file_in_the_data_folder_is_found(tmp_path: Path) -> None:
    running = RunningAppliance(tmp_path, seeds="")
    running.folder.mkdir()
    ports = free_ports(60)[-2:]
    original = f'last_updated = "2026-01-02T03:04:05Z"\n{instance_table("a.b", "bert-cls", ports)}'
    (running.folder / "tei-manager-state.toml").write_text(original)
    with running:
        running.wait_ready("a.b")
        assert (running.folder / "tei-manager-state.toml").read_text() == original
        health = json.loads(running.cli("status", "--json").stdout)
        assert health["status"] == "healthy"
