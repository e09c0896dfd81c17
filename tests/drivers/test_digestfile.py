"""Digests of files are read once, by one process, and are of this very content."""

import hashlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from appliance.drivers.digestfile import DigestFile, state_of


@pytest.fixture
def digests(tmp_path: Path) -> DigestFile:
    return DigestFile(tmp_path / "digests.json")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"numbers" * 1000)
    return path


def test_a_file_that_nobody_has_read_has_no_digest_yet(digests: DigestFile, file: Path) -> None:
    assert digests.get(state_of(file)) is None


def test_what_one_process_has_read_another_one_knows(digests: DigestFile, file: Path) -> None:
    digest = digests.read(file)
    assert digest
    assert digest.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert DigestFile(digests.path).get(state_of(file)) == digest


def test_a_file_of_the_same_size_and_time_is_known_as_another_one(digests: DigestFile, file: Path) -> None:
    before, first = state_of(file), digests.read(file)
    file.write_bytes(b"letters" * 1000)
    os.utime(file, ns=(before.modified_ns, before.modified_ns))
    assert digests.get(state_of(file)) is None
    second = digests.read(file)
    assert first
    assert second
    assert second.sha256 != first.sha256
    assert second.since_ns > first.since_ns


def test_a_link_to_a_file_is_no_change_of_its_content(digests: DigestFile, file: Path) -> None:
    first = digests.read(file)
    os.link(file, file.with_name("backup"))
    file.chmod(0o600)
    assert digests.get(state_of(file)) is None
    assert digests.read(file) == first
    assert len(json.loads(digests.path.read_text())) == 1


def test_many_who_want_one_file_read_it_once(digests: DigestFile, file: Path) -> None:
    others = [DigestFile(digests.path) for _ in range(8)]
    start = threading.Barrier(8)

    def read(each: DigestFile) -> object:
        start.wait()
        return each.read(file)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(read, others))) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', '{"a": ["b"]}', '{"a": ["b", "c"]}'])
def test_a_file_of_digests_that_cannot_be_read_costs_another_look(
    digests: DigestFile, file: Path, content: str
) -> None:
    digests.path.write_text(content)
    assert digests.get(state_of(file)) is None
    digest = digests.read(file)
    assert DigestFile(digests.path).get(state_of(file)) == digest


def test_a_file_that_is_gone_is_an_error(digests: DigestFile, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        digests.read(tmp_path / "gone")
