"""`appliance down` says that all has ended when it has, and only then."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from appliance.cli.ending import bring_down, end_follower
from appliance.core.problems import Problem
from appliance.core.status import Process
from appliance.drivers.supervisord import Supervisor
from appliance.node.context import Node
from appliance.operations import supervision
from testing.running import eventually
from testing.specs import configured


class Stuck:
    """A supervisord that cannot end one of its processes, until it is asked ``patience`` times whether it answers."""

    def __init__(self, socket: Path, patience: float, group: str = "a") -> None:
        self.socket, self.patience, self.asked, self.group = socket, patience, 0, group
        self.socket_path = str(socket)
        socket.touch()

    def pid(self) -> int:
        return 4710

    stop_all = shutdown = pid

    def answers(self) -> bool:
        self.asked += 1
        if self.asked >= self.patience:
            self.socket.unlink(missing_ok=True)
        return self.socket.exists()

    def processes(self) -> list[Process]:
        return [Process(self.group, "a-0", "STOPPING", pid=4711), Process(self.group, "a-1", "STOPPED")]


def bring_down_of(folder: Path, patience: float, group: str = "a") -> list[str]:
    settings = replace(configured(data_dir=str(folder)), graceful_shutdown_timeout_secs=0)
    supervisor: Any = Stuck(folder / "supervisor.sock", patience, group)
    said: list[str] = []
    node = replace(Node.at(settings), supervisor=cast(Supervisor, supervisor))
    assert bring_down(node, said.append) == 0
    return said


def test_a_follower_is_ended_and_no_other_process_that_has_its_number_by_now() -> None:
    with subprocess.Popen(["sleep", "600"]) as follower:
        end_follower(follower.pid)
    strange = subprocess.check_output(["sh", "-c", "sleep 600 >/dev/null & echo $!"])
    stranger = psutil.Process(int(strange))
    end_follower(stranger.pid)
    assert stranger.is_running()
    stranger.kill()


def test_what_takes_a_while_is_waited_for(tmp_path: Path) -> None:
    assert bring_down_of(tmp_path, patience=5) == ["Stopped; no process is left"]


def test_what_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "REPLACE_GRACE_SECS", 0.5)
    with pytest.raises(Problem, match="a-0 still run") as caught:
        bring_down_of(tmp_path, patience=float("inf"))
    assert "a-1" not in caught.value.message


OF_ANOTHER_RELEASE = """[supervisord]
logfile={folder}/supervisord.log
pidfile={folder}/supervisord.pid
[unix_http_server]
file={socket}
[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
[program:any]
command=sleep 60
startsecs=0
"""


@pytest.mark.processes
def test_a_supervisord_of_another_release_is_named_and_can_be_ended(tmp_path: Path) -> None:
    """After the code was replaced under it: its readiness said nothing, and `down` was refused as everything else."""
    node = Node.at(replace(configured(data_dir=str(tmp_path)), graceful_shutdown_timeout_secs=0))
    config = tmp_path / "other.conf"
    config.write_text(OF_ANOTHER_RELEASE.format(folder=tmp_path, socket=node.supervisor.socket_path))
    with subprocess.Popen([sys.executable, "-m", "supervisor.supervisord", "-n", "-s", "-c", str(config)]) as running:
        try:
            eventually(node.supervisor.answers)
            with pytest.raises(Problem, match="another release") as caught:
                node.supervisor.require()
            assert caught.value.code == "BACKEND_UNAVAILABLE"
            said: list[str] = []
            assert bring_down(node, said.append) == 0
            assert said == ["Stopped; no process is left"]
            assert running.wait(10) == 0
        finally:
            running.kill()


def test_a_machine_of_a_cluster_has_the_time_in_which_its_replicas_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "REPLACE_GRACE_SECS", 0.1)
    assert bring_down_of(tmp_path, patience=10, group="cluster") == ["Stopped; no process is left"]
