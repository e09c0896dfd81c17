"""`log_to`: what comes into the log files is on standard output, too, each line once and whole."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.cli import follow_logs
from testing.running import RunningAppliance, eventually

READY = "the follower runs"
pytestmark = pytest.mark.processes


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "early.log").write_text("from the last time\n")
    process = start(tmp_path)

    def follows() -> bool:  # what comes before it has looked at the files is not new to it
        append(tmp_path / "early.log", f"{READY}\n")
        return bool((tmp_path / "output.txt").read_text())

    eventually(follows)
    yield process
    process.kill()
    process.wait()


def start(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", follow_logs.__file__, str(folder)]
    with (folder / "output.txt").open("wb") as output:
        return subprocess.Popen(command, stdout=output)


def printed(folder: Path) -> list[str]:
    return [line for line in (folder / "output.txt").read_text().splitlines() if READY not in line]


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_each_new_line_is_printed_once_after_the_name_of_its_process(
    follower: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    append(tmp_path / "first.log", "one\n")
    eventually(lambda: printed(tmp_path) == ["first | one"])
    append(tmp_path / "early.log", "now\n")
    append(tmp_path / "first.log", "tw")
    eventually(lambda: "early | now" in printed(tmp_path))
    append(tmp_path / "first.log", "o\nthree\n")
    eventually(lambda: len(printed(tmp_path)) == 4)
    assert sorted(printed(tmp_path)) == ["early | now", "first | one", "first | three", "first | two"]


def test_nothing_is_lost_when_a_log_is_rotated_or_emptied(follower: subprocess.Popen[bytes], tmp_path: Path) -> None:
    log = tmp_path / "one.log"
    expected = [f"one | {number}" for number in range(200)]
    for number in range(200):
        append(log, f"{number}\n")
        if number in (10, 80):
            eventually(lambda: f"one | {number - 1}" in printed(tmp_path))  # noqa: B023
        if number in (50, 120):
            log.rename(tmp_path / f"one.log.{number}")  # as supervisord rotates
    eventually(lambda: len(printed(tmp_path)) == 200)
    assert printed(tmp_path) == expected
    log.write_text("")
    append(log, "after\n")
    eventually(lambda: printed(tmp_path)[-1] == "one | after")


def test_a_line_that_spans_a_rotation_is_printed_whole(follower: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """What came before the rotation was lost, and the rest stood alone."""
    log = tmp_path / "one.log"
    append(log, "before\nbe")
    eventually(lambda: printed(tmp_path) == ["one | before"])
    log.rename(tmp_path / "one.log.1")  # as supervisord rotates
    append(log, "gun\nafter\n")
    eventually(lambda: printed(tmp_path)[-1] == "one | after")
    assert printed(tmp_path) == ["one | before", "one | begun", "one | after"]


def test_a_line_without_its_end_is_printed_when_no_more_comes(
    follower: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """The last words of a process that was killed were kept back."""
    (tmp_path / "gone.log").write_text("one\nlast words")
    append(tmp_path / "other.log", "two\nno end")
    eventually(lambda: sorted(printed(tmp_path)) == ["gone | one", "other | two"])
    (tmp_path / "gone.log").unlink()
    eventually(lambda: "gone | last words" in printed(tmp_path))
    follower.send_signal(signal.SIGTERM)
    assert follower.wait(timeout=10) == 0
    assert sorted(printed(tmp_path)) == ["gone | last words", "gone | one", "other | no end", "other | two"]


def test_the_last_lines_come_before_its_end(follower: subprocess.Popen[bytes], tmp_path: Path) -> None:
    append(tmp_path / "first.log", "one\n")
    eventually(lambda: printed(tmp_path) == ["first | one"])
    append(tmp_path / "first.log", "last\n")
    append(tmp_path / "new.log", "also\n")
    follower.send_signal(signal.SIGTERM)
    assert follower.wait(timeout=10) == 0
    assert sorted(printed(tmp_path)) == ["first | last", "first | one", "new | also"]


def test_nobody_reading_ends_it(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", follow_logs.__file__, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.close()

    def ended() -> bool:
        append(tmp_path / "first.log", "one\n")
        return process.poll() == 0

    eventually(ended)


@pytest.mark.parametrize("log_to", ["both", "stdout"])
def test_a_dying_model_says_why_on_standard_output(tmp_path: Path, log_to: str) -> None:
    router = tmp_path / "text-embeddings-router"
    router.write_text(
        "#!/bin/sh\n[ \"$1\" = --help ] && exec sleep 0\necho 'Error: the weights are gone' >&2\nexit 1\n"
    )
    router.chmod(0o755)
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
    seeds = f'[[instances]]\nname = "dying"\nmodel_id = "{model}"\n'
    running = RunningAppliance(tmp_path, seeds=seeds, settings=f'log_to = "{log_to}"\ntei_binary_path = "{router}"')
    output = tmp_path / "output.txt"
    with output.open("wb") as file:
        up = subprocess.Popen(running.command("up"), env=running.environ, stdout=file, stderr=file)
    try:
        eventually(lambda: "dying-0 | Error: the weights are gone" in output.read_text())
        eventually(lambda: running.instance("dying")["status"] == "failed")
        assert "the weights are gone" in running.instance("dying")["last_error"]
    finally:
        up.terminate()
        up.wait(timeout=40)
    lines = output.read_text().splitlines()
    assert any(line.startswith("control | ") for line in lines)
    assert not any("READY" in line for line in lines), "the chatter of supervisor's events"
    assert lines[-1] == "Stopped; no process is left"
    assert up.returncode == 0
    assert not running.left_over()
