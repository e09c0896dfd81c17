"""The files of a running appliance are damaged under it: it goes on answering and routing, the next change repairs
them, the damage is kept and journalled, and no instance is lost."""

import tomllib
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from appliance.core.problems import Problem
from appliance.drivers.metrics import Meters
from appliance.monitor.monitor import Monitor
from appliance.operations import supervision
from testing.agreement import alive, state_of, wait_for_agreement
from testing.running import TINY, RunningAppliance, eventually
from tests.faults.test_kills import embeds

pytestmark = pytest.mark.faults
CHANGES = count()


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    """One appliance with `kept`, which runs, and `toggled`, which is stopped (no model: so changes are cheap)."""
    with RunningAppliance(tmp_path_factory.mktemp("damaged"), seeds="") as running:
        running.create("kept")
        running.create("toggled", model_id=TINY)
        assert running.post("/instances/toggled/stop").status_code == 200
        running.wait_ready("kept")
        yield running


def change(running: RunningAppliance) -> str:
    """Two changes of the state: an instance comes and goes; returns its name."""
    name = f"extra-{next(CHANGES)}"
    running.create(name, model_id=TINY)
    assert running.delete(f"/instances/{name}").status_code == 200
    return name


def repairs(running: RunningAppliance) -> list[dict[str, Any]]:
    return [entry for entry in running.get("/events").json() if entry["event"] == "state_repaired"]


def pid(running: RunningAppliance) -> list[int]:
    return [process.pid for process in running.processes_of("kept") if alive(process)]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda _: bytes(range(256)) * 20,
    "not TOML": lambda _: b"this is [[[ not TOML\n",
    "empty": lambda _: b"",
    "zeros, as after a power cut": lambda good: b"\x00" * len(good),
    "cut in the middle of a value": lambda good: good[: good.index(b"model_id") + 12],
    "cut between two instances": lambda good: good[: good.rindex(b"[[instances]]")],
    "cut before the first instance": lambda good: good[: good.index(b"[[instances]]")],
    "TOML of somebody else": lambda _: b"[tool.ruff]\nline-length = 120\n",
    "a value that no verb writes": lambda good: good.replace(b'wanted = "running"', b'wanted = "flying"'),
    "HTML": lambda _: b"<html><body>404</body></html>",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_state_file_is_set_aside_and_nothing_is_lost(
    damaged: RunningAppliance, damage: Callable[[bytes], bytes]
) -> None:
    running, path = damaged, damaged.folder / "state.toml"
    good, kept, names = path.read_bytes(), pid(running), set(state_of(running).instances)
    aside, before = set(running.folder.glob("state.toml.bad-*")), len(repairs(running))
    path.write_bytes(bad := damage(good))
    try:
        assert {entry["name"] for entry in running.get("/instances").json()} == names
        assert running.instance("kept")["status"] == "running"
        assert embeds(running, "kept")
        change(running)
        assert {entry["name"] for entry in running.get("/instances").json()} == names
        (new,) = set(running.folder.glob("state.toml.bad-*")) - aside
        assert new.read_bytes() == bad
        assert len(repairs(running)) == before + 1
        assert new.name in repairs(running)[-1]["message"]
        assert embeds(running, "kept")
        assert pid(running) == kept
        wait_for_agreement(running, running.node_id())
    except BaseException:
        path.write_bytes(good)  # the other cases shall not suffer
        running.post("/instances/toggled/restart")
        running.post("/instances/toggled/stop")
        running.wait_ready("kept")
        raise


def test_a_missing_state_file_is_restored(damaged: RunningAppliance) -> None:
    names, before = set(state_of(damaged).instances), len(repairs(damaged))
    (damaged.folder / "state.toml").unlink()
    assert {entry["name"] for entry in damaged.get("/instances").json()} == names
    assert embeds(damaged, "kept")
    change(damaged)
    assert set(state_of(damaged).instances) == names
    assert len(repairs(damaged)) == before + 1


def test_a_damaged_last_good_copy_is_replaced_by_the_next_change(damaged: RunningAppliance) -> None:
    good = damaged.folder / "state.toml.good"
    good.write_bytes(b"\xff garbage")
    change(damaged)
    assert good.read_bytes() == (damaged.folder / "state.toml").read_bytes()


# -- no copy that can be used -----------------------------------------------------------------------------------------


@pytest.fixture
def unusable(damaged: RunningAppliance) -> Iterator[dict[Path, bytes]]:
    """Both copies say what this release does not take; yields all files that must stay as they are."""
    golden = damaged.folder / "golden" / "kept.json"
    eventually(golden.exists)
    copies = [damaged.folder / name for name in ("state.toml", "state.toml.good")]
    good = copies[0].read_bytes()
    bad = good.replace(b'wanted = "running"', b'wanted = "flying"')
    for path in copies:
        path.write_bytes(bad)
    try:
        yield {path: path.read_bytes() for path in (*copies, golden, damaged.folder / "instances.conf")}
    finally:
        for path in copies:
            path.write_bytes(good)


def test_state_that_no_copy_of_can_be_used_is_left_alone_and_what_runs_goes_on(
    damaged: RunningAppliance, unusable: dict[Path, bytes], meters: Meters
) -> None:
    running, kept, aside = damaged, pid(damaged), set(damaged.folder.glob("*.bad-*"))
    refused = [
        running.get("/instances"),
        running.post("/instances", {"name": "more", "model_id": TINY}),
        running.post("/instances/kept/restart"),
        running.delete("/instances/kept"),
    ]
    assert [(answer.status_code, answer.json()["code"]) for answer in refused] == [(503, "STATE_UNREADABLE")] * 4
    assert "flying" in refused[0].json()["error"]
    node = running.node()
    monitor = Monitor(node, meters, wake=lambda: None)
    monitor.reconciled_at = float("-inf")
    for repair in (monitor.tick, lambda: supervision.reconcile(node, ())):
        with pytest.raises(Problem, match="what runs goes on"):
            repair()
    assert running.get("/ready").status_code == 200
    eventually(lambda: "state_unreadable" in [entry["event"] for entry in running.get("/events").json()])
    assert "FAIL" not in running.supervisorctl("restart", "control")
    told = eventually(lambda: running.get("/health").json())
    assert (told["status"], "state_unreadable: Cannot use" in told["reason"]) == ("degraded", True)
    doctor = running.cli("doctor")
    assert (doctor.returncode, "state_unreadable: Cannot use" in doctor.stdout) == (1, True)
    assert embeds(running, "kept")
    assert pid(running) == kept
    assert {path: path.read_bytes() for path in unusable} == unusable
    assert set(running.folder.glob("*.bad-*")) == aside


def test_after_a_copy_was_put_back_changes_are_made_again(damaged: RunningAppliance) -> None:
    change(damaged)
    assert damaged.get("/health").json()["status"] == "healthy"
    wait_for_agreement(damaged, damaged.node_id())


def test_nothing_is_started_from_state_that_cannot_be_used(tmp_path: Path) -> None:
    node = RunningAppliance(tmp_path)  # with a seed
    node.folder.mkdir()
    (node.folder / "state.toml").write_text("generation = 5\ncount = 1\n")
    ended = node.cli("up")
    assert (ended.returncode, "to begin with nothing, move both" in ended.stderr) == (1, True)
    assert [path.name for path in node.folder.iterdir() if path.suffix != ".lock"] == ["state.toml"]
    assert node.left_over() == []


def test_an_older_and_a_newer_release_over_one_folder(damaged: RunningAppliance) -> None:
    """The file is as a newer release would leave it; this one starts on it, changes it, and loses nothing."""
    newer = tomllib.loads((damaged.folder / "state.toml").read_text())
    newer["tenants"] = {"search": {"share": 0.5}}
    newer["instances"][0]["token_ids"] = "refuse"
    text = tomli_w.dumps(newer)
    for name in ("state.toml", "state.toml.good"):
        (damaged.folder / name).write_text(text)
    before = len(repairs(damaged))
    damaged.stop()
    damaged.up()
    damaged.wait_ready("kept")
    change(damaged)
    written = tomllib.loads((damaged.folder / "state.toml").read_text())
    assert (written["tenants"], written["instances"][0]) == (newer["tenants"], newer["instances"][0])
    assert len(repairs(damaged)) == before


HAND = {
    "emptied": lambda text: "",
    "a group removed": lambda text: text[: text.index("[group:kept]")],
    "a program added": lambda text: text + "\n[program:mine]\ncommand=/bin/sleep 1000\n",
    "broken": lambda text: text + "\n[program:broken\ncommand=%(x)s\n",
    "kept changed": lambda text: text.replace("startsecs=5", "startsecs=7"),
}


@pytest.mark.parametrize("edit", HAND.values(), ids=HAND.keys())
def test_an_include_file_edited_by_hand_is_restored_by_the_next_change(
    damaged: RunningAppliance, edit: Callable[[str], str]
) -> None:
    path, kept = damaged.folder / "instances.conf", pid(damaged)
    before = path.read_text()
    path.write_text(edit(before))
    change(damaged)
    assert path.read_text() == before
    assert pid(damaged) == kept
    wait_for_agreement(damaged, damaged.node_id())


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00 not UTF-8"], ids=["missing", "not text"])
def test_an_include_file_that_cannot_be_read_is_restored(damaged: RunningAppliance, content: bytes | None) -> None:
    path = damaged.folder / "instances.conf"
    before = path.read_bytes()
    try:
        path.unlink() if content is None else path.write_bytes(content)
        change(damaged)
        assert path.read_bytes() == before
    finally:
        if content is not None and path.read_bytes() == content:
            path.unlink()
    wait_for_agreement(damaged, damaged.node_id())


def test_a_damaged_journal_does_not_stop_a_change(damaged: RunningAppliance) -> None:
    journal = damaged.folder / "events.jsonl"
    journal.write_bytes(journal.read_bytes() + b'{"seq": \xff\x00 half a li')
    name = change(damaged)
    events = damaged.get("/events").json()
    assert [entry["event"] for entry in events if entry["instance"] == name] == ["created", "deleted"]
    numbers = [entry["seq"] for entry in events]
    assert numbers == sorted(set(numbers))
