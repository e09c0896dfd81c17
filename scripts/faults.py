"""`make faults`: kill -9 of any process of a busy appliance, again and again, and whether everything comes back.

    python scripts/faults.py [kills] [seed]

Two instances answer single texts all the time, and a client creates and deletes a third. After each kill everything
that is wanted must answer again, state, supervisord, processes and API must agree, and only calls that needed the
killed process may have failed. Exit status 1 if anything was violated.
"""

import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import requests

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from appliance.core.instance import CAST  # noqa: E402
from appliance.core.program import MARKER  # noqa: E402
from appliance.drivers import processes  # noqa: E402
from appliance.drivers.statefile import UNREADABLE, StateFile  # noqa: E402
from appliance.wire.tei.v1 import tei_pb2 as tei  # noqa: E402
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux  # noqa: E402
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub  # noqa: E402
from testing.agreement import Watch, disagreements, state_of, supervised  # noqa: E402
from testing.engines import FAMILIES  # noqa: E402
from testing.running import RunningAppliance  # noqa: E402

MODEL = str(FAMILIES / "bert-cls")
REPLICAS = {"one": 1, "two": 2}
BACK_SECS = 90.0
BETWEEN_KILLS = (1.0, 3.0)  # seconds; a returned replica takes traffic within one
BETWEEN_CHANGES = (0.0, 3.0)
EAGER = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500))


class Load:
    """Single texts to one instance, one after the other, with every failure and every wrong vector."""

    def __init__(self, running: RunningAppliance, name: str, ended: threading.Event) -> None:
        self.running, self.name, self.ended = running, name, ended
        self.answered = 0
        self.failures: list[str] = []
        self.wrong = 0
        self.thread = threading.Thread(target=self.call, daemon=True)

    def call(self) -> None:
        target, right = mux.Target(instance_name=self.name), None
        request = mux.EmbedRequest(target=target, request=tei.EmbedRequest(inputs="river", normalize=True))
        with grpc.insecure_channel(f"127.0.0.1:{self.running.grpc_port}", EAGER) as channel:
            stub = TeiMultiplexerStub(channel)
            while not self.ended.wait(0.05):
                try:
                    vector = list(stub.Embed(request, timeout=20).embeddings)
                except grpc.RpcError as error:
                    self.failures.append(f"{error.code().name}: {error.details()}")
                    continue
                right = right or vector
                self.answered += 1
                self.wrong += max(abs(a - b) for a, b in zip(vector, right, strict=True)) > 1e-4


class Changes:
    """A client that creates and deletes instances, and knows which of its changes were acknowledged."""

    def __init__(self, running: RunningAppliance, choice: random.Random, ended: threading.Event) -> None:
        self.running, self.choice, self.ended = running, choice, ended
        self.going = threading.Event()  # cleared while a recovery is measured
        self.changing = threading.Lock()
        self.exists: dict[str, bool] = {}
        self.unanswered: set[str] = set()
        self.acknowledged = 0
        self.refused: list[str] = []
        self.thread = threading.Thread(target=self.change, daemon=True)

    def change(self) -> None:
        while not self.ended.wait(self.choice.uniform(*BETWEEN_CHANGES)):
            self.going.wait()
            with self.changing:
                here = [name for name, exists in self.exists.items() if exists and name not in self.unanswered]
                name = here[0] if here else f"extra{len(self.exists)}"
                self.exists.setdefault(name, False)
                try:
                    if here:
                        answer = self.running.delete(f"/instances/{name}")
                    else:
                        answer = self.running.post("/instances", {"name": name, "model_id": MODEL})
                except requests.RequestException:
                    self.unanswered.add(name)
                    continue
                if answer.status_code in (200, 201):
                    self.exists[name] = not here
                    self.acknowledged += 1
                elif answer.status_code == 503:
                    self.unanswered.add(name)
                else:
                    self.refused.append(f"{name}: {answer.status_code} {answer.text}")

    @contextmanager
    def halted(self) -> Iterator[None]:
        """No change is under way and none begins."""
        self.going.clear()
        with self.changing:
            yield
        self.going.set()

    def lost(self) -> list[str]:
        """Acknowledged changes that the state does not have; what was not acknowledged may be either. When halted."""
        instances = state_of(self.running).instances
        wrong = [
            f'"{name}" was {"created" if exists else "deleted"}, acknowledged, and lost'
            for name, exists in self.exists.items()
            if name not in self.unanswered and (name in instances) != exists
        ]
        self.exists = {name: name in instances for name in self.exists}
        self.unanswered.clear()
        return wrong


def victims(running: RunningAppliance, node_id: str) -> dict[str, list[psutil.Process]]:
    """Every process that may be killed, under the name that the table has."""
    assert running.process is not None
    (supervisord,) = psutil.Process(running.process.pid).children()
    by_name = defaultdict(list, {"supervisord": [supervisord]})
    for process, marker in processes.marked(MARKER, f"{node_id}:", except_under=()):
        _, name, replica, _ = marker.split(":")
        try:
            worker = process.ppid() != supervisord.pid
        except psutil.NoSuchProcess:
            continue
        if name in CAST:
            by_name[f"{name}, a worker" if worker else name].append(process)
        else:
            by_name[f"{name}-{replica}" if name in REPLICAS else "extra"].append(process)
    return by_name


def not_back(running: RunningAppliance, node_id: str) -> list[str]:
    """What does not answer, or is not as it should be, at this moment."""
    try:
        if running.get("/ready").status_code != 200:
            return ["control is not ready"]
        wrong = disagreements(running, node_id)
        wrong += [f"{each['name']} is {each['statename']}" for each in supervised(running) if not runs(each)]
        for each in running.get("/instances").json():
            if each["replicas_ready"] != each["replicas"]:
                wrong.append(f"{each['name']} has {each['replicas_ready']} of {each['replicas']} replicas")
        for name in () if wrong else REPLICAS:
            url = f"http://127.0.0.1:{running.http_port}/instances/{name}/embed"
            answer = requests.post(url, json={"inputs": "river"}, timeout=20)  # through gateway and multiplexer
            if answer.status_code != 200:
                wrong.append(f"gateway, {name}: {answer.status_code} {answer.text}")
        return wrong + leaks(running, node_id)
    except (OSError, requests.RequestException, psutil.Error) as error:
        return [repr(error)]


def runs(process: dict[str, object]) -> bool:
    return process["group"] not in CAST or process["statename"] == "RUNNING"


def leaks(running: RunningAppliance, node_id: str) -> list[str]:
    """An unreadable state file, zombies below `appliance up`, and processes that listen on ports of no instance."""
    assert running.process is not None
    wrong = []
    try:
        path = running.folder / "state.toml"
        StateFile(path, now=str, on_repair=print).parsed(path)
    except UNREADABLE as error:
        wrong.append(f"the state file does not parse: {error}")
    below = psutil.Process(running.process.pid).children(recursive=True)
    wrong += [f"zombie {process.pid}" for process in below if process.status() == psutil.STATUS_ZOMBIE]
    assigned = {running.api_port, running.grpc_port, running.http_port, *state_of(running).taken_ports}
    for process, marker in processes.marked(MARKER, f"{node_id}:", except_under=()):
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port not in assigned:
                wrong.append(f"{marker} listens on {connection.laddr.port}, which it was not given")
    return wrong


def lift_quarantines(running: RunningAppliance) -> set[str]:
    """Five deaths within ten minutes are a crash loop, here as well: start what is in quarantine."""
    held = [name for name, instance in state_of(running).instances.items() if instance.quarantined]
    try:
        return {name for name in held if running.post(f"/instances/{name}/start").status_code == 200}
    except requests.RequestException:
        return set()


def wait_until_back(running: RunningAppliance, node_id: str, began: float) -> tuple[float, set[str], list[str]]:
    """(seconds since ``began``, instances lifted out of quarantine, what was still wrong after BACK_SECS)."""
    lifted: set[str] = set()
    while True:
        wrong = not_back(running, node_id)
        took = time.monotonic() - began
        if not wrong:
            time.sleep(0.3)
            wrong = not_back(running, node_id)
        if not wrong or took > BACK_SECS:
            return took, lifted, wrong
        lifted |= lift_quarantines(running)
        time.sleep(0.1)


def spared(victim: str) -> set[str]:
    """The instances of which no call may fail when this one is killed."""
    if victim == "supervisord" or victim.startswith("multiplexer"):
        return set()
    return set(REPLICAS) - ({"one"} if victim == "one-0" else set())


def kill(running: RunningAppliance, victim: str, process: psutil.Process) -> list[str]:
    """kill -9, and `appliance up` again where that was its end. Returns what should not be left."""
    try:
        process.kill()
        process.wait(20)
    except psutil.NoSuchProcess:
        return []  # an instance that was just deleted
    except psutil.TimeoutExpired:
        return [f"process {process.pid} was killed and is still there, {process.status()}"]
    if victim != "supervisord":
        return []
    assert running.process is not None
    running.process.wait(timeout=60)
    left = running.left_over()
    running.up()
    return [f"left behind by `appliance up`: {left}"] if left else []


def main(kills: int, seed: int) -> int:
    choice, ended = random.Random(seed), threading.Event()
    took: dict[str, list[float]] = defaultdict(list)
    violations: list[tuple[str, str]] = []
    lifts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, RunningAppliance(Path(folder), seeds="") as running:
        for name, replicas in REPLICAS.items():
            running.create(name, model_id=MODEL, replicas=replicas)
            running.wait_ready(name)
        node_id = running.node_id()
        loads = {name: Load(running, name, ended) for name in REPLICAS}
        changes = Changes(running, choice, ended)
        changes.going.set()
        watch = Watch(node_id)
        for thread in (watch.thread, changes.thread, *(load.thread for load in loads.values())):
            thread.start()
        for number in range(kills):
            time.sleep(choice.uniform(*BETWEEN_KILLS))
            candidates = victims(running, node_id)
            victim = choice.choice(sorted(candidates))
            before = {name: len(load.failures) for name, load in loads.items()}
            began = time.monotonic()
            wrong = kill(running, victim, choice.choice(candidates[victim]))
            with changes.halted():
                seconds, lifted, missing = wait_until_back(running, node_id, began)
                wrong += [f"after {BACK_SECS:g} s: {each}" for each in missing] + changes.lost()
            for name in spared(victim) - lifted:
                wrong += [f"a call of {name}: {each}" for each in loads[name].failures[before[name] :]]
            wrong += [f"two processes of one replica: {each}" for each in drain(watch.doubles)]
            wrong += [f"refused: {each}" for each in drain(changes.refused)]
            took[victim].append(seconds)
            lifts.update(lifted)
            violations += [(victim, each) for each in wrong]
            print(f"{number + 1:4}  {victim:22}  back after {seconds:5.2f} s  {'; '.join(wrong)}", flush=True)
            if missing:
                break  # later kills would measure this one's damage
        ended.set()
        changes.going.set()
        watch.ended.set()
        for thread in (watch.thread, changes.thread, *(load.thread for load in loads.values())):
            thread.join()
        violations += [("-", f"{load.wrong} wrong vectors of {name}") for name, load in loads.items() if load.wrong]
    table(took, violations)
    print(f"quarantined and lifted: {dict(lifts) or 'none'}; looks for double processes: {watch.samples}")
    print(f"changes acknowledged: {changes.acknowledged}")
    for name, load in loads.items():
        print(f"calls of {name}: {load.answered} answered, {len(load.failures)} failed")
    for victim, each in violations:
        print(f"VIOLATED, {victim} killed: {each}")
    return 1 if violations else 0


def drain(entries: list[str]) -> list[str]:
    """Remove and return the entries so far of a list that another thread may extend."""
    return [entries.pop(0) for _ in range(len(entries))]


def table(took: dict[str, list[float]], violations: list[tuple[str, str]]) -> None:
    print(f"\n{'killed':22}  {'times':>5}  {'median s':>8}  {'worst s':>8}  {'violated':>8}")
    count = Counter(victim for victim, _ in violations)
    for victim, seconds in sorted(took.items()):
        middle, worst = statistics.median(seconds), max(seconds)
        print(f"{victim:22}  {len(seconds):5}  {middle:8.2f}  {worst:8.2f}  {count[victim]:8}")
    total = [each for seconds in took.values() for each in seconds]
    middle, worst = statistics.median(total), max(total)
    print(f"{'all':22}  {len(total):5}  {middle:8.2f}  {worst:8.2f}  {len(violations):8}")


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(numbers[0] if numbers else 200, numbers[1] if len(numbers) > 1 else 7))
