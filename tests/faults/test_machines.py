"""Three machines, in namespaces with real addresses: what dies, is cut off or is restarted there costs callers nothing.

One has no instance and two peers that have the same one. Calls come to it in every way. At the end a table of faults,
failed calls and longest waits is printed: `pytest -s`.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import requests

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.arrows import dense_request, vectors
from testing.background import Background
from testing.machines import Machine, Network, Space, possible
from testing.running import TINY, eventually

pytestmark = [
    pytest.mark.faults,
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not possible(), reason="network namespaces need root and iproute2"),
]
NAME = "same"
SEED = f'[[instances]]\nname = "{NAME}"\nmodel_id = "{TINY}"\n'
DEADLINE_SECS = 60.0
AWAY_SECS = 20.0
MOST_STALL_SECS = 15.0


class Machines(NamedTuple):
    front: Machine
    one: Machine
    two: Machine
    spaces: list[Space]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    room = tmp_path_factory.mktemp("machines")
    with Network() as network:
        spaces = [network.space(number) for number in (1, 2, 3)]
        one = Machine(spaces[1], room / "one", seeds=SEED)
        two = Machine(spaces[2], room / "two", seeds=SEED)
        peers = ", ".join(f'"{each.host}:{each.grpc_port}"' for each in (one, two))
        front = Machine(spaces[0], room / "front", seeds="", settings=f"peers = [{peers}]")
        with one, two, front:
            one.wait_ready(NAME)
            two.wait_ready(NAME)
            eventually(lambda: len(vectors(arrow(front))), 60)
            yield Machines(front, one, two, spaces)


def arrow(front: Machine) -> Any:
    return front.stub().EmbedArrow(dense_request(NAME, ["river"] * 20), timeout=DEADLINE_SECS)


def request() -> mux.EmbedRequest:
    inner = tei.EmbedRequest(inputs="river", truncate=True, normalize=True)
    return mux.EmbedRequest(target=mux.Target(instance_name=NAME), request=inner)


def ways(front: Machine) -> dict[str, Callable[[], list[Any]]]:
    """Each gives vectors of the same text."""
    stub, session = front.stub(), requests.Session()
    url = f"http://{front.host}:{front.http_port}/v1/embeddings"

    def http() -> list[Any]:
        reply = session.post(url, json={"model": NAME, "input": ["river"] * 5}, timeout=DEADLINE_SECS)
        assert reply.status_code == 200, reply.text[:200]
        return [each["embedding"] for each in reply.json()["data"]]

    def stream() -> list[Any]:
        replies = list(stub.EmbedStream(iter([request()] * 20), timeout=DEADLINE_SECS))
        assert len(replies) == 20
        return [each.embeddings for each in replies]

    return {
        "unary": lambda: [stub.Embed(request(), timeout=DEADLINE_SECS).embeddings],
        "stream": stream,
        "arrow": lambda: vectors(stub.EmbedArrow(dense_request(NAME, ["river"] * 50), timeout=DEADLINE_SECS)),
        "http": http,
    }


class Callers(Background):
    """One thread for each way, with every failure, wrong vector and the longest wait."""

    def __init__(self, front: Machine) -> None:
        super().__init__()
        self.right = np.array(front.stub().Embed(request(), timeout=DEADLINE_SECS).embeddings)
        self.answered: dict[str, int] = {}
        self.failed: list[str] = []
        self.longest = 0.0
        self.threads = [threading.Thread(target=self.call, args=each) for each in ways(front).items()]

    def call(self, way: str, ask: Callable[[], list[Any]]) -> None:
        while not self.ended.wait(0.02):
            began = time.monotonic()
            try:
                found = ask()
                assert all(np.allclose(each, self.right, atol=1e-4) for each in found), "a wrong vector"
                self.answered[way] = self.answered.get(way, 0) + 1
            except Exception as error:
                self.failed.append(f"{way}: {error!r}"[:300])
            self.longest = max(self.longest, time.monotonic() - began)


def a_multiplexer_is_killed(machines: Machines) -> None:
    (pid,) = machines.one.supervisorctl("pid", "multiplexer:multiplexer-0").split()
    machines.one.supervisorctl("signal", "KILL", "multiplexer:multiplexer-0")
    eventually(lambda: machines.one.supervisorctl("pid", "multiplexer:multiplexer-0").split() not in ([pid], ["0"]))


def a_replica_is_killed(machines: Machines) -> None:
    for process in machines.two.processes_of(NAME):
        process.kill()


def a_machine_loses_its_power(machines: Machines) -> None:
    machines.spaces[1].kill_all()
    assert machines.one.process
    machines.one.process.wait(timeout=10)
    time.sleep(3)
    machines.one.up()
    machines.one.wait_ready(NAME)


def a_machine_is_cut_off(machines: Machines) -> None:
    machines.spaces[2].pull_cable()
    time.sleep(AWAY_SECS)
    machines.spaces[2].plug_cable()


def all_is_restarted_in_turn(machines: Machines) -> None:
    for machine in (machines.one, machines.two):
        machine.stop()
        machine.up()
        machine.wait_ready(NAME)
        time.sleep(2)  # until it is a peer that answers again


FAULTS = [
    a_multiplexer_is_killed,
    a_replica_is_killed,
    a_machine_loses_its_power,
    a_machine_is_cut_off,
    all_is_restarted_in_turn,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_callers_notice_nothing(machines: Machines, fault: Callable[[Machines], None]) -> None:
    with Callers(machines.front) as callers:
        time.sleep(2)
        fault(machines)
        time.sleep(4)
    print(f"\n{fault.__name__}: {callers.answered}, {len(callers.failed)} failed, longest {callers.longest:.1f} s")
    assert callers.failed == []
    assert len(callers.answered) == 4
    assert callers.longest < MOST_STALL_SECS
