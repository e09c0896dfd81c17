"""Whether state file, supervisord, processes and REST API say the same, and a watch for double processes."""

import threading
import time
import xmlrpc.client
from collections import defaultdict
from collections.abc import Callable
from types import TracebackType
from typing import Any

import psutil
from supervisor.xmlrpc import SupervisorTransport

from appliance.core.instance import CAST
from appliance.core.program import MARKER
from appliance.core.state import State
from appliance.drivers import processes
from appliance.drivers.statefile import StateFile
from testing.running import RunningAppliance


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def replicas_alive(node_id: str) -> dict[tuple[str, int], list[tuple[psutil.Process, int]]]:
    """(instance, replica) -> its live processes, each with the launch number that it was started for."""
    found = defaultdict(list)
    for process, marker in processes.marked(MARKER, f"{node_id}:", except_under=()):
        _, name, replica, launch = marker.split(":")
        if name not in CAST and alive(process):
            found[name, int(replica)].append((process, int(launch)))
    return dict(found)


def supervised(running: RunningAppliance) -> list[dict[str, Any]]:
    """What supervisord says of all programs, asked with supervisor's own client."""
    transport = SupervisorTransport(None, None, f"unix://{running.folder}/supervisor.sock")
    try:
        found: Any = xmlrpc.client.ServerProxy("http://127.0.0.1", transport).supervisor.getAllProcessInfo()
        return list(found)
    finally:
        transport.close()


def state_of(running: RunningAppliance) -> State:
    return StateFile(running.folder / "state.toml", now=str, on_repair=print).read()


def disagreements(running: RunningAppliance, node_id: str) -> list[str]:
    """What state, supervisord, processes and API tell differently; nothing when all is well."""
    state = state_of(running)
    groups: dict[str, list[Any]] = defaultdict(list)
    for process in supervised(running):
        if process["group"] not in CAST:
            groups[process["group"]].append(process)
    found = replicas_alive(node_id)
    listed = {entry["name"]: entry for entry in running.get("/instances").json()}
    wrong = []
    if not set(state.instances) == set(groups) == set(listed):
        wrong.append(f"names: state {sorted(state.instances)}, supervisor {sorted(groups)}, API {sorted(listed)}")
    for (name, replica), pairs in found.items():
        if name not in state.instances:
            wrong.append(f"orphan of {name}-{replica}: {pairs}")
    for name, instance in state.instances.items():
        if name not in groups or name not in listed:
            continue
        for replica in range(max(each.spec.replicas for each in instance.generations)):
            launches = sorted(launch for _, launch in found.get((name, replica), []))
            wanted = [
                each for each in instance.generations if each.wanted == "running" and replica < each.spec.replicas
            ]
            expected = sorted(each.launch for each in wanted)
            if launches != expected:
                wrong.append(f"{name}-{replica} is wanted {instance.wanted}, launches alive {launches} not {expected}")
        named = {each.process(replica) for each in instance.generations for replica in range(each.spec.replicas)}
        if named != (names := {process["name"] for process in groups[name]}):
            wrong.append(f"{name} has the processes {sorted(named)}, and supervisor {sorted(names)}")
        states = {process["statename"] for process in groups[name]}
        if not states <= ({"STARTING", "RUNNING"} if instance.wanted == "running" else {"STOPPED", "EXITED", "FATAL"}):
            wrong.append(f"{name} is wanted {instance.wanted}, supervisor says {states}")
        rests = "sleeping" if instance.sleeping else "stopped"
        if listed[name]["status"] not in (("starting", "running") if instance.wanted == "running" else (rests,)):
            wrong.append(f"{name} is wanted {instance.wanted}, API says {listed[name]['status']}")
    return wrong


def wait_for_agreement(running: RunningAppliance, node_id: str, timeout: float = 30) -> float:
    """Seconds until everything agrees, now and a moment later."""
    began = time.monotonic()
    while True:
        try:
            wrong = disagreements(running, node_id) or (time.sleep(0.3), disagreements(running, node_id))[1]
        except Exception as error:  # a restarting program is a disagreement, too
            wrong = [repr(error)]
        if not wrong:
            return time.monotonic() - began
        assert time.monotonic() - began < timeout, wrong
        time.sleep(0.1)


class Watch:
    """Looks all the time for two live processes of one replica; use as a context manager."""

    def __init__(self, node_id: str, observe: Callable[[], None] = lambda: None) -> None:
        self.node = node_id
        self.observe = observe
        self.samples = 0
        self.doubles: list[str] = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)

    def look(self) -> None:
        while not self.ended.is_set():
            for key, pairs in replicas_alive(self.node).items():
                # A sweep takes a while: one process may have ended and its successor begun within it.
                still = [pair for pair in pairs if alive(pair[0])]
                if len(still) > 1:
                    self.doubles.append(f"{key}: {[(pair[0].pid, pair[1]) for pair in still]}")
            self.observe()
            self.samples += 1
            self.ended.wait(0.05)

    def __enter__(self) -> "Watch":
        self.thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.ended.set()
        self.thread.join()
        assert not self.doubles or error, f"two processes of one replica: {self.doubles[:5]}"
