"""A program that tells that it goes on."""

import os
import time
from pathlib import Path

from appliance.files.heartbeat import BEAT, BEAT_SECS, Heartbeat, silent_secs


def test_each_beat_ends_the_silence(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    assert silent_secs(path) is None
    heart = Heartbeat(path)
    time.sleep(BEAT_SECS / 5)
    heart.beat()  # too soon for another write
    before = silent_secs(path)
    time.sleep(BEAT_SECS)
    heart.beat()
    after = silent_secs(path)
    assert before is not None
    assert after is not None
    assert after < BEAT_SECS / 5 <= before
    assert path.stat().st_mode & 0o777 == 0o600


def test_only_a_process_that_lives_is_silent(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    path.write_bytes(BEAT.pack(2**22 + 1, time.monotonic() - 100))  # above the largest id
    assert silent_secs(path) is None
    path.write_bytes(BEAT.pack(os.getpid(), time.monotonic() + 100))  # before the machine was started again
    assert silent_secs(path) is None
    path.write_bytes(b"half")
    assert silent_secs(path) is None


def test_where_no_file_can_be_the_program_goes_on(tmp_path: Path) -> None:
    Heartbeat(tmp_path / "no folder" / "beat").beat()


def test_where_the_file_cannot_be_written_the_program_goes_on() -> None:
    Heartbeat(Path("/dev/full")).beat()
