"""`python -m appliance.jobs.fetch` and a hub on loopback: several at once, what is there, what cannot be had."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.hub import Hub, small_model
from testing.running import MINILM

pytestmark = pytest.mark.processes
MODEL = "org/small"
FILES = small_model()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as running:
        running.add(MODEL, FILES)
        yield running


def start(hub: Hub, home: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "appliance.jobs.fetch", *arguments]
    return subprocess.Popen(
        command, env=hub.environment(home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    words, _ = process.communicate(timeout=60)
    return process.returncode, words


def test_several_at_once_share_a_cache_and_fetch_each_file_once(hub: Hub, tmp_path: Path) -> None:
    processes = [start(hub, tmp_path, MODEL) for _ in range(3)]
    results = [ended(each) for each in processes]
    assert [status for status, _ in results] == [0, 0, 0], results
    (snapshot,) = (tmp_path / "hub" / "models--org--small" / "snapshots").iterdir()
    for name in ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors"):
        assert (snapshot / name).read_bytes() == FILES[name]
        assert len(hub.seen("GET", f"{snapshot.name}/{name}")) == 1


def test_what_is_complete_is_not_asked_for_again(hub: Hub, tmp_path: Path) -> None:
    assert ended(start(hub, tmp_path, MODEL))[0] == 0
    before = len(hub.requests)
    status, words = ended(start(hub, tmp_path, MODEL))
    assert (status, "is there" in words, len(hub.requests)) == (0, True, before)


def test_a_package_will_do_where_the_engine_reads_packages(hub: Hub, tmp_path: Path) -> None:
    assert ended(start(hub, tmp_path, MINILM, "--packages"))[0] == 0
    assert hub.requests == []
    assert ended(start(hub, tmp_path, MINILM))[0] == 1, "TEI reads the cache alone, and this hub has no such model"


def test_what_cannot_be_had_is_told_in_words(hub: Hub, tmp_path: Path) -> None:
    status, words = ended(start(hub, tmp_path, "org/nothing"))
    assert (status, "org/nothing" in words) == (1, True)
