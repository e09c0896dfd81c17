"""`appliance down` says that all has ended when it has, and only then."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from appliance.cli.ending import bring_down
from appliance.core.problems import Problem
from appliance.core.status import Process
from appliance.drivers.supervisord import Supervisor
from appliance.node.context import Node
from appliance.operations import supervision
from testing.specs import configured


class Stuck:
    """A supervisord that cannot end one of its processes, until it is asked ``patience`` times whether it answers."""

    def __init__(self, socket: Path, patience: float, group: str = "a") -> None:
        self.socket, self.patience, self.asked, self.group = socket, patience, 0, group
        self.socket_path = str(socket)
        socket.touch()

    def require(self) -> None:
        pass

    stop_all = shutdown = require

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


def test_what_takes_a_while_is_waited_for(tmp_path: Path) -> None:
    assert bring_down_of(tmp_path, patience=5) == ["Stopped; no process is left"]


def test_what_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "REPLACE_GRACE_SECS", 0.5)
    with pytest.raises(Problem, match="a-0 still run") as caught:
        bring_down_of(tmp_path, patience=float("inf"))
    assert "a-1" not in caught.value.message


def test_a_machine_of_a_cluster_has_the_time_in_which_its_replicas_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "REPLACE_GRACE_SECS", 0.1)
    assert bring_down_of(tmp_path, patience=10, group="cluster") == ["Stopped; no process is left"]
