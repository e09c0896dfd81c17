"""An instance is replaced again and again, under load, and while what takes part in it is killed at each step.

Callers ask again and again, in all ways, each with a minute of patience. Each reply is of one generation as a whole,
and none fails, but for those that were in work where there is nobody to repeat them. Afterwards one generation is
there, and no process or port too many.
"""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import requests

from testing.agreement import disagreements, supervised, wait_for_agreement
from testing.callers import Call, Callers, kill
from testing.calling import over_grpc
from testing.random_models import random_model
from testing.running import TINY, TINY_WIDTH, RunningAppliance, eventually

pytestmark = [pytest.mark.faults, pytest.mark.processes]
OTHER_WIDTH = 64
WIDTHS = {TINY_WIDTH, OTHER_WIDTH}
SETTLED_SECS = 60.0
CALLERS = 2  # of each way


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose vectors have another width."""
    return str(random_model(tmp_path_factory.mktemp("other") / "other", width=OTHER_WIDTH, layers=1, positions=64))


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    with RunningAppliance(tmp_path_factory.mktemp("box"), seeds="") as running:
        yield running


def patch(box: RunningAppliance, name: str, model: str, strategy: str) -> requests.Response:
    query = {"allow_incompatible": "true", "strategy": strategy}
    return requests.patch(f"{box.url}/instances/{name}", json={"model_id": model}, params=query, timeout=60)


def is_done(box: RunningAppliance, name: str) -> bool:
    """Whether all is over, but for what is kept for an undo."""
    instance = box.instance(name)
    return not instance["replacement"] and instance["replicas_ready"] == instance["replicas"]


# -- under load --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["beside", "in_place"])
@pytest.mark.parametrize(
    ("swaps", "calls_each"),
    [pytest.param(100, 1000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])],
    ids=["hundred"],
)
def test_no_call_fails(box: RunningAppliance, other: str, strategy: str, swaps: int, calls_each: int) -> None:
    """calls_each: from one replacement to the next. Every fifth is undone, and the undo as well."""
    name = f"swapped-{strategy.replace('_', '-')}"
    box.create(name, undo_secs=1)
    box.wait_ready(name)
    calls, took = list[Call](), list[float]()
    crowd = [Callers(box, [name], WIDTHS, seed, pause_secs=0) for seed in range(CALLERS)]
    for each in crowd:
        each.__enter__()
    try:
        for number in range(swaps):
            began = time.monotonic()
            assert patch(box, name, other if number % 2 == 0 else TINY, strategy).status_code == 200
            eventually(lambda: is_done(box, name), 120)
            took.append(time.monotonic() - began)
            eventually(lambda number=number: made(crowd) >= (number + 1) * calls_each, 300)
            if number % 5 == 4:
                for _ in range(2):
                    assert box.post(f"/instances/{name}/undo?strategy={strategy}").status_code == 200
                    eventually(lambda: is_done(box, name), 120)
    finally:
        for each in crowd:
            each.__exit__()
            calls += each.calls
    failed = [call for call in calls if call.failure]
    by_way = {way: sum(call.way == way for call in calls) for way in sorted({call.way for call in calls})}
    longest = max(call.secs for call in calls)
    print(
        f"\n{strategy}: {swaps} swaps of {sorted(took)[swaps // 2]:.1f} s (median), {len(calls)} calls {by_way}, ",
        end="",
    )
    print(f"{len(failed)} failed, longest {longest:.2f} s")
    assert failed == []
    wait_for_agreement(box, box.node_id())


def made(crowd: list[Callers]) -> int:
    """Calls that have ended."""
    return sum(len(each.calls) for each in crowd)


# -- faults at each step -----------------------------------------------------------------------------------------------


def replaced(box: RunningAppliance, name: str, model: str) -> None:
    """The request may break off with control; then what it asked for holds, or not."""
    try:
        answer = patch(box, name, model, "beside")
        assert answer.status_code in (200, 409, 503), answer.text
    except requests.RequestException:
        eventually(lambda: box.get("/ready").status_code == 200)


def asked(box: RunningAppliance, name: str, model: str) -> None:
    """Right behind the answer."""
    replaced(box, name, model)


def loading(box: RunningAppliance, name: str, model: str) -> None:
    """The successor has a process, and does not answer yet."""
    replaced(box, name, model)
    eventually(lambda: successors(box, name) or is_done(box, name), every=0.005)


def taken_over(box: RunningAppliance, name: str, model: str) -> None:
    """In the moment in which the next generation is called."""
    before = box.instance(name)["generation"]
    replaced(box, name, model)
    eventually(lambda: box.instance(name)["generation"] != before, every=0.01)


def undone(box: RunningAppliance, name: str, model: str) -> None:
    """In the moment in which the one before is called again."""
    taken_over(box, name, model)
    assert box.post(f"/instances/{name}/undo").status_code == 200


def released(box: RunningAppliance, name: str, model: str) -> None:
    """While the processes end that were kept for an undo."""
    taken_over(box, name, model)
    eventually(lambda: box.instance(name)["undo"]["ready_until"] is None, every=0.01)


STEPS: list[Callable[[RunningAppliance, str, str], None]] = [asked, loading, taken_over, undone, released]


def successors(box: RunningAppliance, name: str) -> list[psutil.Process]:
    state = box.node().state.read().get(name)
    launch = state.successor.launch if state.successor else 0
    return [each for each in box.processes_of(name) if launch_of(each) == launch]


def launch_of(process: psutil.Process) -> int:
    try:
        return int(process.environ()["TEI_APPLIANCE_REPLICA"].rpartition(":")[2])
    except (psutil.Error, KeyError):
        return -1


def program(box: RunningAppliance, name: str) -> psutil.Process:
    return psutil.Process(eventually(lambda: next(each["pid"] for each in supervised(box) if each["name"] == name)))


def called(box: RunningAppliance, name: str) -> list[psutil.Process]:
    launch = box.node().state.read().get(name).launch
    return [each for each in box.processes_of(name) if launch_of(each) == launch]


def besides(box: RunningAppliance, name: str) -> list[psutil.Process]:
    """The successor, or what is kept for an undo."""
    launch = box.node().state.read().get(name).launch
    return [each for each in box.processes_of(name) if launch_of(each) != launch]


VICTIMS: dict[str, Callable[[RunningAppliance, str], list[psutil.Process]]] = {
    "control": lambda box, name: [program(box, "control")],
    "worker": lambda box, name: program(box, "control").children()[:1],
    "monitor": lambda box, name: [program(box, "monitor")],
    "multiplexer": lambda box, name: [program(box, "multiplexer-0")],
    "called": called,
    "beside": besides,
    "all engines": lambda box, name: box.processes_of(name),
}


class Trial(NamedTuple):
    step: Callable[[RunningAppliance, str, str], None]
    victim: str


EVERY = [Trial(step, victim) for step in STEPS for victim in VICTIMS]
QUICK = [
    Trial(asked, "control"),
    Trial(loading, "beside"),
    Trial(taken_over, "monitor"),
    Trial(undone, "all engines"),
    Trial(released, "multiplexer"),
]


@pytest.mark.parametrize(
    "trials", [QUICK, pytest.param(EVERY, marks=[pytest.mark.long, pytest.mark.timeout(1800)])], ids=["some", "all"]
)
@pytest.mark.timeout(300)
def test_whoever_is_killed_at_whatever_step_one_generation_is_left(
    box: RunningAppliance, other: str, trials: list[Trial]
) -> None:
    chance, rows, wrong = random.Random(5), list[str](), list[Any]()
    for number, trial in enumerate(trials):
        name = f"trial-{trial.step.__name__.replace('_', '-')}-{number}"
        box.create(name, undo_secs=2)
        box.wait_ready(name)
        with Callers(box, [name], WIDTHS, seed=chance.randrange(1000)) as callers:
            trial.step(box, name, other)
            killed = VICTIMS[trial.victim](box, name)
            for process in killed:
                kill(process)
            eventually(lambda name=name: is_done(box, name), SETTLED_SECS)
            before = len(callers.calls)
            eventually(lambda before=before, callers=callers: len(callers.calls) > before + 4, SETTLED_SECS)
        settled = wait_for_agreement(box, box.node_id())
        failed = [call for call in callers.calls if call.failure and not excused(call, trial)]
        instance = box.instance(name)
        width = {TINY: TINY_WIDTH, other: OTHER_WIDTH}[instance["model_id"]]
        if failed or over_grpc(box, name) != width:
            wrong.append((trial.step.__name__, trial.victim, failed[:3]))
        longest = max(call.secs for call in callers.calls)
        rows.append(
            f"{trial.step.__name__:12} {trial.victim:12} {len(killed):6} {len(callers.calls):6} {len(failed):6} "
            f"{longest:9.2f} {settled:9.1f}  {'other' if instance['model_id'] == other else 'as before'}"
        )
        assert box.delete(f"/instances/{name}").status_code == 200
    print("\nstep         killed       number  calls failed longest s settled s  it is", *rows, sep="\n")
    assert wrong == []
    assert disagreements(box, box.node_id()) == []
    eventually(lambda: not list((Path(box.folder) / "logs").glob("trial-*")), 90)  # the monitor looks once a minute


def excused(call: Call, trial: Trial) -> bool:
    """A caller's own connection ends with the multiplexer that he is connected to; and a call in work at the only
    replica is not repeated where that dies: it may be what ended it (docs/operations.md)."""
    assert call.failure
    if trial.victim == "multiplexer":
        return call.failure.is_broken_connection
    was_in_work = call.failure.kind in ("UNAVAILABLE", "503") and "does not answer, see its logs" in call.failure.words
    return trial.victim in ("called", "all engines") and was_in_work
