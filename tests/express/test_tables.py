"""What the lane writes, without an Envoy that runs: a rejected configuration changes nothing and is told."""

import json
import threading
import time
from pathlib import Path

import pytest

from appliance.core.events import Event
from appliance.core.settings import Settings
from appliance.drivers import envoy
from appliance.export import envoy_tables as export
from appliance.export.express_lane import VALID_SECS, ExpressLane
from appliance.express import __main__ as express
from appliance.express.tables import Tables
from appliance.node.context import Node
from appliance.node.express import ports_of_others, wait_until_released

OLD = "what Envoy follows now"


def program(folder: Path, text: str) -> Path:
    path = folder / "envoy"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def tables(folder: Path, binary: Path) -> Tables:
    settings = Settings(data_dir=str(folder), state_file=str(folder / "state.toml"))
    (folder / "express").mkdir()
    for name in (export.CLUSTERS, export.ROUTES):
        (folder / "express" / name).write_text(OLD)
    lane = ExpressLane.of(settings, "127.0.0.1", cores=2, script="-- none", duration_buckets=(0.1, 1))
    return Tables(Node.at(settings), lane, binary)


def test_tables_that_envoy_rejects_leave_the_old_ones_and_are_an_event(tmp_path: Path) -> None:
    rejecting = tables(tmp_path, program(tmp_path, "echo 'no such field: lb_policy' >&2; exit 1"))
    rejecting.write({"alpha": [8080]})
    assert [(tmp_path / "express" / name).read_text() for name in (export.CLUSTERS, export.ROUTES)] == [OLD, OLD]
    (event,) = rejecting.node.journal.since(0)
    assert event["event"] == Event.EXPRESS_REJECTED
    assert "no such field: lb_policy" in event["message"]


def test_tables_that_envoy_takes_are_written(tmp_path: Path) -> None:
    taking = tables(tmp_path, program(tmp_path, "exit 0"))
    taking.write({"alpha": [8080, 8081]})
    clusters = json.loads((tmp_path / "express" / export.CLUSTERS).read_text())["resources"]
    assert [each["name"] for each in clusters] == ["multiplexer", "instance:alpha"]
    assert taking.node.journal.since(0) == []


def test_an_envoy_that_rejects_how_it_shall_listen_does_not_listen_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it had no TLS, perhaps, or another address."""
    (tmp_path / "express").mkdir(mode=0o700)
    (tmp_path / "express" / express.BOOTSTRAP).write_text("{}")
    binary = program(
        tmp_path, f'case "$*" in *validate*) echo no >&2; exit 1;; esac; touch {tmp_path}/started; sleep 60'
    )
    monkeypatch.setattr(envoy, "binary", lambda: binary)
    monkeypatch.setenv("TEI_MANAGER_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("TEI_MANAGER_CONFIG", raising=False)
    assert express.main() == 1
    assert not (tmp_path / "started").exists()


def test_rejected_tables_are_shown_to_envoy_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been short of memory, or of time; there is one event, and no word that the old ones are right."""
    lane = tables(tmp_path, program(tmp_path, "exit 1"))
    monkeypatch.setattr("appliance.express.tables.AGAIN_SECS", 0.0)
    for _ in range(3):
        lane.follow()
    assert len(lane.node.journal.since(0)) == 1
    assert not Path(lane.lane.valid_file).exists()
    program(tmp_path, "exit 0")
    lane.follow()
    assert (tmp_path / "express" / export.CLUSTERS).read_text() != OLD
    assert int(Path(lane.lane.valid_file).read_text()) > time.time()


def test_ports_that_the_tables_have_for_others_are_waited_for(tmp_path: Path) -> None:
    lane = tables(tmp_path, program(tmp_path, "exit 0"))
    lane.write({"alpha": [8080], "beta": [8081]})
    clusters = tmp_path / "express" / export.CLUSTERS
    assert ports_of_others(clusters, "beta") == {8080}
    assert ports_of_others(tmp_path / "none.json", "beta") == set()
    (tmp_path / "empty.json").touch()  # after a power cut: it is written without waiting for the disk
    assert ports_of_others(tmp_path / "empty.json", "beta") == set()
    threading.Timer(0.3, lane.write, [{"beta": [8081]}]).start()
    begun = time.monotonic()
    wait_until_released(lane.node, "beta", [8080, 8081])
    assert 0.2 < time.monotonic() - begun < 1.5
    wait_until_released(lane.node, "gamma", [8081])  # whose writer hangs
    assert time.monotonic() - begun < 2 * VALID_SECS + 1


@pytest.mark.parametrize("text", ["sleep 60", "kill -9 $$"])
def test_an_envoy_that_says_nothing_has_rejected_it(tmp_path: Path, text: str) -> None:
    assert envoy.refusal(program(tmp_path, text), tmp_path / "config.json", timeout_secs=0.2)


def test_a_binary_that_is_gone_has_rejected_it(tmp_path: Path) -> None:
    assert "envoy" in (envoy.refusal(tmp_path / "envoy", tmp_path / "config.json") or "")


def test_nothing_is_asked_where_there_is_no_lane(tmp_path: Path) -> None:
    assert envoy.ask(tmp_path / "express.sock", "GET", "/ready") is None
