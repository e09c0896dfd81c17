"""A program that tells that it goes on."""

import os
import time
from pathlib import Path

from appliance.files.heartbeat import BEAT, Heartbeat, last_beat
from testing.running import eventually


def silent_secs(path: Path) -> float:
    beat = last_beat(path)
    assert beat
    assert beat.pid == os.getpid()
    return time.monotonic() - beat.at


def test_each_beat_ends_the_silence(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    heart = Heartbeat(path)
    time.sleep(0.1)
    assert last_beat(path) is None  # a program that starts has none yet
    heart.beat()
    eventually(lambda: last_beat(path), 5)
    time.sleep(1.5)
    before = silent_secs(path)
    assert before >= 1.5
    heart.beat()
    eventually(lambda: silent_secs(path) < before, 5)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_worker_tells_it_of_its_parent(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path / "beat", pid=77)
    assert heart.beat_now()
    beat = last_beat(tmp_path / "beat")
    assert beat
    assert beat.pid == 77


def test_what_is_no_beat_of_this_machine_s_time_counts_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    path.write_bytes(BEAT.pack(os.getpid(), time.monotonic() + 100))  # before the machine was started again
    assert last_beat(path) is None
    path.write_bytes(b"half")
    assert last_beat(path) is None


def test_a_disk_that_refuses_is_told_and_stops_nobody(tmp_path: Path) -> None:
    for path in (Path("/dev/full"), tmp_path / "no folder" / "beat"):
        heart = Heartbeat(path)
        heart.beat()
        assert not heart.write()
    (tmp_path / "no folder").mkdir()
    assert heart.write()
