"""The state file: no update is lost, no crash damages it, nothing unreadable is overwritten, no failure changes it."""

import os
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import tomli_w

from appliance.core import models, state
from appliance.core.models import Model, Verification
from appliance.core.problems import Kind, Problem, invalid
from appliance.core.state import State
from appliance.drivers.statefile import ModelsFile, StateFile
from testing.children import now, run, run_together, seeded
from testing.specs import configured, spec


class Store:
    """A state file in a folder, and what it said of its repairs."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "state.toml"
        self.good = folder / "state.toml.good"
        self.repairs: list[str] = []
        self.file = StateFile(self.path, now, self.repairs.append)

    def remember(self, *names: str) -> State:
        return self.file.update(lambda before: seeded(before, *names)).after

    def set_aside(self) -> list[Path]:
        return sorted(self.path.parent.glob("state.toml.bad*"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_before_the_first_change_the_state_is_empty_and_there_is_no_file(store: Store) -> None:
    assert store.file.read() == State()
    assert not store.path.exists()


def test_an_update_is_read_by_everybody(store: Store) -> None:
    after = store.remember("a")
    assert (after.generation, after.seeded) == (1, frozenset({"a"}))
    assert store.file.read() == Store(store.path.parent).file.read() == after


def test_folders_that_are_missing_are_made(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    deep = Store(tmp_path / "x" / "y" / "z")
    assert deep.remember("a") == deep.file.read()


def test_every_change_raises_the_generation_whatever_the_change_says(store: Store) -> None:
    for expected in (1, 2, 3):
        after = store.file.update(lambda before, n=expected: replace(seeded(before, f"n{n}"), generation=77)).after
        assert after.generation == store.file.read().generation == expected


def test_a_change_returns_what_it_was_made_of(store: Store) -> None:
    first = store.remember("a")
    change = store.file.update(lambda before: seeded(before, "b"))
    assert (change.before, change.after) == (first, store.file.read())
    same = store.file.update(lambda before: before)
    assert same.before == same.after == store.file.read()


def test_a_change_that_changes_nothing_writes_nothing(store: Store) -> None:
    store.remember("a")
    before = (store.path.stat().st_ino, store.path.stat().st_mtime_ns)
    assert store.file.update(lambda same: same).after.generation == 1
    assert (store.path.stat().st_ino, store.path.stat().st_mtime_ns) == before


@pytest.mark.parametrize("error", [invalid("no"), ValueError("no"), KeyError("no"), OSError("no")], ids=repr)
def test_a_change_that_fails_changes_nothing_and_its_own_error_comes_out(store: Store, error: Exception) -> None:

    def failing(before: State) -> State:
        raise error

    store.remember("a")
    before = {path: path.read_bytes() for path in store.path.parent.iterdir()}
    with pytest.raises(type(error)) as caught:
        store.file.update(failing)
    assert {path: path.read_bytes() for path in store.path.parent.iterdir()} == before
    assert store.remember("b").seeded == {"a", "b"}
    assert caught.value is error


def test_nothing_is_left_beside_the_file_but_the_good_copy_and_the_lock(store: Store) -> None:
    store.remember("a")
    assert {path.name for path in store.path.parent.iterdir()} <= {"state.toml", "state.toml.good", "state.toml.lock"}


# -- many writers -----------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_updates_of_several_processes_lose_nothing(store: Store) -> None:
    run_together(*(("add_names", store.path, who, 25) for who in "abcd"))
    state = store.file.read()
    assert state.seeded == {f"{who}-{number}" for who in "abcd" for number in range(25)}
    assert state.generation == 100


def test_updates_of_several_threads_lose_nothing(store: Store) -> None:
    def one(number: int) -> State:
        return Store(store.path.parent).remember(str(number))

    with ThreadPoolExecutor(8) as pool:
        generations = sorted(state.generation for state in pool.map(one, range(64)))
    assert generations == list(range(1, 65))
    assert store.file.read().seeded == {str(number) for number in range(64)}


def test_readers_beside_a_writer_see_states_in_order_and_never_half_of_one(store: Store) -> None:
    store.remember("a")
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: [store.remember(f"n{number}" * 20) for number in range(60)])
        generations = []
        while not writing.done():
            generations.append(store.file.read().generation)
    assert generations == sorted(generations)
    assert store.file.read().generation == 61
    assert store.repairs == []


# -- crashes ----------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_kill_at_any_moment_leaves_the_last_acknowledged_state_or_the_next(store: Store) -> None:
    rounds = [[int(word) for word in line.split()] for line in run("kill_writers", store.path, 60).splitlines()]
    assert len(rounds) == 60
    assert [line for line in rounds if not line[0] <= line[1] <= line[0] + 1] == []
    assert all(read == found for _, found, read in rounds)
    assert rounds[-1][0] > 60
    assert store.remember("after").generation == rounds[-1][1] + 1
    assert (store.repairs, store.set_aside()) == ([], [])


# -- damage -----------------------------------------------------------------------------------------------------------

DAMAGE = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "not TOML": lambda text: "{" + text,
    "zeros": lambda text: "\0" * len(text),
    "not UTF-8": lambda text: b"\xff\xfe" + text.encode(),
    "no generation": lambda text: text.replace("generation", "gen"),
    "another type": lambda text: "generation = 5\ninstances = 7\n",
    "huge number": lambda text: "generation = 1" + "0" * 400 + "\n",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_what_cannot_be_read_is_set_aside_and_the_last_good_copy_used(
    store: Store, damage: Callable[[str], str | bytes]
) -> None:
    store.remember("a")
    good = store.remember("b")
    broken = damage(store.path.read_text())
    store.path.write_bytes(broken if isinstance(broken, bytes) else broken.encode())
    broken_bytes = store.path.read_bytes()

    assert store.file.read() == good
    assert store.path.read_bytes() == broken_bytes, "reading repairs nothing"
    after = store.remember("c")
    assert (after.generation, after.seeded) == (3, frozenset({"a", "b", "c"}))
    (aside,) = store.set_aside()
    assert aside.read_bytes() == broken_bytes
    assert "2026-01-02T03" in aside.name
    assert len(store.repairs) == 1
    assert aside.name in store.repairs[0]
    store.remember("d")
    assert len(store.repairs) == 1


def test_damage_is_repaired_even_when_nothing_changes(store: Store) -> None:
    good = store.remember("a")
    store.path.write_text("generation = ")
    assert store.file.update(lambda same: same).after == good
    assert Store(store.path.parent).file.read() == good
    assert len(store.set_aside()) == len(store.repairs) == 1


def test_a_restore_repairs_what_cannot_be_used_and_changes_nothing_else(store: Store) -> None:
    store.file.restore()
    assert not store.path.exists()
    good = store.remember("a")
    store.file.restore()
    assert store.repairs == []
    store.path.write_text("generation = ")
    store.file.restore()
    assert store.file.parsed(store.path) == good
    assert len(store.set_aside()) == len(store.repairs) == 1


def test_a_missing_file_comes_back_from_the_good_copy(store: Store) -> None:
    good = store.remember("a")
    store.path.unlink()
    assert store.file.read() == good
    assert store.remember("b").seeded == {"a", "b"}
    assert len(store.repairs) == 1
    assert store.set_aside() == []


def test_a_damaged_good_copy_does_not_matter(store: Store) -> None:
    store.remember("a")
    store.good.write_text("{")
    assert store.remember("b").seeded == {"a", "b"}
    store.path.write_text("{")
    assert store.file.read().seeded == {"a", "b"}


# -- nothing that can be used -----------------------------------------------------------------------------------------

NEWER = 'generation = 7\ncount = 1\nseeded = []\n[[instances]]\nname = "a"\nmodel_id = "m"\nengine = "of tomorrow"\n'
NO_COPY: dict[str, tuple[str | None, str | None]] = {  # state.toml, state.toml.good
    "both of a newer release": (NEWER, NEWER),
    "both damaged": ("{", ""),
    "damaged, and of a newer release": ("{", NEWER),
    "of a newer release, and no copy": (NEWER, None),
    "written by hand before the first start": ("hello", None),
    "gone, and the copy is of a newer release": (None, NEWER),
    "gone, and the copy is damaged": (None, "{"),
    "lists without end": ("a = " + "[" * 100_000, "{"),
}


@pytest.mark.parametrize("texts", NO_COPY.values(), ids=NO_COPY.keys())
def test_without_a_copy_that_can_be_used_every_change_is_refused(
    store: Store, texts: tuple[str | None, str | None]
) -> None:
    """Not the empty state: that would stop what runs, and delete what belongs to it."""
    files = {path: text for path, text in zip((store.path, store.good), texts, strict=True) if text is not None}
    for path, text in files.items():
        path.write_text(text)
    for use in (store.file.read, lambda: store.file.update(lambda same: same), lambda: store.remember("b")):
        with pytest.raises(Problem) as caught:
            use()
        assert (caught.value.kind, caught.value.code) == (Kind.UNAVAILABLE, "STATE_UNREADABLE")
        assert all(path.name in caught.value.message for path in files)
        assert len(caught.value.message) < 2000
    assert {path: path.read_text() for path in store.path.parent.iterdir() if path.suffix != ".lock"} == files
    assert store.repairs == []


def test_a_copy_that_is_put_back_is_used_at_once(store: Store) -> None:
    store.remember("a")
    good = store.good.read_text()
    store.path.write_text(NEWER)
    store.good.write_text(NEWER)
    assert refused(store).code == "STATE_UNREADABLE"
    store.good.write_text(good)
    assert store.file.read().seeded == {"a"}
    assert store.remember("b").seeded == {"a", "b"}
    assert [path.read_text() for path in store.set_aside()] == [NEWER]


# -- a newer release and this one over one folder ---------------------------------------------------------------------


def test_fields_of_a_newer_release_are_kept_through_changes(store: Store) -> None:
    store.file.update(lambda before: state.add(before, spec("a"), configured(), (), now()))
    ours = tomllib.loads(store.path.read_text())
    when = datetime(2027, 1, 2, 3, 4, 5, tzinfo=UTC)
    theirs = {"tenants": {"one": {"share": 0.5}}, "since": when}
    own = {"token_window": "refuse", "canaries": [{"text": "x", "weights": [1, 2.5]}], "limits": {"rows": 7}}
    instance = {**ours["instances"][0], **own}
    store.path.write_text(tomli_w.dumps({**theirs, **ours, "instances": [instance]}))

    store.remember("b")
    store.file.update(lambda before: state.restart(before, "a"))
    store.file.update(lambda before: state.add(before, spec("c"), configured(), (), now()))
    written = tomllib.loads(store.path.read_text())
    assert store.good.read_text() == store.path.read_text()
    assert {key: written[key] for key in theirs} == theirs
    assert {key: written["instances"][0][key] for key in own} == own
    assert [(each["name"], each["restarts"]) for each in written["instances"]] == [("a", 1), ("c", 0)]
    assert not set(own) & set(written["instances"][1])
    assert (store.repairs, store.set_aside()) == ([], [])


def test_fields_of_a_newer_release_are_kept_in_the_registry_of_models(tmp_path: Path) -> None:
    file = ModelsFile(tmp_path / "models.toml", now, lambda message: None)
    verification = Verification(now(), "fingerprint")
    file.update(lambda before: models.add(before, Model("org/a", verification=verification), now()))
    ours = tomllib.loads(file.path.read_text())
    ours["mirror"] = {"url": "https://example.com"}
    ours["models"][0]["licence"] = "MIT"
    ours["models"][0]["verification"]["energy"] = {"joules": 3.5}
    file.path.write_text(tomli_w.dumps(ours))
    file.update(lambda before: models.add(before, Model("org/b"), now()))
    written = tomllib.loads(file.path.read_text())
    assert (written["mirror"], written["models"][0]) == (ours["mirror"], ours["models"][0])
    assert [each["model_id"] for each in written["models"]] == ["org/a", "org/b"]


# -- disks that refuse ------------------------------------------------------------------------------------------------


def refused(store: Store) -> Problem:
    with pytest.raises(Problem) as caught:
        store.remember("lost")
    return caught.value


@pytest.mark.processes
def test_a_disk_that_takes_no_more_changes_nothing(store: Store) -> None:
    store.remember("a")
    before = {path: path.read_bytes() for path in store.path.parent.iterdir()}
    assert run("update_on_a_full_disk", store.path, 100).split() == ["exhausted", "STATE_WRITE_FAILED"]
    assert {path: path.read_bytes() for path in store.path.parent.iterdir()} == before
    assert store.remember("b").seeded == {"a", "b"}


def test_a_file_in_place_of_the_folder_is_a_write_failure(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("I am no folder")
    assert refused(Store(tmp_path / "data")).code == "STATE_WRITE_FAILED"


def test_a_temporary_file_that_cannot_be_made_is_a_write_failure(store: Store) -> None:
    store.remember("a")
    (store.path.parent / "state.toml.new").mkdir()
    assert refused(store).code == "STATE_WRITE_FAILED"
    assert store.file.read().seeded == {"a"}


def test_a_good_copy_that_cannot_be_written_is_told_but_loses_nothing(store: Store) -> None:
    store.remember("a")
    (store.path.parent / "state.toml.good.new").mkdir()
    assert store.remember("b") == store.file.read()
    assert len(store.repairs) == 1


def test_a_change_that_nobody_could_read_any_more_is_not_made(store: Store) -> None:
    """Its good copy would be as bad, so every change after it would be refused."""

    def one_port_twice(before: State) -> State:
        instance = replace(before.get("a"), ports=(8080,), prometheus_ports=(8080,))
        return replace(before, instances={"a": instance})

    store.file.update(lambda before: state.add(before, spec("a"), configured(), (), now()))
    files = {path: path.read_bytes() for path in (store.path, store.good)}
    with pytest.raises(Problem, match="Nothing was changed") as caught:
        store.file.update(one_port_twice)
    assert caught.value.kind is Kind.INTERNAL
    assert {path: path.read_bytes() for path in files} == files


def test_a_state_file_that_cannot_be_opened_is_not_an_empty_one(store: Store) -> None:
    store.path.mkdir()
    for use in (store.file.read, lambda: store.remember("a")):
        with pytest.raises(Problem) as caught:
            use()
        assert caught.value.kind == Kind.UNAVAILABLE
    assert store.path.is_dir()


def test_the_same_bytes_are_parsed_once(store: Store) -> None:
    store.remember("a")
    assert store.file.read() is store.file.read()
    assert store.file.update(lambda before: before).before is store.file.read()


def test_other_bytes_are_seen_whatever_the_file_system_tells_of_them(store: Store) -> None:
    """Neither the size nor the times of a file say that it is the one that was read."""
    store.remember("a")
    assert store.file.read().seeded == {"a"}
    status, text = store.path.stat(), store.path.read_text()
    with store.path.open("r+") as file:
        file.write(text.replace('"a"', '"b"'))
    os.utime(store.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (store.path.stat().st_ino, store.path.stat().st_size) == (status.st_ino, status.st_size)
    assert store.file.read().seeded == {"b"}
    store.path.write_text(text)
    assert store.file.read().seeded == {"a"}


def test_what_was_read_before_does_not_stand_for_a_file_that_cannot_be_used(store: Store) -> None:
    store.remember("a")
    store.file.read()
    for path in (store.path, store.good):
        path.write_text("{")
    with pytest.raises(Problem, match="Cannot use"):
        store.file.read()
