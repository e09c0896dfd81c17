"""Instances on a cluster of Ray Serve, as values."""

import re
from dataclasses import replace
from typing import Any

import pytest

from appliance.core import cluster, state_toml
from appliance.core.addresses import Address
from appliance.core.cluster import KnownReplica, ServeApplication, ServeReplica
from appliance.core.instance import InstanceSpec
from appliance.core.problems import Problem
from appliance.core.settings import Settings, parse
from appliance.core.state import Instance, State, with_instance
from appliance.core.status import instance_status

NOW = 1000.0


def spec(**fields: Any) -> InstanceSpec:
    return InstanceSpec.parse({"name": "a", "model_id": "org/model", **fields})


def wanted(**fields: Any) -> Instance:
    return Instance(spec(**fields), (), (), created_at="now")


def application(status: str = "RUNNING", message: str = "", **states: str) -> ServeApplication:
    replicas = tuple(ServeReplica(each, state, "10.0.0.1", NOW - 5) for each, state in states.items())
    return ServeApplication(status, message, replicas, {})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"port": 8080}, "port"),
        ({"prometheus_port": 8700}, "prometheus_port"),
        ({"gpu_id": 0}, "gpu_id"),
        ({"gpu_ids": [0, 1]}, "gpu_ids"),
        ({"express": True}, "express"),
        ({"idle_unload_secs": 60}, "idle_unload_secs"),
    ],
)
def test_what_only_one_machine_can_give_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(Problem, match=f'"{named}"'):
        cluster.refuse_unsupported(spec(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prometheus_port": 0},
        {"gpu_ids": "auto"},
        {"start": "on_demand", "idle_unload_secs": 9},
        {"max_replicas": 4},
    ],
)
def test_all_else_is_accepted(fields: dict[str, Any]) -> None:
    cluster.refuse_unsupported(spec(**fields))


@pytest.mark.parametrize("fields", [{"max_replicas": 2}, {"node_labels": ["zone=a"]}])
def test_what_only_a_cluster_can_give_is_refused_on_one_machine(fields: dict[str, Any]) -> None:
    with pytest.raises(Problem, match=f'"{next(iter(fields))}"'):
        cluster.refuse_without_cluster(spec(**fields))
    cluster.refuse_without_cluster(spec())


def test_export_says_what_is_left_out() -> None:
    notes = cluster.notes(spec(port=8080, express=True, gpu_ids=[0]))
    assert [re.findall('"([a-z_]+)"', note)[:1] for note in notes] == [["port"], ["express"], []]
    assert cluster.notes(spec()) == []


@pytest.mark.parametrize(
    ("instance", "deployed", "statuses"),
    [
        (wanted(replicas=2), application(x="RUNNING", y="RUNNING"), ["running", "running"]),
        (wanted(replicas=2), application("UNHEALTHY", x="RUNNING"), ["running", "starting"]),
        (wanted(replicas=1), application(x="RUNNING", y="STOPPING"), ["running", "stopping"]),
        (wanted(), application("DEPLOYING", x="STARTING"), ["starting"]),
        (wanted(), application("DEPLOYING"), ["starting"]),
        (wanted(), application("DEPLOY_FAILED"), ["failed"]),
        (wanted(), None, ["starting"]),
        (wanted(start="on_demand"), application(), ["sleeping"]),
        (wanted(start="on_demand"), application("DEPLOY_FAILED"), ["failed"]),
        (wanted(start="on_demand"), application(x="RUNNING"), ["running"]),
        (wanted(), application(x="A NEW WORD"), ["starting"]),
    ],
)
def test_the_status_of_each_replica(instance: Instance, deployed: ServeApplication | None, statuses: list[str]) -> None:
    assert [each.status for each in cluster.replica_views(instance, deployed, (), NOW)] == statuses


def test_one_that_is_stopped_is_stopped_when_its_replicas_have_ended() -> None:
    instance = Instance(spec(replicas=2), (), (), created_at="now", wanted="stopped")
    ending = cluster.replica_views(instance, application(x="STOPPING"), (), NOW)
    assert instance_status([each.status for each in ending]) == "stopping"
    assert [each.status for each in cluster.replica_views(instance, None, (), NOW)] == ["stopped"]


def test_a_replica_is_told_with_its_address_as_soon_as_the_directory_knows_it() -> None:
    known = [KnownReplica("y", Address("10.0.0.2", 4242), 77)]
    first, second = cluster.replica_views(wanted(replicas=2), application(x="STARTING", y="RUNNING"), known, NOW)
    assert (first.address, first.port, first.pid) == (None, 0, None)
    assert (second.address, second.port, second.pid, second.uptime_secs) == ("10.0.0.2:4242", 4242, 77, 5)


def test_the_reason_is_told_without_the_traceback() -> None:
    said = 'Failed:\n  File "x.py", line 1\nRuntimeError: The replica ended. Its last lines:\nno such model\n'
    assert cluster.last_error(application("DEPLOY_FAILED", said)) == (
        "RuntimeError: The replica ended. Its last lines:\nno such model"
    )
    assert cluster.last_error(application("UNHEALTHY", "one is missing")) == "one is missing"
    assert cluster.last_error(application("RUNNING", "all is well")) is None
    assert cluster.last_error(None) is None


def test_serves_answer_is_read() -> None:
    replica = {"replica_id": "r", "state": "RUNNING", "node_ip": "10.0.0.1", "start_time_s": 5.0}
    told = {
        "status": "RUNNING",
        "message": "Failed to update ['D']",
        "deployed_app_config": {"name": "tei-a"},
        "deployments": {"D": {"message": "of the deployment", "replicas": [replica, {**replica, "replica_id": "q"}]}},
    }
    found = cluster.applications_of({"applications": {"tei-a": told}})["tei-a"]
    assert [each.id for each in found.replicas] == ["q", "r"]
    assert (found.message, found.config) == ("of the deployment", {"name": "tei-a"})
    del replica["node_ip"]  # while it starts
    assert cluster.applications_of({"applications": {"tei-a": told}})["tei-a"].replicas[0].node == "10.0.0.1"


@pytest.mark.parametrize("told", [{}, {"instances": [], "replicas": {"a": [{}]}, "incomplete": []}, {"replicas": 3}])
def test_what_is_no_answer_of_the_directory_is_refused(told: Any) -> None:
    with pytest.raises(Problem, match="no answer of the directory"):
        cluster.directory_answer(told)


def test_serve_has_what_is_wanted_or_not() -> None:
    one, other = {"name": "a", "args": {"x": 1}}, {"name": "a", "args": {"x": 2}}
    deployed = {"a": ServeApplication("RUNNING", "", (), one)}
    assert not cluster.differs({"applications": [one]}, deployed)
    assert cluster.differs({"applications": [other]}, deployed)
    assert cluster.differs({"applications": []}, deployed)
    assert cluster.differs({"applications": [one, {"name": "b"}]}, deployed)


def settings(**values: Any) -> Settings:
    return parse(values, {}, {}, "/data")


def test_a_machine_of_a_cluster_gets_its_table_from_the_head() -> None:
    head, node = settings(ray_role="head"), settings(ray_role="node", ray_head="10.0.0.1", ray_directory_port=8300)
    assert (head.directory, node.directory) == ("ray:127.0.0.1:8266", "ray:10.0.0.1:8300")
    assert (head.is_cluster_head, head.has_own_instances, head.has_state_directory) == (True, True, False)
    assert (node.is_cluster_head, node.has_own_instances, node.has_state_directory) == (False, False, False)
    # Its own programs have all of it from the environment.
    environ = {"TEI_APPLIANCE_RAY_ROLE": "head", "TEI_MANAGER_DIRECTORY": head.directory}
    assert parse({}, environ, {}, "/data").directory == head.directory


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"ray_role": "node"}, "ray_head"),
        ({"ray_role": "head", "ray_head": "10.0.0.1"}, "ray_head"),
        ({"ray_head": "10.0.0.1"}, "ray_role"),
        ({"ray_role": "head", "directory": "static:/a"}, "directory"),
        ({"ray_role": "head", "ray_token_file": "token"}, "ray_token_file"),
        ({"ray_role": "node", "ray_head": "10.0.0.1", "peers": ["a:1"]}, "peers"),
        ({"directory": "ray:nowhere"}, "directory"),
    ],
)
def test_half_a_cluster_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(Problem, match=f'"{named}"'):
        settings(**values)


def test_one_that_has_run_on_one_machine_may_change_on_a_cluster_and_is_read_again() -> None:
    alone = Instance(spec(gpu_ids="auto"), (8080,), (8700,), "now", placed=(3,), quarantined={0: "it died"}, launch=4)
    after = cluster.without_machine(with_instance(State(), alone)).get("a")
    assert (after.ports, after.prometheus_ports, after.placed, after.quarantined, after.launch) == ((), (), (), {}, 4)
    grown = with_instance(State(), replace(after, spec=spec(replicas=3)))
    assert state_toml.load(state_toml.dump(grown)).get("a").spec.replicas == 3


def test_one_that_has_run_on_a_cluster_gets_ports_beside_the_others() -> None:
    state = with_instance(with_instance(State(), wanted(replicas=2)), Instance(spec(name="b"), (8080,), (8700,), "now"))
    after = cluster.with_ports(state, settings())
    assert (after.get("a").ports, after.get("b").ports) == ((8081, 8082), (8080,))
