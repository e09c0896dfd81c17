"""A fingerprint is of what the processes have loaded; where nobody knows that, there is none."""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.core.instance import InstanceSpec
from appliance.core.state import Instance
from appliance.drivers.processes import Started, started
from appliance.node.fingerprints import Fingerprints, Known
from testing.running import eventually
from testing.specs import configured

FAMILIES = Path(__file__).parents[1] / "data" / "families"
TICKS = os.sysconf("SC_CLK_TCK")


def begun(secs_ago: float, pid: int = 1) -> Started:
    """A process that began then."""
    return Started(pid, int((time.clock_gettime(time.CLOCK_BOOTTIME) - secs_ago) * TICKS))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(FAMILIES / "bert-cls", tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def instance(model: Path) -> Instance:
    spec = InstanceSpec("a", str(model), engine="embedded")
    return Instance(spec, (8080,), (8700,), created_at="2026-01-01T00:00:00Z", wanted="running", launch=1)


@pytest.fixture
def fingerprints(tmp_path: Path) -> Fingerprints:
    return Fingerprints(configured(data_dir=str(tmp_path / "data")))


@pytest.fixture
def known(fingerprints: Fingerprints, tmp_path: Path) -> Callable[..., Known]:
    """What is known once all files are read."""
    (tmp_path / "data").mkdir()

    def look(instance: Instance, *processes: Started) -> Known:
        eventually(lambda: not fingerprints.of(instance, processes).pending)
        return fingerprints.of(instance, processes)

    return look


def test_a_process_that_is_younger_than_its_files_has_one(known: Callable[..., Known], instance: Instance) -> None:
    first = known(instance, begun(-1))
    assert first.digest
    assert known(instance, begun(-1), begun(-2, pid=2)).digest == first.digest


def test_a_process_that_is_older_than_a_file_has_none(known: Callable[..., Known], instance: Instance) -> None:
    old = started(os.getpid())
    assert old
    assert known(instance, old).fingerprint is None
    assert "have changed since its processes began" in known(instance, old).why
    assert known(instance, begun(-1), old).fingerprint is None


def test_without_processes_it_is_that_of_the_files(known: Callable[..., Known], instance: Instance) -> None:
    assert known(instance).digest == known(instance, begun(-1)).digest


def test_other_bytes_end_it_until_all_processes_are_new(
    known: Callable[..., Known], instance: Instance, model: Path
) -> None:
    before, process = known(instance, begun(-1)), begun(-1)
    assert known(instance, process).digest == before.digest
    time.sleep(1.2)
    config = model / "config.json"
    config.write_text(config.read_text() + " ")
    assert known(instance, process).fingerprint is None
    assert known(instance, process, begun(-1, pid=2)).fingerprint is None
    after = known(instance, begun(-1, pid=2))
    assert after.digest not in (None, before.digest)


def test_a_touch_a_link_and_other_rights_change_nothing(
    known: Callable[..., Known], instance: Instance, model: Path, fingerprints: Fingerprints, tmp_path: Path
) -> None:
    process = begun(-0.1)
    before = known(instance, process)
    assert before.digest
    time.sleep(0.3)
    os.link(model / "config.json", tmp_path / "backup")
    (model / "tokenizer.json").chmod(0o600)
    assert known(instance, process).digest == before.digest
    anew = Fingerprints(fingerprints.settings)  # another process of ours, which has not seen it before
    eventually(lambda: not anew.of(instance, [process]).pending)
    assert anew.of(instance, [process]).digest == before.digest
    os.utime(model / "config.json")
    assert known(instance, process).digest == before.digest


def test_another_launch_begins_anew(known: Callable[..., Known], instance: Instance) -> None:
    first = known(instance, begun(-1))
    assert known(replace(instance, launch=2), begun(-1)).digest == first.digest


@pytest.mark.parametrize(
    "spec", [{"pooling": "mean"}, {"extra_args": ("--dtype-of-nothing", "x")}], ids=["field", "flag"]
)
def test_another_way_to_compute_is_another_one(known: Callable[..., Known], instance: Instance, spec: object) -> None:
    other = replace(instance, spec=replace(instance.spec, **spec))  # type: ignore[arg-type]
    assert known(other, begun(-1)).digest != known(instance, begun(-1)).digest


def test_files_that_are_not_here_have_none(known: Callable[..., Known], instance: Instance) -> None:
    gone = replace(instance, spec=replace(instance.spec, model_id="org/nowhere"))
    assert known(gone).fingerprint is None
    assert "not on this machine" in known(gone).why


def test_what_tei_downloads_by_itself_is_known_by_its_commit_and_its_binary(tmp_path: Path, instance: Instance) -> None:
    binary = tmp_path / "text-embeddings-router"
    binary.write_bytes(b"one version")
    data = tmp_path / "data"
    data.mkdir()
    fingerprints = Fingerprints(configured(data_dir=str(data), tei_binary_path=str(binary)))
    spec = replace(instance.spec, model_id="org/a", engine="tei", revision="a" * 40)
    pinned = replace(instance, spec=spec)

    def digest(each: Instance) -> str | None:
        eventually(lambda: not fingerprints.of(each, ()).pending)
        return fingerprints.of(each, ()).digest

    first = digest(pinned)
    assert first
    assert digest(replace(pinned, spec=replace(spec, revision="b" * 40))) != first
    assert digest(replace(pinned, spec=replace(spec, revision="main"))) is None
    binary.write_bytes(b"next version")
    assert digest(pinned) not in (None, first)
