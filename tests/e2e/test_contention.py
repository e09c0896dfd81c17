"""Sixteen clients change the same five instances at once: only answers of the contract, never two processes of one
replica, and in the end state, supervisord, processes and API agree and nothing is leaked."""

import os
import random
import threading
import time
from collections import Counter
from itertools import chain

import pytest
import requests

from appliance.drivers import ports
from testing.agreement import Watch, state_of, wait_for_agreement
from testing.running import MINILM, RunningAppliance, eventually

pytestmark = pytest.mark.e2e
SECS = float(os.environ.get("APPLIANCE_CONTENTION_SECS", "8"))
NAMES = [f"inst-{number}" for number in range(5)]
ALLOWED = {
    "create": {201, 409, 422},
    "delete": {200, 404},
    "start": {200, 404, 409},
    "stop": {200, 404, 409},
    "restart": {200, 404},
    "show": {200, 404},
    "list": {200},
}
WEIGHTS = {"create": 4, "delete": 2, "start": 3, "stop": 3, "restart": 1, "show": 2, "list": 1}


def ask(running: RunningAppliance, operation: str, name: str) -> requests.Response:
    match operation:
        case "create":
            return running.post("/instances", {"name": name, "model_id": MINILM})
        case "delete":
            return running.delete(f"/instances/{name}")
        case "show":
            return running.get(f"/instances/{name}")
        case "list":
            return running.get("/instances")
        case _:
            return running.post(f"/instances/{name}/{operation}")


@pytest.mark.timeout(SECS + 120)
def test_sixteen_clients_on_five_names_end_in_agreement(own_appliance: RunningAppliance) -> None:
    running, node = own_appliance, own_appliance.node_id()
    answers: Counter[tuple[str, int]] = Counter()
    strange: list[str] = []
    slowest = dict.fromkeys(ALLOWED, 0.0)
    used: set[int] = set()
    deadline = time.monotonic() + SECS

    def remember_ports() -> None:
        for instance in state_of(running).instances.values():
            used.update(chain(instance.ports, instance.prometheus_ports))

    def client(seed: int) -> None:
        choice = random.Random(seed)
        while time.monotonic() < deadline:
            name = choice.choice(NAMES)
            operation = choice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            began = time.monotonic()
            try:
                response = ask(running, operation, name)
            except Exception as error:
                strange.append(f"{operation} {name}: {error!r}")
                continue
            slowest[operation] = max(slowest[operation], time.monotonic() - began)
            answers[operation, response.status_code] += 1
            if response.status_code not in ALLOWED[operation]:
                strange.append(f"{operation} {name}: {response.status_code} {response.text[:300]}")

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(16)]
    with Watch(node, remember_ports) as watch:
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        print(f"{sum(answers.values())} answers in {SECS:.0f} s: {dict(sorted(answers.items()))}")
        print("slowest:", {operation: f"{secs:.2f} s" for operation, secs in slowest.items()})
        took = wait_for_agreement(running, node, timeout=60)
        print(f"agreement {took:.2f} s after the last answer; {watch.samples} samples of the process table")
        for name in state_of(running).instances:
            assert running.delete(f"/instances/{name}").status_code == 200
        assert wait_for_agreement(running, node) < 30
    assert not strange, (len(strange), strange[:5])
    assert running.get("/instances").json() == []
    assert used
    fds = {process.pid: process.num_fds() for process in running.left_over()}
    print("open files of the cast afterwards:", fds)
    assert max(fds.values()) < 200
    eventually(lambda: not ports.busy(used, "127.0.0.1"), timeout=5)
    assert {each.environ()["TEI_APPLIANCE_REPLICA"].split(":")[1] for each in running.left_over()} == {
        "control",
        "multiplexer",
        "gateway",
        "monitor",
    }
    # Nothing is used up: the names and the first port can be taken again.
    assert running.create(NAMES[0])["port"] == running.instance_ports[0]
    running.wait_ready(NAMES[0])
