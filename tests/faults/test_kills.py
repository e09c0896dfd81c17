"""Real processes are killed with SIGKILL: control in the middle of its verbs, replicas, the multiplexer, supervisord,
and `appliance up` itself. Everything comes back, nothing acknowledged is lost, no replica ever has two processes."""

import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import requests

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.agreement import Watch, alive, state_of, supervised, wait_for_agreement
from testing.running import TINY, TINY_WIDTH, RunningAppliance, eventually

pytestmark = pytest.mark.faults
ROUNDS = 10


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    """One appliance that the tests of this file break and that recovers each time; its instance is `kept`."""
    with RunningAppliance(tmp_path_factory.mktemp("broken"), seeds="") as running:
        running.create("kept")
        running.wait_ready("kept")
        yield running


def program(running: RunningAppliance, name: str) -> list[psutil.Process]:
    """All processes of one program of the cast: supervisord's child first, then its descendants."""
    pid = next(each["pid"] for each in supervised(running) if each["name"] == name)
    if not pid:
        return []
    try:
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def supervisord(running: RunningAppliance) -> psutil.Process:
    assert running.process is not None
    (found,) = psutil.Process(running.process.pid).children()
    return found


def kill(found: list[psutil.Process]) -> None:
    for process in found:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass


def embeds(running: RunningAppliance, name: str, timeout: float = 5) -> bool:
    request = mux.EmbedRequest(target=mux.Target(instance_name=name), request=tei.EmbedRequest(inputs="hello"))
    with grpc.insecure_channel(f"127.0.0.1:{running.grpc_port}") as channel:
        call = channel.unary_unary(
            "/tei_multiplexer.v1.TeiMultiplexer/Embed",
            request_serializer=mux.EmbedRequest.SerializeToString,
            response_deserializer=tei.EmbedResponse.FromString,
        )
        return len(call(request, timeout=timeout).embeddings) == TINY_WIDTH


def measured(check: Callable[[], Any], timeout: float) -> float:
    began = time.monotonic()
    eventually(check, timeout, every=0.02)
    return time.monotonic() - began


def pids(running: RunningAppliance, name: str) -> set[int]:
    return {process.pid for process in running.processes_of(name) if alive(process)}


# -- control ---------------------------------------------------------------------------------------------------------


def next_verb(running: RunningAppliance, choice: random.Random) -> str:
    found = state_of(running).instances.get("victim")
    if found is None:
        return "create"
    return choice.choice(["stop", "stop", "restart", "delete"] if found.wanted == "running" else ["start", "delete"])


def send(running: RunningAppliance, verb: str) -> requests.Response:
    if verb == "create":
        return running.post("/instances", {"name": "victim", "model_id": TINY})
    if verb == "delete":
        return running.delete("/instances/victim")
    return running.post(f"/instances/victim/{verb}")


def took_effect(running: RunningAppliance, verb: str, launch: int) -> bool:
    found = state_of(running).instances.get("victim")
    if verb == "delete":
        return found is None
    if found is None:
        return False
    wanted = "stopped" if verb == "stop" else "running"
    return found.wanted == wanted and (verb not in ("start", "restart") or found.launch > launch)


@pytest.mark.timeout(240)
def test_control_killed_in_the_middle_of_a_verb_completes_or_nothing_happened(broken: RunningAppliance) -> None:
    running, node, choice = broken, broken.node_id(), random.Random(11)
    kept, back, agreed = pids(running, "kept"), [], []
    with Watch(node):
        for turn in range(ROUNDS):
            verb = next_verb(running, choice)
            before = state_of(running).instances.get("victim")
            processes = program(running, "control")
            victims = {0: processes, 1: processes[:1], 2: processes[1:]}[turn % 3]  # all, the master, the workers
            answers: list[requests.Response] = []

            def client(verb: str = verb, answers: list[requests.Response] = answers) -> None:
                try:
                    answers.append(send(running, verb))
                except requests.RequestException:
                    pass

            thread = threading.Thread(target=client)
            thread.start()
            delay = choice.uniform(0, 0.15)
            time.sleep(delay)
            kill(victims)
            thread.join()
            back.append(measured(lambda: running.get("/ready").status_code == 200, 30))
            agreed.append(wait_for_agreement(running, node, timeout=40))
            answer = answers[0].status_code if answers else "no answer"
            happened = took_effect(running, verb, before.launch if before else 0)
            who = ("all", "master", "workers")[turn % 3]
            print(
                f"{verb:8} kill {who:8} after {delay * 1000:3.0f} ms: {answer}, happened: {happened}, "
                f"back {back[-1]:.2f} s, agreed {agreed[-1]:.2f} s"
            )
            if answers:
                assert answers[0].status_code in (200, 201), answers[0].text
                assert happened, "acknowledged and lost"
            if not happened:
                assert state_of(running).instances.get("victim") == before
    print(f"control back after at most {max(back):.2f} s, agreement after at most {max(agreed):.2f} s")
    assert pids(running, "kept") == kept  # nobody else was disturbed
    if "victim" in state_of(running).instances:
        assert running.delete("/instances/victim").status_code == 200


def test_control_is_back_while_what_it_was_deleting_still_stops(tmp_path: Path) -> None:
    """REST was away until then: 24 s of the 25 that TEI has to end."""
    patient = RunningAppliance(tmp_path, seeds="")
    patient.config.write_text(patient.config.read_text().replace("timeout_secs = 5\n", "timeout_secs = 120\n"))
    with patient as running, ThreadPoolExecutor(1) as pool:
        running.create("victim")
        running.wait_ready("victim")
        (slow,) = running.processes_of("victim")
        slow.suspend()
        deleted = pool.submit(running.delete, "/instances/victim")
        eventually(lambda: "victim" not in state_of(running).instances)
        kill(program(running, "control"))
        assert deleted.exception(timeout=40)
        eventually(lambda: running.get("/ready").status_code == 200, timeout=60)
        assert slow.status() == psutil.STATUS_STOPPED
        assert running.get("/instances").json() == []
        slow.resume()
        wait_for_agreement(running, running.node_id())


def test_control_without_supervisord_says_so_and_changes_nothing(broken: RunningAppliance) -> None:
    """A stopped supervisord is an answer of 503, not a hang; it then goes on as if nothing had been."""
    before = (broken.folder / "state.toml").read_bytes()
    process = supervisord(broken)
    process.suspend()
    try:
        began = time.monotonic()
        with ThreadPoolExecutor(4) as pool:
            requested = [
                pool.submit(broken.post, "/instances", {"name": "never", "model_id": TINY}),
                pool.submit(broken.get, "/ready"),
                pool.submit(broken.delete, "/instances/kept"),
                pool.submit(broken.post, "/instances/kept/restart"),
            ]
            assert embeds(broken, "kept")
            found = [each.result() for each in requested]
        took = time.monotonic() - began
    finally:
        process.resume()
    print(f"four answers at once without supervisord: {took:.1f} s")
    assert [(each.status_code, each.json()["code"]) for each in found] == [(503, "BACKEND_UNAVAILABLE")] * 4
    assert (broken.folder / "state.toml").read_bytes() == before
    wait_for_agreement(broken, broken.node_id())


# -- a replica and the multiplexer -----------------------------------------------------------------------------------


def test_a_killed_replica_is_back_without_any_of_our_code_acting(broken: RunningAppliance) -> None:
    """control is frozen and the multiplexer only routes: supervisord alone brings the replica back."""
    port = broken.instance("kept")["port"]
    frozen = program(broken, "control")
    (replica,) = broken.processes_of("kept")
    for process in frozen:
        process.suspend()
    try:
        began = time.monotonic()
        replica.kill()
        replica.wait(5)
        listening = measured(lambda: socket.create_connection(("127.0.0.1", port)).close() is None, 30)
        routable = listening + measured(lambda: embeds(broken, "kept"), 10)
        print(f"killed replica: port open after {listening:.2f} s, embeds after {routable:.2f} s")
        assert time.monotonic() - began < 25
    finally:
        for process in frozen:
            process.resume()
    assert len(pids(broken, "kept")) == 1
    wait_for_agreement(broken, broken.node_id())


def test_calls_that_come_while_the_only_replica_is_away_are_answered_when_it_is_back(broken: RunningAppliance) -> None:
    assert embeds(broken, "kept")
    replicas = broken.processes_of("kept")
    kill(replicas)
    psutil.wait_procs(replicas, timeout=5)
    time.sleep(0.1)  # a call on its way at this moment might be what ended it
    with ThreadPoolExecutor(8) as callers:
        began = time.monotonic()
        answered = list(callers.map(lambda _: embeds(broken, "kept", timeout=30), range(8)))
    assert answered == [True] * 8
    print(f"eight calls were answered {time.monotonic() - began:.2f} s after the kill")
    wait_for_agreement(broken, broken.node_id())


def test_a_replica_killed_again_and_again_is_not_given_up(broken: RunningAppliance) -> None:
    """Killed right after it answers, twice: each start was a good one, so the crash-loop fuse must not blow."""
    with Watch(broken.node_id()):
        took = []
        for _ in range(2):
            kill(broken.processes_of("kept"))
            time.sleep(0.1)
            took.append(measured(lambda: embeds(broken, "kept"), 30))
    print("killed replica embeds again after", ", ".join(f"{secs:.2f} s" for secs in took))
    wait_for_agreement(broken, broken.node_id())


def test_a_killed_multiplexer_is_back_and_disturbs_nobody(broken: RunningAppliance) -> None:
    kept = pids(broken, "kept")
    kill(program(broken, "multiplexer-0"))
    print(f"killed multiplexer: embeds after {measured(lambda: embeds(broken, 'kept'), 30):.2f} s")
    assert pids(broken, "kept") == kept


# -- supervisord and `appliance up` ----------------------------------------------------------------------------------


def test_a_second_up_is_refused_and_leaves_the_first_alone(broken: RunningAppliance) -> None:
    before = sorted(process.pid for process in broken.left_over())
    second = broken.cli("up")
    assert second.returncode == 1
    print(second.stdout + second.stderr)
    assert "is up already" in second.stdout + second.stderr
    assert "Traceback" not in second.stdout + second.stderr
    assert sorted(process.pid for process in broken.left_over()) == before
    assert embeds(broken, "kept")


def test_a_second_up_leaves_the_first_alone_while_its_supervisord_is_busy(broken: RunningAppliance) -> None:
    """supervisord not answering for a while is not the same as supervisord being gone."""
    before = sorted(process.pid for process in broken.left_over())
    process = supervisord(broken)
    output = broken.folder / "second.txt"
    process.suspend()
    try:
        with output.open("wb") as file:
            second = subprocess.Popen(broken.command("up"), env=broken.environ, stdout=file, stderr=file)
        deadline = time.monotonic() + 25
        while second.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
            after = sorted(process.pid for process in broken.left_over())
            if after != before:
                break
    finally:
        process.resume()
    second.send_signal(signal.SIGINT)
    second.wait(timeout=40)
    print(output.read_text())
    eventually(lambda: embeds(broken, "kept"))
    assert after == before, "the second `up` ended processes of the first"
    assert second.returncode == 1


def test_a_killed_supervisord_takes_everything_with_it_and_up_starts_anew(broken: RunningAppliance) -> None:
    node = broken.node_id()
    assert broken.process is not None
    with Watch(node):
        supervisord(broken).kill()
        assert broken.process.wait(timeout=40) == 1
        assert broken.left_over() == []
        began = time.monotonic()
        broken.up()
        broken.wait_ready("kept")
        print(f"up again after a killed supervisord: {time.monotonic() - began:.2f} s until `kept` answers")
        wait_for_agreement(broken, node)
    assert broken.get("/health").json()["status"] == "healthy"


def test_left_overs_of_a_killed_up_and_supervisord_are_found_and_replaced(broken: RunningAppliance) -> None:
    node = broken.node_id()
    broken.create("halted")
    broken.post("/instances/halted/stop")
    assert broken.process is not None
    with Watch(node):
        child = supervisord(broken)
        broken.process.kill()
        child.kill()
        broken.process.wait(timeout=10)
        orphans = {process.pid for process in broken.left_over()}
        assert pids(broken, "kept") <= orphans
        assert embeds(broken, "kept")  # the data path outlives its keeper
        answer = broken.post("/instances", {"name": "never", "model_id": TINY})
        assert (answer.status_code, answer.json()["code"]) == (503, "BACKEND_UNAVAILABLE")
        began = time.monotonic()
        broken.up()
        broken.wait_ready("kept")
        print(f"up over {len(orphans)} left-overs: {time.monotonic() - began:.2f} s until `kept` answers")
        wait_for_agreement(broken, node)
    assert not orphans & {process.pid for process in broken.left_over()}
    ended = {entry["instance"] for entry in broken.get("/events").json() if entry["event"] == "orphan_ended"}
    assert "kept" in ended
    assert broken.instance("halted")["status"] == "stopped"
    assert broken.delete("/instances/halted").status_code == 200


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_up_with_all_its_processes(broken: RunningAppliance, number: signal.Signals) -> None:
    began = time.monotonic()
    assert broken.stop(number) == 0
    print(f"{number.name}: all ended after {time.monotonic() - began:.2f} s")
    assert broken.left_over() == []
    broken.up()
    broken.wait_ready("kept")


def started_and_interrupted(running: RunningAppliance, wait: Callable[[psutil.Process], object]) -> str:
    """`appliance up`, Ctrl-C when ``wait`` returns; what is left running, or nothing. Left-overs are killed."""
    output = running.folder / "interrupted.txt"
    # A shell that runs these tests in the background ignores Ctrl-C, and its children inherit that; what a program
    # handles itself they do not. Not by a `preexec_fn`: between fork and exec grpc, which this process uses, may hang.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with output.open("wb") as file:
            process = subprocess.Popen(running.command("up"), env=running.environ, stdout=file, stderr=file)
    finally:
        signal.signal(signal.SIGINT, before)
    wait(psutil.Process(process.pid))
    children = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    status = process.wait(timeout=40)
    time.sleep(0.5)
    left = [child for child in children if alive(child)] + running.left_over()
    told = f"exit status {status}, left {[each.cmdline()[1:4] for each in left]}, {output.read_text()[-300:]!r}"
    kill(left)
    psutil.wait_procs(left, timeout=5)
    kill(running.left_over())
    return told if left else ""


def test_ctrl_c_at_any_moment_of_the_start_leaves_no_process(broken: RunningAppliance) -> None:
    """Also at the worst one: when supervisord has just been forked."""
    broken.stop()

    def until_it_has_a_child(process: psutil.Process) -> None:
        while process.status() != psutil.STATUS_ZOMBIE and not process.children():
            pass

    found = [started_and_interrupted(broken, until_it_has_a_child) for _ in range(5)]
    found += [started_and_interrupted(broken, lambda _, secs=secs: time.sleep(secs)) for secs in (0.3, 0.7)]
    broken.up()
    broken.wait_ready("kept")
    assert not any(found), found


@pytest.mark.parametrize("key", ["api_port", "grpc_port", "http_port"])
def test_a_busy_port_is_named_before_anything_starts(tmp_path: Path, key: str) -> None:
    running = RunningAppliance(tmp_path, seeds="")
    port = getattr(running, key)
    with socket.create_server(("127.0.0.1", port)):
        ended = running.cli("up")
    output = ended.stdout + ended.stderr
    assert ended.returncode == 1, output
    assert str(port) in output
    assert key in output
    assert "Traceback" not in output
    assert running.left_over() == []
    assert not (running.folder / "supervisord.pid").exists()
