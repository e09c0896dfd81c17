"""The supervisord driver against a real supervisord: idempotent, sure that a removed group is gone, and never stuck."""

import contextlib
import gc
import http.server
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import warnings
import xmlrpc.client
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from supervisor.xmlrpc import Faults

from appliance.core import health
from appliance.core.problems import Kind, Problem
from appliance.core.status import Process, ProcessRow, replica_status
from appliance.drivers.supervisord import Supervisor

pytestmark = pytest.mark.processes

CONF = """
[supervisord]
nodaemon=true
silent=true
logfile=%(here)s/supervisord.log
pidfile=%(here)s/supervisord.pid
[unix_http_server]
file=%(here)s/supervisor.sock
[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
[rpcinterface:appliance]
supervisor.rpcinterface_factory=appliance.drivers.supervisord_extension:make_extension
include_file=%(here)s/instances.conf
health_file=%(here)s/health.json
[include]
files=instances.conf
"""
SLEEPS = "sleep 60"
DEAF = """sh -c 'trap "" TERM; while :; do sleep 0.1; done'"""


def program(name: str, command: str = SLEEPS, members: Collection[str] = ("0", "1"), **options: Any) -> str:
    """One group of two programs, or of these members, as export/supervisord writes them."""
    defaults = {"autostart": "true", "startsecs": 0, "stopwaitsecs": 1, "stopasgroup": "true", "killasgroup": "true"}
    lines = "".join(f"{key}={value}\n" for key, value in {**defaults, **options}.items())
    programs = "".join(f"[program:{name}-{member}]\ncommand={command}\n{lines}" for member in members)
    return f"[group:{name}]\nprograms={','.join(f'{name}-{member}' for member in members)}\n{programs}"


def eventually(check: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 10
    while not (result := check()):
        assert time.monotonic() < deadline, "not within 10 s"
        time.sleep(0.02)
    return result


class Box:
    """A supervisord in a folder, and the groups that its include file has."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.supervisor = folder, Supervisor(folder / "supervisor.sock")
        (folder / "supervisord.conf").write_text(CONF)

    def write(self, *groups: str) -> None:
        (self.folder / "instances.conf").write_text("\n".join(groups))

    def processes(self, group: str) -> list[Process]:
        return [process for process in self.supervisor.processes() if process.group == group]

    def pids(self, group: str) -> list[int]:
        return [process.pid for process in self.processes(group) if process.pid]

    def running(self, group: str) -> list[int]:
        """The process ids, once both run."""
        return eventually(lambda: len(self.pids(group)) == 2 and self.pids(group))

    def states(self, group: str) -> set[str]:
        return {process.state for process in self.processes(group)}


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Box]:
    box = Box(folder)
    box.write()
    command = [sys.executable, "-m", "supervisor.supervisord", "-n", "-c", str(folder / "supervisord.conf")]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as supervisord:
        try:
            eventually(box.supervisor.answers)
            yield box
        finally:
            supervisord.terminate()
            supervisord.wait(timeout=10)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with started(tmp_path_factory.mktemp("sv")) as box:
        yield box


@pytest.fixture
def box(shared: Box) -> Iterator[Box]:
    """Without groups, before and after."""
    yield shared
    shared.write()
    shared.supervisor.difference()
    for group in {process.group for process in shared.supervisor.processes()}:
        shared.supervisor.remove(group, 10)


def test_what_the_monitor_remembers_ends_with_the_processes(tmp_path: Path) -> None:
    remembered = tmp_path / "health.json"
    remembered.write_text("{}")
    with started(tmp_path) as box:
        assert not remembered.exists()
        remembered.write_text("{}")
        box.supervisor.call("restart")  # as `supervisorctl reload`
        eventually(lambda: not remembered.exists() and box.supervisor.answers())


def test_members_are_those_of_a_group_that_supervisord_knows(box: Box) -> None:
    box.write(program("one"), program("two"))
    box.supervisor.difference()
    for group in ("one", "two"):
        box.supervisor.add(group)
    pids = box.running("one")
    for others in (["one-7"], [f"one-{number}" for number in range(2, 20)]):  # asked for one by one, and all together
        members = box.supervisor.members("one", ["one-0", "one-1", *others])
        assert [(each.group, each.name, each.pid) for each in members] == [
            ("one", "one-0", pids[0]),
            ("one", "one-1", pids[1]),
        ]
    assert box.supervisor.members("three", ["one-0"]) == []
    assert box.supervisor.process("one", "two-0") is None


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_a_new_group_is_added_changed_and_removed_as_the_file_says(box: Box) -> None:
    assert box.supervisor.difference() == ([], [], [])
    box.write(program("a"))
    assert box.supervisor.difference() == box.supervisor.difference() == (["a"], [], [])
    box.supervisor.add("a")
    assert box.supervisor.difference() == ([], [], [])

    box.write(program("a", environment='LAUNCH="2"'), program("b"))
    assert box.supervisor.difference() == (["b"], ["a"], [])
    before = box.running("a")
    box.supervisor.remove("a", 10)
    box.supervisor.add("a")
    assert box.supervisor.difference() == (["b"], [], [])
    assert not set(before) & set(box.running("a"))

    box.write()
    assert box.supervisor.difference() == ([], [], ["a"])
    box.supervisor.remove("a", 10)
    assert box.supervisor.difference() == ([], [], [])


def by_name(box: Box, group: str) -> dict[str, int | None]:
    return {process.name: process.pid for process in box.processes(group)}


def test_members_of_a_group_come_and_go_and_the_others_keep_their_processes(box: Box) -> None:
    box.write(program("a"))
    box.supervisor.difference()
    box.supervisor.add("a")
    before = dict(zip(("a-0", "a-1"), box.running("a"), strict=True))
    box.write(program("a", members=("2", "0", "3")))
    assert box.supervisor.difference() == ([], ["a"], [])
    assert box.supervisor.member_difference("a") == (["a-2", "a-3"], [], ["a-1"])
    box.supervisor.remove_members("a", ["a-1"], 10)
    box.supervisor.remove_members("a", ["a-1"], 10)
    assert alive([before["a-1"]]) == []
    for name in ("a-3", "a-2", "a-2"):
        box.supervisor.add_member("a", name)
    assert box.supervisor.difference() == ([], [], [])
    now = eventually(lambda: all(by_name(box, "a").values()) and by_name(box, "a"))
    assert (set(now), now["a-0"]) == ({"a-0", "a-2", "a-3"}, before["a-0"])

    box.write(program("a", members=("2", "0", "3"), environment='LAUNCH="2"'))
    box.supervisor.difference()
    assert box.supervisor.member_difference("a") == ([], ["a-2", "a-0", "a-3"], [])
    os.kill(now["a-2"] or 0, 9)  # it may be started again, before it is stopped
    box.supervisor.remove_members("a", list(now), 10)
    assert box.processes("a") == []
    for name in now:
        box.supervisor.add_member("a", name)
    assert box.supervisor.difference() == ([], [], [])
    assert not set(now.values()) & set(eventually(lambda: len(box.pids("a")) == 3 and box.pids("a")))


def test_members_of_a_group_that_nobody_has_differ_in_nothing(box: Box) -> None:
    assert box.supervisor.member_difference("nobody") == ([], [], [])
    box.supervisor.add_member("nobody", "nobody-0")
    box.supervisor.remove_members("nobody", ["nobody-0"], 1)
    box.write(program("a"))
    box.supervisor.difference()
    box.supervisor.add("a")
    pids = box.running("a")
    box.write()
    box.supervisor.difference()
    assert box.supervisor.member_difference("a") == ([], [], [])  # it goes as a whole
    assert box.running("a") == pids


def test_a_member_that_does_not_stop_in_time_is_a_problem_and_can_be_removed_later(box: Box) -> None:
    box.write(program("a", DEAF))
    box.supervisor.difference()
    box.supervisor.add("a")
    box.running("a")
    time.sleep(0.2)  # until the shells have set their trap
    box.write(program("a", DEAF, members=("0",)))
    box.supervisor.difference()
    with pytest.raises(Problem, match="a-1") as caught:
        box.supervisor.remove_members("a", ["a-1"], 0.1)
    assert caught.value.kind == Kind.UNAVAILABLE
    box.supervisor.remove_members("a", ["a-1"], 10)
    assert list(by_name(box, "a")) == ["a-0"]


@contextlib.contextmanager
def told_by(folder: Path, answer: Any) -> Iterator[Supervisor]:
    """A supervisord that says this whatever it is asked."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            told = answer if isinstance(answer, xmlrpc.client.Fault) else (answer,)
            body = xmlrpc.client.dumps(told, methodresponse=True).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def address_string(self) -> str:
            return "unix"

        def log_message(self, *_: Any) -> None:
            pass

    path = folder / "told.sock"
    with socketserver.UnixStreamServer(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Supervisor(path)
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("step", [-86400, 86400])
def test_a_step_of_the_clock_makes_no_process_older(tmp_path: Path, step: int) -> None:
    """A real process, as supervisor tells of it after the clock was set by a day."""
    now, policy = int(time.time()), health.Policy(interval_secs=10, max_failures=3, startup_secs=300)
    with subprocess.Popen(["sleep", "60"]) as process:
        row = ProcessRow("a", "a-0", "RUNNING", process.pid, "", 0, started=now, stopped=0, now=now + step)
        with told_by(tmp_path, json.dumps([row])) as supervisor:
            (shown,) = supervisor.processes()
        assert shown.uptime is not None
        assert 0 <= shown.uptime < 10
        assert replica_status("running", shown, answers=False, timeout=300) == "starting"
        look = health.Look(launch=1, state=shown.state, pid=shown.pid, uptime=shown.uptime)
        assert health.decide(None, look, policy, time.monotonic())[1] == ()
        process.kill()


def test_a_supervisord_of_another_release_is_named(tmp_path: Path) -> None:
    """One that runs on while the code is replaced knows nothing of what a later release asks for."""
    with told_by(tmp_path, xmlrpc.client.Fault(Faults.UNKNOWN_METHOD, "UNKNOWN_METHOD")) as supervisor:
        with pytest.raises(Problem, match="supervisord runs another release of the appliance: stop") as caught:
            supervisor.processes()
    assert caught.value.kind == Kind.UNAVAILABLE


def test_an_age_is_that_of_the_process(box: Box) -> None:
    box.write(program("a"))
    box.supervisor.difference()
    began = time.monotonic()
    box.supervisor.add("a")
    box.running("a")
    for process in box.processes("a"):
        assert process.uptime is not None
        assert -0.1 < process.uptime <= time.monotonic() - began + 0.1


def test_adding_twice_is_adding_once(box: Box) -> None:
    box.write(program("a"))
    box.supervisor.difference()
    box.supervisor.add("a")
    before = box.running("a")
    box.supervisor.add("a")
    assert box.running("a") == before


def test_removing_what_is_not_there_is_done(box: Box) -> None:
    box.supervisor.remove("never-heard-of", 1)
    box.write(program("a"))
    box.supervisor.difference()
    box.supervisor.add("a")
    box.supervisor.remove("a", 10)
    box.supervisor.remove("a", 10)
    assert box.processes("a") == []


@pytest.mark.parametrize("command", [SLEEPS, DEAF], ids=["hears TERM", "ignores TERM"])
def test_after_remove_no_process_is_left(box: Box, command: str) -> None:
    box.write(program("a", command))
    box.supervisor.difference()
    box.supervisor.add("a")
    pids = box.running("a")
    family = pids + [child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)]
    box.supervisor.remove("a", 10)
    assert alive(pids) == []
    assert eventually(lambda: alive(family) == [])
    assert box.processes("a") == []


def test_a_group_that_does_not_stop_in_time_is_a_problem_and_can_be_removed_later(box: Box) -> None:
    box.write(program("a", DEAF))
    box.supervisor.difference()
    box.supervisor.add("a")
    box.running("a")
    time.sleep(0.2)  # until the shells have set their trap
    with pytest.raises(Problem, match='"a"') as caught:
        box.supervisor.remove("a", 0.1)
    assert caught.value.kind == Kind.UNAVAILABLE
    box.supervisor.remove("a", 10)
    assert box.processes("a") == []


def test_a_group_that_keeps_dying_can_be_removed(box: Box) -> None:
    box.write(program("a", "sh -c 'exit 3'", startsecs=1, startretries=1000))
    box.supervisor.difference()
    box.supervisor.add("a")
    eventually(lambda: "BACKOFF" in box.states("a"))
    box.supervisor.remove("a", 10)
    assert box.processes("a") == []


def test_a_group_whose_processes_are_killed_while_it_is_removed_stays_removed(box: Box) -> None:
    box.write(program("a", autorestart="true"))
    box.supervisor.difference()
    box.supervisor.add("a")
    for pid in box.running("a"):
        os.kill(pid, 9)
    box.supervisor.remove("a", 10)
    assert box.processes("a") == []


def test_removing_one_group_leaves_the_others_alone(box: Box) -> None:
    box.write(program("a"), program("ab"))
    box.supervisor.difference()
    for group in ("a", "ab"):
        box.supervisor.add(group)
    box.running("a")
    before = box.running("ab")
    box.supervisor.remove("a", 10)
    assert box.running("ab") == before


def test_several_removers_at_once_all_succeed(box: Box) -> None:
    box.write(program("a", DEAF))
    box.supervisor.difference()
    box.supervisor.add("a")
    box.running("a")
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(box.supervisor.remove, "a", 10) for _ in range(4)]:
            done.result()
    assert box.processes("a") == []


def test_the_process_table_says_what_is_known(box: Box) -> None:
    box.write(program("on"), program("off", autostart="false"), program("bad", "sh -c 'exit 3'", autorestart="false"))
    box.supervisor.difference()
    for group in ("on", "off", "bad"):
        box.supervisor.add(group)
    box.running("on")
    eventually(lambda: box.states("bad") == {"EXITED"})
    table = {process.name: process for process in box.supervisor.processes()}
    on, off, bad = table["on-0"], table["off-0"], table["bad-0"]
    assert (on.group, on.state, on.exit_status) == ("on", "RUNNING", None)
    assert on.uptime is not None
    assert 0 <= on.uptime < 60
    assert (off.state, off.pid, off.exit_status, off.uptime) == ("STOPPED", None, None, None)
    assert (bad.state, bad.pid, bad.exit_status, bad.uptime) == ("EXITED", None, 3, None)


def test_what_ends_too_quickly_has_no_exit_status_rather_than_a_false_one(box: Box) -> None:
    """Supervisor itself says 0 then."""
    box.write(program("a", "/bin/sh -c 'exit 3'", startretries=0, startsecs=5))
    box.supervisor.difference()
    box.supervisor.add("a")
    eventually(lambda: box.states("a") == {"FATAL"})
    assert {(each.exit_status, each.ending) for each in box.processes("a")} == {(None, "ended right after its start")}


def test_a_process_that_was_started_again_has_no_exit_status(box: Box) -> None:
    """It had that of the process before, or 0 where that was ended by a signal."""
    box.write(program("a", autorestart="true"))
    box.supervisor.difference()
    box.supervisor.add("a")
    before = box.running("a")
    os.kill(before[0], signal.SIGKILL)
    eventually(lambda: before[0] not in (now := box.running("a")) and before[1] in now)
    assert [each.exit_status for each in box.processes("a")] == [None, None]


def test_a_program_that_does_not_exist_says_so(box: Box) -> None:
    box.write(program("a", "/no/such/binary", startretries=0))
    box.supervisor.difference()
    box.supervisor.add("a")
    eventually(lambda: box.states("a") == {"FATAL"})
    assert all(process.ending.startswith("did not start: ") for process in box.processes("a"))
    assert all("/no/such/binary" in process.spawn_error for process in box.processes("a"))


def test_a_file_that_supervisor_cannot_read_is_a_problem_and_stops_nothing(box: Box) -> None:
    box.write(program("a"))
    box.supervisor.difference()
    box.supervisor.add("a")
    before = box.running("a")
    box.write("[program:x]\ncommand=%(nonsense)s\n")
    with pytest.raises(Problem) as caught:
        box.supervisor.difference()
    assert caught.value.kind == Kind.INTERNAL
    assert "nonsense" in caught.value.message
    assert box.running("a") == before


def test_eight_threads_with_fifty_calls_each_never_fail(box: Box) -> None:
    box.write(program("a"))
    box.supervisor.difference()
    box.supervisor.add("a")
    box.running("a")

    def fifty(_: int) -> list[int]:
        return [len(box.supervisor.processes()) for _ in range(50)]

    with ThreadPoolExecutor(8) as pool:
        assert [count for counts in pool.map(fifty, range(8)) for count in counts] == [2] * 400


def test_a_call_leaves_no_connection_open(box: Box, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always", ResourceWarning)
        box.supervisor.processes()
        assert not Supervisor(tmp_path / "none.sock").answers()
        gc.collect()
    assert [str(warning.message) for warning in shown] == []


# -- a supervisord that does not answer ------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Supervisor], Any]] = {
    "processes": lambda supervisor: supervisor.processes(),
    "difference": lambda supervisor: supervisor.difference(),
    "add": lambda supervisor: supervisor.add("a"),
    "remove": lambda supervisor: supervisor.remove("a", 1),
    "require": lambda supervisor: supervisor.require(),
    "shutdown": lambda supervisor: supervisor.shutdown(),
}


def assert_unavailable(call: Callable[[Supervisor], Any], supervisor: Supervisor) -> None:
    with pytest.raises(Problem) as caught:
        call(supervisor)
    assert (caught.value.kind, caught.value.code) == (Kind.UNAVAILABLE, "BACKEND_UNAVAILABLE")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_socket_without_a_supervisord_is_unavailable(call: Callable[[Supervisor], Any], tmp_path: Path) -> None:
    path = tmp_path / "supervisor.sock"
    assert_unavailable(call, Supervisor(path))
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # as a killed supervisord leaves it
    assert path.exists()
    assert_unavailable(call, Supervisor(path))
    assert not Supervisor(path).answers()
    assert_unavailable(call, Supervisor(tmp_path / ("x" * 200)))


ANSWERS = {
    "closes": b"",
    "no HTTP": b"hello\r\n\r\n",
    "500": b"HTTP/1.0 500 Oops\r\nContent-Length: 0\r\n\r\n",
    "cut in its headers": b"HTTP/1.0 200 OK\r\nContent-Le",
    "cut in its body": b"HTTP/1.0 200 OK\r\nContent-Length: 999\r\n\r\n<?xml version='1.0'?><meth",
    "no XML": b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    "empty body": b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_an_answer_that_breaks_off_is_unavailable(answer: bytes, tmp_path: Path) -> None:
    """What a supervisord that is killed while it answers leaves on the line."""

    def serve(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, connection.makefile("rb") as request:
                    while b"</methodCall>" not in request.readline():
                        pass
                    connection.sendall(answer)

    path = str(tmp_path / "s.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        try:
            assert_unavailable(lambda supervisor: supervisor.processes(), Supervisor(path))
            assert not Supervisor(path).answers()
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(5)


def test_a_supervisord_that_shuts_down_is_unavailable_and_shutting_down_twice_is_fine(tmp_path: Path) -> None:
    with started(tmp_path) as box:
        box.write(program("a", DEAF))
        box.supervisor.difference()
        box.supervisor.add("a")
        pids = box.running("a")
        time.sleep(0.2)  # until the shells have set their trap, so that the shutdown takes a second
        box.supervisor.shutdown()
        box.supervisor.shutdown()
        assert not box.supervisor.answers()
        for name in ("require", "processes", "difference", "add", "remove"):
            assert_unavailable(CALLS[name], box.supervisor)
        eventually(lambda: alive(pids) == [])
