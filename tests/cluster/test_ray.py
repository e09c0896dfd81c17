"""A cluster of Ray Serve: a head and two nodes, in namespaces with real addresses, and a machine that only calls.

`make cluster-test`. The faults, at full length, are in `test_ray_faults`.
"""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import requests

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.arrows import dense_request, vectors
from testing.ray_cluster import MARKS, WORKER, Cluster, running_cluster
from testing.ray_machines import RayMachine
from testing.running import TINY, eventually

pytestmark = [*MARKS, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def wide(cluster: Cluster) -> str:
    """An instance with a replica on each of the two nodes."""
    eventually(lambda: cluster.head.create("wide", replicas=2, node_labels=[WORKER]), 60)
    eventually(lambda: len(cluster.replicas("wide")) == 2, 90)
    wait_for_answers(cluster.front, "wide")
    return "wide"


def wait_for_answers(machine: RayMachine, name: str) -> None:
    eventually(lambda: embedded(machine, name).size, 60)


def embedded(machine: RayMachine, name: str, text: str = "river", secs: float = 30) -> Any:
    request = mux.EmbedRequest(
        target=mux.Target(instance_name=name), request=tei.EmbedRequest(inputs=text, truncate=True, normalize=True)
    )
    return np.array(machine.stub().Embed(request, timeout=secs).embeddings)


def test_replicas_run_on_the_machines_with_their_label_and_are_called_from_everywhere(
    cluster: Cluster, wide: str
) -> None:
    hosts = {address.partition(":")[0] for address in cluster.replicas(wide)}
    assert hosts == {cluster.one.host, cluster.two.host}
    expected = embedded(cluster.front, wide)
    for machine in (cluster.head, cluster.one, cluster.two):
        wait_for_answers(machine, wide)
        assert np.allclose(embedded(machine, wide), expected, atol=1e-6)
    batch = vectors(cluster.front.stub().EmbedArrow(dense_request(wide, ["river"] * 40), timeout=30))
    assert len(batch) == 40
    assert all(each is not None and np.allclose(each, expected, atol=1e-4) for each in batch)


def test_a_replica_that_dies_is_replaced_and_no_call_fails(cluster: Cluster, wide: str) -> None:
    before = cluster.replicas(wide)
    for pid in cluster.one.pids("appliance.engine"):
        psutil.Process(pid).kill()
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert embedded(cluster.front, wide).size
        after = cluster.replicas(wide)
        if len(after) == 2 and after != before:
            return
    raise AssertionError(f"no other replica: {cluster.replicas(wide)}")


def test_more_replicas_and_fewer(cluster: Cluster, wide: str) -> None:
    patch(cluster.head, wide, replicas=3)
    eventually(lambda: len(cluster.replicas(wide)) == 3, 90)
    patch(cluster.head, wide, replicas=2)
    deadline = time.monotonic() + 60
    while len(cluster.replicas(wide)) > 2 and time.monotonic() < deadline:
        assert embedded(cluster.front, wide).size
    assert len(cluster.replicas(wide)) == 2


def patch(machine: RayMachine, name: str, **fields: Any) -> None:
    reply = requests.patch(f"{machine.url}/instances/{name}", json=fields, timeout=60)
    assert reply.status_code == 200, reply.text


def test_an_instance_without_calls_has_no_replica_and_the_next_call_waits_for_one(cluster: Cluster) -> None:
    cluster.head.create("rare", start="on_demand", idle_unload_secs=5, node_labels=[WORKER])
    eventually(lambda: cluster.head.instance("rare")["status"] == "sleeping", 30)
    eventually(lambda: embedded(cluster.front, "rare", secs=60).size, 70)
    assert cluster.head.instance("rare")["status"] == "running"
    eventually(lambda: cluster.head.instance("rare")["status"] == "sleeping", 90)
    cluster.head.delete("/instances/rare")
    eventually(lambda: cluster.head.get("/instances/rare").status_code == 404)


def test_a_model_that_no_machine_can_serve_says_why(cluster: Cluster) -> None:
    cluster.head.create("wrong", model_id="/no/such/model", startup_timeout_secs=10)

    def told() -> str:
        return str(cluster.head.instance("wrong")["last_error"] or "")

    eventually(lambda: "/no/such/model" in told(), 90)
    cluster.head.delete("/instances/wrong")


def test_what_means_nothing_on_a_cluster_is_refused(cluster: Cluster) -> None:
    for field, value in (("port", 8080), ("gpu_ids", [0]), ("express", True)):
        reply = cluster.head.post("/instances", {"name": "x", "model_id": TINY, field: value})
        assert reply.status_code == 422
        assert f'"{field}"' in reply.json()["error"]
    refused = cluster.one.post("/instances", {"name": "x", "model_id": TINY})
    assert refused.status_code == 409
    assert "ray:" in refused.json()["error"]
