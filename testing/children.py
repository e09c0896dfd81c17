"""Programs that tests run as processes of their own: ``python -m testing.children WHAT PATH ...``."""

import os
import random
import resource
import select
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from appliance.core import state_toml
from appliance.core.problems import Problem
from appliance.core.state import State
from appliance.drivers import metrics
from appliance.drivers.journal import Journal
from appliance.drivers.metrics import Meters
from appliance.drivers.statefile import StateFile

ROOT = Path(__file__).parents[1]


def command(what: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", "testing.children", what, *map(str, arguments)]


def run(what: str, *arguments: object) -> str:
    """What it printed; it must end well."""
    return subprocess.run(
        command(what, *arguments), cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    ).stdout


def run_together(*calls: tuple[object, ...]) -> None:
    """All at the same time; all must end well."""
    running = [subprocess.Popen(command(str(call[0]), *call[1:]), cwd=ROOT) for call in calls]
    assert [process.wait(timeout=60) for process in running] == [0] * len(calls)


def now() -> str:
    return "2026-01-02T03:04:05.678Z"


def file_at(path: str) -> StateFile:
    return StateFile(path, now, lambda message: print(message, file=sys.stderr, flush=True))


def seeded(before: State, *names: str) -> State:
    """A change that nobody else makes: cheap to make, easy to find again."""
    return replace(before, seeded=before.seeded | set(names))


def add_names(path: str, who: str, count: str) -> None:
    """``count`` updates, each with a name of its own."""
    for number in range(int(count)):
        file_at(path).update(lambda before, number=number: seeded(before, f"{who}-{number}"))


def update_for_ever(path: str, acknowledge: int) -> None:
    """Changes of about 20 kB, and each generation told once `update` has returned."""
    padding = [f"padding-{number:050}" for number in range(300)]
    while True:
        after = file_at(path).update(lambda old: replace(old, seeded=frozenset([*padding, str(old.generation)]))).after
        os.write(acknowledge, f"{after.generation}\n".encode())


def kill_writers(path: str, rounds: str) -> None:
    """Kill a writer ``rounds`` times at a random moment; after each, print "acknowledged found" generations."""
    choice, told = random.Random(7), 0
    for _ in range(int(rounds)):
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            update_for_ever(path, writing)
        os.close(writing)
        select.select([reading], [], [], 10)  # it works; now it may die
        time.sleep(choice.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reading) as pipe:
            told = max([told, *(int(line) for line in pipe.read().splitlines() if line)])
        found = state_toml.load(tomllib.loads(Path(path).read_text(encoding="utf-8")))  # the file itself, no fall-back
        print(told, found.generation, file_at(path).read().generation, flush=True)


def update_on_a_full_disk(path: str, largest: str) -> None:
    """No file may grow beyond ``largest`` bytes: the kernel refuses the write, as a full disk does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest), int(largest)))
    try:
        file_at(path).update(lambda before: seeded(before, *(f"name-{number}" for number in range(1000))))
    except Problem as problem:
        print(problem.kind, problem.code)


def count_on_a_full_disk(folder: str) -> None:
    """Many series while a file takes all other space of the disk, and one more when it is gone."""
    metrics.ROOM_AGAIN_SECS = 0.0
    meters = Meters(Path(folder), "test")
    filler = Path(folder, "filler")
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    for number in range(600):
        meters.durations.labels("Embed", f"n{number}").observe(0.1)
    filler.unlink()
    meters.durations.labels("Embed", "n599").observe(0.1)


def record_events(path: str, who: str, count: str) -> None:
    for number in range(int(count)):
        journal: Journal[str] = Journal(path, now)
        journal.record("tested", who, f"{number}")


def count(folder: str, program: str, *instances: str) -> None:
    """Something of each kind for each of the instances, the empty name included."""
    meters = Meters(Path(folder), program)
    for name in filter(None, instances):
        meters.event("created", name, {"model": "m"})
        meters.event("deleted", name, {})
        meters.event("died", name, {})
        meters.failures.labels(name).inc()
    for name in instances:
        meters.calls.labels("Embed", name, "OK").inc()
        meters.durations.labels("Embed", name).observe(0.1)


def begin(folder: str, program: str, *instances: str) -> None:
    meters = Meters(Path(folder), program)
    for name in instances:
        meters.begin(name)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
