"""Instances that sleep: the next call wakes them, and is answered; nobody who can wait is refused."""

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import requests

from appliance.drivers.controlsocket import WAITING_SINCE
from appliance.wire.envelope import CACHE_KEY, CODE_KEY, RETRY_KEY
from testing.calling import PATIENT_SECS, WAYS, embed, new_text, over_arrow, over_grpc, over_http, request
from testing.room import setting_for
from testing.running import TINY, TINY_WIDTH, RunningAppliance, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300)]


def events(box: RunningAppliance, name: str) -> list[str]:
    return [each["event"] for each in box.get("/events").json() if each["instance"] == name]


def loaded(box: RunningAppliance, name: str) -> int:
    return len(box.processes_of(name))


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    with RunningAppliance(tmp_path_factory.mktemp("box"), seeds="", cache=True) as running:
        yield running


def test_one_on_demand_starts_with_its_first_call(box: RunningAppliance) -> None:
    created = box.create("demand", start="on_demand")
    assert created["status"] == "sleeping"
    assert not loaded(box, "demand")
    assert over_grpc(box, "demand") == TINY_WIDTH
    assert box.instance("demand")["status"] == "running"
    assert events(box, "demand")[:2] == ["created", "woken"]


def test_since_when_a_call_waits_is_believed_of_multiplexers_alone(box: RunningAppliance) -> None:
    box.create("told", start="on_demand")
    woken = box.post("/instances/told/wake", headers={WAITING_SINCE: "nonsense"})
    assert woken.status_code == 200, woken.text


@pytest.mark.parametrize("way", WAYS)
def test_a_call_wakes_what_sleeps(box: RunningAppliance, way: Any) -> None:
    name = way.__name__.replace("_", "-")
    box.create(name)
    box.wait_ready(name)
    asleep = box.post(f"/instances/{name}/sleep")
    assert asleep.status_code == 200, asleep.text
    assert asleep.json()["status"] == "sleeping"
    assert not loaded(box, name)
    assert way(box, name) == TINY_WIDTH
    assert [each for each in events(box, name) if each in ("slept", "woken")] == ["slept", "woken"]
    assert box.delete(f"/instances/{name}").status_code == 200


def test_a_call_for_one_that_starts_waits_until_it_answers(box: RunningAppliance) -> None:
    """Sixteen calls follow the creation at once: none of them is refused, on any way."""
    box.create("early")
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda number: WAYS[number % 4](box, "early"), range(16)))
    assert answers == [TINY_WIDTH] * 16


def test_a_call_during_a_restart_waits_for_the_new_process(box: RunningAppliance) -> None:
    box.create("again")
    box.wait_ready("again")
    for way in WAYS:
        assert box.post("/instances/again/restart").status_code == 200
        assert way(box, "again") == TINY_WIDTH


def test_what_is_cached_wakes_nobody(box: RunningAppliance) -> None:
    box.create("kept", start="on_demand")
    first = embed(box, "kept", "to be kept")
    eventually(lambda: found_in_cache(box, "kept", "to be kept"))
    assert box.post("/instances/kept/sleep").json()["status"] == "sleeping"
    again, call = box.stub().Embed.with_call(request("kept", "to be kept"), timeout=PATIENT_SECS)
    assert (CACHE_KEY, "hit") in call.initial_metadata()
    assert np.array_equal(first.embeddings, again.embeddings)
    assert box.instance("kept")["status"] == "sleeping"


def found_in_cache(box: RunningAppliance, name: str, text: str) -> bool:
    _, call = box.stub().Embed.with_call(request(name, text), timeout=PATIENT_SECS)
    return (CACHE_KEY, "hit") in call.initial_metadata()


def test_a_call_that_cannot_wait_is_told_for_how_long_the_model_loads(box: RunningAppliance) -> None:
    box.create("slow")
    box.wait_ready("slow")
    load_secs = eventually(lambda: box.instance("slow")["load_secs"])
    assert 0 < load_secs < 60
    assert box.post("/instances/slow/sleep").status_code == 200
    load_secs = max(load_secs, box.instance("slow")["load_secs"])  # the first may be of another of this model
    with pytest.raises(grpc.RpcError) as refused:
        embed(box, "slow", new_text(), timeout=load_secs / 10)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    trailing = dict(refused.value.trailing_metadata())
    assert trailing[CODE_KEY] == "SLEEPING"
    assert 0 < int(trailing[RETRY_KEY]) <= load_secs * 1000
    time.sleep(int(trailing[RETRY_KEY]) / 1000)  # it has been woken all the same
    assert over_grpc(box, "slow") == TINY_WIDTH


def test_who_is_waited_for_and_stopped_or_deleted_refuses(box: RunningAppliance) -> None:
    codes = {"stopped": grpc.StatusCode.FAILED_PRECONDITION, "deleted": grpc.StatusCode.NOT_FOUND}
    for name, code in codes.items():
        box.create(name)
        with ThreadPoolExecutor() as threads:
            calls = [threads.submit(over_grpc, box, name) for _ in range(4)]
            time.sleep(0.2)
            if name == "stopped":
                box.post(f"/instances/{name}/stop")
            else:
                box.delete(f"/instances/{name}")
            for call in calls:
                problem = call.exception(timeout=20)
                assert problem is None or (isinstance(problem, grpc.RpcError) and problem.code() is code), problem


def test_what_makes_no_sense_is_refused(box: RunningAppliance) -> None:
    box.create("halted")
    assert box.post("/instances/halted/stop").status_code == 200
    for verb in ("sleep", "wake"):
        refused = box.post(f"/instances/halted/{verb}")
        assert (refused.status_code, refused.json()["code"]) == (409, "NOT_RUNNING")
    assert box.post("/instances/nobody/wake").status_code == 404
    body = {"name": "both", "model_id": TINY, "express": True, "start": "on_demand"}
    assert "nobody counts" in box.post("/instances", body).json()["error"]


def test_one_that_sleeps_can_be_stopped_and_started(box: RunningAppliance) -> None:
    box.create("halting", start="on_demand")
    assert box.post("/instances/halting/stop").json()["status"] == "stopped"
    with pytest.raises(grpc.RpcError) as refused:
        over_grpc(box, "halting")
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert box.post("/instances/halting/start").status_code == 200
    assert over_grpc(box, "halting") == TINY_WIDTH


def test_it_learns_to_sleep_while_it_runs(box: RunningAppliance) -> None:
    pid = box.create("learns") and box.wait_ready("learns")["pid"]
    assert box.cli("instances", "set", "learns", "idle_unload_secs=1").returncode == 0
    assert box.instance("learns")["pid"] == pid
    eventually(lambda: box.instance("learns")["status"] == "sleeping")


def test_health_checks_keep_nobody_awake(box: RunningAppliance) -> None:
    box.create("watched", idle_unload_secs=1)
    box.wait_ready("watched")
    url = f"http://127.0.0.1:{box.http_port}/instances/watched/health"

    def asleep() -> bool:
        assert requests.get(url, timeout=20).status_code == 200
        return bool(box.instance("watched")["status"] == "sleeping")

    eventually(asleep, 120)  # it is up for three times its load at least, which takes long on a busy machine
    assert requests.get(url, timeout=20).status_code == 200
    assert box.instance("watched")["status"] == "sleeping"


def test_a_call_that_does_not_want_to_wait_is_refused_and_wakes_it(box: RunningAppliance) -> None:
    box.create("brisk", start="on_demand")
    with pytest.raises(grpc.RpcError) as refused:
        box.stub().Embed(request("brisk", new_text()), timeout=PATIENT_SECS, metadata=[("x-tei-wait", "no")])
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    box.wait_ready("brisk")


def test_many_who_wait_leave_the_gateway_to_others(box: RunningAppliance) -> None:
    """An engine that is stopped by a signal while it loads, and 160 requests for it: others are answered at once."""
    box.create("stuck")
    box.create("well")
    box.wait_ready("well")
    box.wait_ready("stuck")
    assert box.post("/instances/stuck/sleep").status_code == 200
    with ThreadPoolExecutor(160) as threads:
        calls = [threads.submit(over_http, box, "stuck") for _ in range(160)]
        (process,) = eventually(lambda: box.processes_of("stuck"))
        process.send_signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            for _ in range(5):
                assert over_http(box, "well") == TINY_WIDTH
            print(f"five calls beside 160 that wait: {time.monotonic() - began:.1f} s")
        finally:
            process.send_signal(signal.SIGCONT)
        answered = sum(call.exception(timeout=90) is None for call in calls)
    assert answered >= 32  # the others were told at once that they had to wait


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_is_lost_with_what_is_put_to_sleep_wakes_it(box: RunningAppliance, way: Any) -> None:
    """It was sent, and a reset tells nothing of whether it was read; but nobody else than us has ended the replica."""
    name = f"lost-{way.__name__.replace('_', '-')}"
    box.create(name, start="on_demand")
    assert way(box, name) == TINY_WIDTH  # over connections that stay
    (engine,) = box.processes_of(name)
    engine.suspend()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(way, box, name)
        time.sleep(0.3)  # it lies where a process would read it
        assert box.post(f"/instances/{name}/sleep").status_code == 200
        assert answer.result() == TINY_WIDTH
    assert box.delete(f"/instances/{name}").status_code == 200


def test_wake_and_sleep_twice_change_nothing(box: RunningAppliance) -> None:
    box.create("twice", start="on_demand")
    assert box.post("/instances/twice/sleep").json()["status"] == "sleeping"
    box.post("/instances/twice/wake")
    (process,) = eventually(lambda: box.processes_of("twice"))
    box.post("/instances/twice/wake")
    box.wait_ready("twice")
    assert [each.pid for each in box.processes_of("twice")] == [process.pid]
    assert events(box, "twice").count("woken") == 1


def test_an_idle_one_sleeps_and_one_in_use_does_not(box: RunningAppliance) -> None:
    box.create("idle", idle_unload_secs=1)
    box.wait_ready("idle")
    until = time.monotonic() + 6
    while time.monotonic() < until:
        over_grpc(box, "idle")
        time.sleep(0.2)
    assert "slept" not in events(box, "idle")
    eventually(lambda: box.instance("idle")["status"] == "sleeping")
    assert over_http(box, "idle") == TINY_WIDTH


def test_one_that_cannot_wake_says_why(box: RunningAppliance, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    box.create("broken", model_id=str(folder), start="on_demand")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(grpc.RpcError) as refused:
        embed(box, "broken", new_text(), timeout=20)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "tokenizer.json" in refused.value.details()


def test_control_may_die_while_a_call_waits(box: RunningAppliance) -> None:
    box.create("orphan", start="on_demand")
    for process in box.processes_of("control"):
        process.send_signal(signal.SIGKILL)
    assert over_arrow(box, "orphan") == TINY_WIDTH


# -- room --------------------------------------------------------------------------------------------------------------

FLEET, ROOM = 6, 2


@pytest.fixture
def room_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """The setting for so many instances. In a folder with a short path: sockets lie in it."""
    return partial(setting_for, tmp_path_factory.mktemp("m") / "d")


def test_more_models_than_memory_take_turns(tmp_path: Path, room_for: Callable[[int], str]) -> None:
    """Nobody is refused, and never more are loaded than there is room for."""
    with RunningAppliance(tmp_path, seeds="", settings=room_for(ROOM)) as box:
        names = [f"m{number}" for number in range(FLEET)]
        for name in names:
            box.create(name, start="on_demand")
        most, ended = [0], threading.Event()
        watcher = threading.Thread(target=watch, args=(box, names, most, ended))
        watcher.start()
        try:
            with ThreadPoolExecutor(4) as threads:
                chosen = [names[(7 * number) % FLEET] for number in range(24)]
                assert list(threads.map(partial(over_grpc, box), chosen)) == [TINY_WIDTH] * len(chosen)
        finally:
            ended.set()
            watcher.join()
        assert 1 <= most[0] <= ROOM
        eager = box.post("/instances", {"name": "large", "model_id": TINY, "replicas": 20})
        assert (eager.status_code, eager.json()["code"]) == (422, "INSUFFICIENT_MEMORY")
        assert "large" not in {each["name"] for each in box.get("/instances").json()}


def test_what_gives_way_is_measured_though_the_monitor_never_saw_it(
    tmp_path: Path, room_for: Callable[[int], str]
) -> None:
    """By the estimate only one fits; they take turns so quickly that a monitor would hardly see one that has loaded."""
    never = "health_check_interval_secs = 3600"
    with RunningAppliance(tmp_path, seeds="", settings=f"{room_for(ROOM)}\n{never}") as box:
        for name in ("one", "two", "one"):
            if name not in {each["name"] for each in box.get("/instances").json()}:
                box.create(name, start="on_demand")
            assert over_grpc(box, name) == TINY_WIDTH
        assert loaded(box, "one") == loaded(box, "two") == 1


def test_those_who_wait_for_room_have_it_in_the_order_in_which_they_came(
    tmp_path: Path, room_for: Callable[[int], str]
) -> None:
    """One of them at a time fits beside one that stays. The last one waits for five loads, as long as its caller."""
    settings = f"{room_for(2)}\nhealth_check_interval_secs = 1\ngrpc_request_timeout_secs = 60"
    with RunningAppliance(tmp_path, seeds="", settings=settings) as box:
        box.create("stays")
        eventually(box.node().memory_needs.read)
        names = [f"m{number}" for number in range(FLEET)]
        for name in names:
            box.create(name, start="on_demand")
        answered: list[str] = []

        def ask(name: str) -> None:
            assert over_grpc(box, name) == TINY_WIDTH
            answered.append(name)

        with ThreadPoolExecutor(FLEET) as threads:
            calls = []
            for name in names:
                calls.append(threads.submit(ask, name))
                time.sleep(0.3)
            for call in calls:
                call.result()
        assert answered == names


def watch(box: RunningAppliance, names: list[str], most: list[int], ended: threading.Event) -> None:
    while not ended.wait(0.1):
        most[0] = max(most[0], sum(loaded(box, name) for name in names))
