"""What dies, is cut off or is replaced in a cluster of Ray Serve costs callers nothing, with two replicas.

Callers ask again and again on a machine beside the cluster. At the end of each fault a line is printed: `pytest -s`.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from testing.arrows import vectors
from testing.every_way import arrow, assert_nothing_is_noticed
from testing.ray_cluster import MARKS, WORKER, Cluster, running_cluster
from testing.ray_machines import RayMachine
from testing.running import eventually

pytestmark = [*MARKS, pytest.mark.faults, pytest.mark.timeout(900)]
NAME = "wide"
AWAY_SECS = 20.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        eventually(lambda: running.head.create(NAME, replicas=2, node_labels=[WORKER]), 60)
        eventually(lambda: len(vectors(arrow(running.front, NAME))), 120)
        yield running


def all_is_well(cluster: Cluster) -> None:
    """Two replicas run, and callers find them."""
    eventually(lambda: len(cluster.replicas(NAME)) == 2, 180)
    eventually(lambda: set(cluster.front.listed(NAME)) == set(cluster.replicas(NAME)), 60)


def on_both_nodes(cluster: Cluster) -> None:
    """Serve spreads replicas only where it is easy: a replica that was replaced may be beside the other one."""
    for _ in range(6):
        all_is_well(cluster)
        if {each.partition(":")[0] for each in cluster.replicas(NAME)} == {cluster.one.host, cluster.two.host}:
            return
        replace_all(cluster)
    raise AssertionError(f"never on both: {cluster.replicas(NAME)}")


def replace_all(cluster: Cluster) -> None:
    before = set(cluster.replicas(NAME))
    assert cluster.head.post(f"/instances/{NAME}/restart").status_code == 200
    eventually(lambda: len(after := cluster.replicas(NAME)) == 2 and before.isdisjoint(after), 120)


def kill(machine: RayMachine, words: str) -> None:
    """What is killed is another process afterwards, or gone."""
    pids = machine.pids(words)
    assert pids
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def a_replica_is_replaced(cluster: Cluster, before: list[str]) -> None:
    eventually(lambda: cluster.replicas(NAME) != before, 120)


def a_process_is_killed(cluster: Cluster) -> None:
    before = cluster.replicas(NAME)
    kill(cluster.one, "appliance.engine")
    a_replica_is_replaced(cluster, before)


def an_actor_is_killed(cluster: Cluster) -> None:
    before = cluster.replicas(NAME)
    kill(cluster.one, "ray::ServeReplica:tei-")
    a_replica_is_replaced(cluster, before)


def the_directory_is_killed(cluster: Cluster) -> None:
    machines = (cluster.head, cluster.one, cluster.two)
    (host,) = [each for each in machines if each.pids("ray::ServeReplica:directory")]
    kill(host, "ray::ServeReplica:directory")
    eventually(lambda: any(each.pids("ray::ServeReplica:directory") for each in machines), 60)


def a_multiplexer_is_killed(cluster: Cluster) -> None:
    kill(cluster.head, "appliance.multiplexer")


def ray_is_killed_on_the_head(cluster: Cluster) -> None:
    kill(cluster.head, "gcs_server")
    kill(cluster.head, "raylet")
    eventually(lambda: cluster.head.pids("gcs_server"), 60)


def a_node_loses_its_power(cluster: Cluster) -> None:
    lose_power(cluster, cluster.two, 2)


def the_head_loses_its_power(cluster: Cluster) -> None:
    lose_power(cluster, cluster.head, 0)


def lose_power(cluster: Cluster, machine: RayMachine, number: int) -> None:
    cluster.spaces[number].kill_all()
    assert machine.process
    machine.process.wait(timeout=20)
    time.sleep(AWAY_SECS)
    machine.up()


def a_node_is_cut_off(cluster: Cluster) -> None:
    cluster.spaces[2].pull_cable()
    time.sleep(AWAY_SECS)
    cluster.spaces[2].plug_cable()


def the_head_is_cut_off(cluster: Cluster) -> None:
    cluster.spaces[0].pull_cable()
    time.sleep(AWAY_SECS)
    cluster.spaces[0].plug_cable()


def all_replicas_are_replaced(cluster: Cluster) -> None:
    replace_all(cluster)


def a_node_leaves_and_comes_back(cluster: Cluster) -> None:
    cluster.one.stop(signal.SIGTERM)
    cluster.one.up()


FAULTS = [
    a_process_is_killed,
    an_actor_is_killed,
    the_directory_is_killed,
    a_multiplexer_is_killed,
    ray_is_killed_on_the_head,
    a_node_loses_its_power,
    the_head_loses_its_power,
    a_node_is_cut_off,
    the_head_is_cut_off,
    all_replicas_are_replaced,
    a_node_leaves_and_comes_back,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_callers_notice_nothing(cluster: Cluster, fault: Callable[[Cluster], None]) -> None:
    on_both_nodes(cluster)

    def until_all_is_well() -> None:
        fault(cluster)
        all_is_well(cluster)

    assert_nothing_is_noticed(cluster.front, NAME, fault.__name__, until_all_is_well)
