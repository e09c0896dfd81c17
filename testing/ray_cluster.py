"""A cluster of Ray Serve: a head and two nodes, in namespaces with real addresses, and a machine that only calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from testing.machines import Network, Space, possible
from testing.ray_machines import PYTHON, RayMachine

WORKER = "part=worker"
MARKS = (  # of the tests that start one
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.skipif(not possible(), reason="network namespaces need root and iproute2"),
    pytest.mark.skipif(not PYTHON.exists(), reason="Ray is not installed: make cluster-test"),
)


class Cluster(NamedTuple):
    head: RayMachine
    one: RayMachine
    two: RayMachine
    front: RayMachine
    spaces: list[Space]

    def replicas(self, name: str) -> list[str]:
        """The addresses of those that run, as REST on the head tells them."""
        told = self.head.instance(name).get("replica_list", [])  # none while Ray is away
        return sorted(each["address"] for each in told if each["status"] == "running" and each["address"])


@contextmanager
def running_cluster(room: Path) -> Iterator[Cluster]:
    with Network() as network:
        spaces = [network.space(number) for number in (1, 2, 3, 4)]
        address = spaces[0].address
        head = RayMachine(spaces[0], room / "head", address, "head")
        one = RayMachine(spaces[1], room / "one", address, "node", WORKER)
        two = RayMachine(spaces[2], room / "two", address, "node", WORKER)
        front = RayMachine(spaces[3], room / "front", address, "")
        with head, one, two, front:
            yield Cluster(head, one, two, front, spaces)
            for instance in head.get("/instances").json():  # else a node waits until its replicas have moved
                head.delete(f"/instances/{instance['name']}")
