"""Instances take turns in too little memory while what is around them is killed, restarted, deleted and put to sleep.

Callers ask random instances again and again, each with a minute of patience. Whatever happens meanwhile, every call is
answered, but for those of an instance that an operator had taken away at that moment, and those whose own connection
broke. At the end a table of faults, calls and longest waits is printed: `pytest -s`.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import requests

from appliance.core.instance import CAST
from appliance.core.program import MARKER
from appliance.drivers import activityfile, ports, processes
from testing.agreement import alive, disagreements, replicas_alive, state_of, supervised
from testing.callers import Call, Callers, kill
from testing.calling import PATIENT_SECS, over_grpc
from testing.room import Looks, setting_for
from testing.running import TINY, TINY_WIDTH, RunningAppliance, eventually

pytestmark = [pytest.mark.faults, pytest.mark.processes]
ROOM = 2
NAMES = ["m0", "m1", "m2", "m3", "m4"]
BETWEEN_FAULTS = (0.0, 1.0)  # seconds
CALLS_PER_FAULT = 3  # so many end before the next one
SETTLED_SECS = 30.0  # after the last call
MOST_DEATHS = 4  # of an instance: five within ten minutes are a crash loop, which is quarantined
MEASURED_SECS = 6.0  # the monitor looks at least every five seconds
AGAIN_SECS = 40.0  # an operator tries again for so long
AWAY = {"NOT_FOUND", "FAILED_PRECONDITION", "404", "503"}  # what is said of an instance that was deleted or stopped
GONE = {"UNAVAILABLE", "503", "ConnectionError"}  # and where no program is left


# -- faults ------------------------------------------------------------------------------------------------------------


class Away(NamedTuple):
    """For so long calls may fail. what: an instance, or one of the words below."""

    began: float
    ended: float
    what: str


CONNECTIONS, EVERYTHING = "connections to a multiplexer", "everything"


@dataclass
class Trial:
    """An appliance that is broken, and what may be excused by it."""

    box: RunningAppliance
    chance: random.Random
    node_id: str
    deaths: Counter[str] = field(default_factory=Counter)  # of instances, by us
    away: list[Away] = field(default_factory=list)

    def program(self, name: str) -> list[psutil.Process]:
        """The processes of one program of the cast: the master first. Waits until it runs."""
        pid = eventually(lambda: next(each["pid"] for each in supervised(self.box) if each["name"] == name))
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]

    def instance(self) -> str:
        return self.chance.choice(NAMES)

    @contextmanager
    def excused(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.away.append(Away(began, time.monotonic(), what))

    def told(self, accepted: set[int], verb: Callable[..., requests.Response], *arguments: Any) -> None:
        """An operator's request, again until control has answered as one of ``accepted``: it may have been killed."""

        def answered() -> bool:
            reply = verb(*arguments)
            assert reply.status_code in accepted, f"{arguments}: {reply.status_code} {reply.text}"
            return True

        eventually(answered, AGAIN_SECS, every=0.1)

    def engines(self, listening: bool) -> list[tuple[str, psutil.Process]]:
        """Those whose port is open, or not yet; none that has died too often."""
        ports_of = {name: instance.ports[0] for name, instance in state_of(self.box).instances.items()}
        return [
            (name, process)
            for (name, _), pairs in sorted(replicas_alive(self.node_id).items())
            for process, _ in pairs
            if self.deaths[name] < MOST_DEATHS and ports.answers("127.0.0.1", ports_of[name]) is listening
        ]

    def kill_engine(self, listening: bool) -> None:
        name, process = self.chance.choice(eventually(lambda: self.engines(listening), every=0.02))
        self.deaths[name] += 1
        kill(process)


def control_killed(trial: Trial) -> None:
    kill(trial.program("control")[0])


def control_worker_killed(trial: Trial) -> None:
    kill(trial.chance.choice(eventually(lambda: trial.program("control")[1:])))


def control_restarted(trial: Trial) -> None:
    trial.box.supervisorctl("restart", "control:*")


def monitor_killed(trial: Trial) -> None:
    kill(trial.program("monitor")[0])


def multiplexer_killed(trial: Trial) -> None:
    process = trial.program("multiplexer-0")[0]
    with trial.excused(CONNECTIONS):
        kill(process)
        process.wait(10)


def waking_engine_killed(trial: Trial) -> None:
    trial.kill_engine(listening=False)


def running_engine_killed(trial: Trial) -> None:
    trial.kill_engine(listening=True)


def deleted_and_created(trial: Trial) -> None:
    name = trial.instance()
    with trial.excused(name):
        trial.told({200, 404}, trial.box.delete, f"/instances/{name}")
        created = {"name": name, "model_id": TINY, "start": "on_demand"}
        trial.told({201, 409}, trial.box.post, "/instances", created)


def stopped_and_started(trial: Trial) -> None:
    name = trial.instance()
    with trial.excused(name):
        trial.told({200}, trial.box.post, f"/instances/{name}/stop")
        trial.told({200, 409}, trial.box.post, f"/instances/{name}/start")


def put_to_sleep_and_woken(trial: Trial) -> None:
    """Where all others are in use the wake is refused: a call gets its turn later."""
    name = trial.instance()
    trial.told({200}, trial.box.post, f"/instances/{name}/sleep")
    trial.told({200, 503}, trial.box.post, f"/instances/{name}/wake")


def supervisord_killed(trial: Trial) -> None:
    """It takes everything with it, and `appliance up` ends: somebody starts that again."""
    box = trial.box
    assert box.process is not None
    with trial.excused(EVERYTHING):
        (process,) = psutil.Process(box.process.pid).children()
        kill(process)
        assert box.process.wait(timeout=60) == 1
        assert box.left_over() == []
        box.up()


QUICK = [
    control_killed,
    control_worker_killed,
    control_restarted,
    monitor_killed,
    multiplexer_killed,
    waking_engine_killed,
    running_engine_killed,
    deleted_and_created,
    stopped_and_started,
    put_to_sleep_and_woken,
]


# -- afterwards --------------------------------------------------------------------------------------------------------


def is_excused(call: Call, away: list[Away]) -> bool:
    """Whether what failed had to: its instance was away at that moment, or its own connection broke."""
    assert call.failure
    kind, _, words = call.failure
    broke = call.failure.is_broken_connection
    refused = kind in AWAY and call.instance in words
    reasons = {CONNECTIONS: broke, EVERYTHING: kind in GONE, call.instance: refused}
    return any(reasons.get(each.what, False) for each in away if call.overlaps(each.began, each.ended))


def unsettled(trial: Trial) -> list[str]:
    """What is not as it should be where nobody calls."""
    box = trial.box
    wrong = disagreements(box, trial.node_id)
    uses = activityfile.uses(Path(box.node().layout.activity))
    wrong += [f"{name} is said to have calls" for name, use in uses.items() if use.busy]
    instances = state_of(box).instances.values()
    wrong += [f"{each.name} is quarantined or ejected" for each in instances if each.quarantined or each.ejected]
    assert box.process is not None
    ours = {each.pid for each in psutil.Process(box.process.pid).children(recursive=True)}
    left = [each for each, _ in processes.marked(MARKER, f"{trial.node_id}:", except_under=()) if alive(each)]
    wrong += [f"left over: {each}" for each in left if each.pid not in ours]
    running = {each["group"] for each in supervised(box) if each["statename"] == "RUNNING"}
    return wrong + [f"{each} does not run" for each in CAST if each not in running]


def settle(trial: Trial) -> float:
    """Seconds until everything agrees."""
    began = time.monotonic()
    while wrong := unsettled_or_error(trial):
        assert time.monotonic() - began < SETTLED_SECS, wrong
        time.sleep(0.2)
    return time.monotonic() - began


def unsettled_or_error(trial: Trial) -> list[str]:
    try:
        return unsettled(trial)
    except (OSError, requests.RequestException, psutil.Error) as error:
        return [repr(error)]


def table(done: list[tuple[str, float]], calls: list[Call]) -> None:
    """A call counts for the last fault that began before it ended."""
    rows = {name: [0, 0, 0, 0.0] for name, _ in done}
    for name, _ in done:
        rows[name][0] += 1
    for call in calls:
        name = next((name for name, at in reversed(done) if at <= call.ended), done[0][0])
        row = rows[name]
        row[1] += 1
        row[2] += call.failure is not None
        row[3] = max(row[3], call.secs)
    print(f"\n{'fault':24} {'times':>5} {'calls':>6} {'failed':>6} {'longest s':>9}")
    for name, (times, count, failed, longest) in rows.items():
        print(f"{name:24} {times:5} {count:6} {failed:6} {longest:9.2f}")


@pytest.fixture
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    """Of each test its own: deaths are counted for ten minutes."""
    folder = tmp_path_factory.mktemp("faults")
    with RunningAppliance(folder, seeds="", settings=setting_for(folder / "measured", ROOM)) as running:
        for name in NAMES:
            running.create(name, start="on_demand")
        assert over_grpc(running, NAMES[0]) == TINY_WIDTH
        eventually(running.node().memory_needs.read)  # what it takes is estimated until then, and one alone fits
        yield running


def break_and_look(box: RunningAppliance, faults: Sequence[Callable[[Trial], None]], chance: random.Random) -> None:
    trial, done = Trial(box, chance, box.node_id()), list[tuple[str, float]]()
    with Looks(trial.node_id, ROOM) as looks:
        with Callers(box, NAMES, {TINY_WIDTH}, seed=chance.randrange(1000)) as callers:
            for fault in faults:
                time.sleep(chance.uniform(*BETWEEN_FAULTS))
                done.append((fault.__name__, time.monotonic()))
                before = len(callers.calls)
                fault(trial)
                eventually(lambda before=before: len(callers.calls) >= before + CALLS_PER_FAULT, 2 * PATIENT_SECS)
        settled = settle(trial)
        answered = [over_grpc(box, name) for name in NAMES]
    table(done, callers.calls)
    failed = [call for call in callers.calls if call.failure]
    for call in failed:
        print(f"{call.way} {call.instance}, {call.secs:.2f} s: {call.failure}"[:400])
    print(f"{len(failed)} of {len(callers.calls)} failed; most loaded: {looks.most}; settled after {settled:.1f} s")
    assert [call for call in failed if not is_excused(call, trial.away)] == []
    assert looks.wrong == []
    assert answered == [TINY_WIDTH] * len(NAMES)


def test_what_an_instance_takes_is_not_measured_while_it_loads(tmp_path: Path) -> None:
    """Too little would be known, and more be loaded at once than there is room for."""
    with RunningAppliance(tmp_path, seeds="", settings="health_check_interval_secs = 1") as box:
        box.create("slow")
        (process,) = eventually(lambda: box.processes_of("slow"), every=0.01)
        process.suspend()
        try:
            time.sleep(MEASURED_SECS)
            assert box.node().memory_needs.read() == {}
        finally:
            process.resume()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_each_fault_once_costs_no_call(box: RunningAppliance) -> None:
    chance = random.Random(3)
    break_and_look(box, chance.sample(QUICK, len(QUICK)), chance)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_all_faults_again_and_again_cost_no_call(box: RunningAppliance) -> None:
    """So often that no instance dies as often as one in a crash loop."""
    chance, rounds = random.Random(4), MOST_DEATHS * len(NAMES) // 2 - 2
    faults = [fault for _ in range(rounds) for fault in chance.sample([*QUICK, supervisord_killed], len(QUICK) + 1)]
    break_and_look(box, faults, chance)
