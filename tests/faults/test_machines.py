"""Three machines, in namespaces with real addresses: what dies, is cut off or is restarted there costs callers nothing.

One has no instance and two peers that have the same one. Calls come to it in every way. At the end a table of faults,
failed calls and longest waits is printed: `pytest -s`.
"""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from testing.arrows import vectors
from testing.every_way import arrow, assert_nothing_is_noticed
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
AWAY_SECS = 20.0


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
            eventually(lambda: len(vectors(arrow(front, NAME))), 60)
            yield Machines(front, one, two, spaces)


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
    assert_nothing_is_noticed(machines.front, NAME, fault.__name__, lambda: fault(machines))
