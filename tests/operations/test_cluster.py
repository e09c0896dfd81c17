"""The verbs on the head of a cluster, with a stand-in for Ray Serve."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.core.problems import Kind, Problem
from appliance.core.settings import parse
from appliance.node import cluster as sights
from appliance.node import overview
from appliance.node.context import Node
from appliance.operations import cluster, instances, replacement, restarts, sleep
from testing.fake_serve import FakeServe


@pytest.fixture
def serve() -> Iterator[FakeServe]:
    with FakeServe() as running:
        yield running


@pytest.fixture
def node(tmp_path: Path, serve: FakeServe) -> Node:
    return node_at(tmp_path, serve)


def node_at(folder: Path, serve: FakeServe, **values: Any) -> Node:
    ports = {"ray_dashboard_port": serve.port, "ray_directory_port": serve.port}
    return Node.at(parse({"ray_role": "head", **ports, **values}, {}, {}, str(folder)))


def body(**fields: Any) -> dict[str, Any]:
    return {"name": "a", "model_id": "org/model", **fields}


def deployed(serve: FakeServe) -> dict[str, Any]:
    return {each["name"]: each for each in serve.deployed["applications"]}


def test_one_that_is_created_is_deployed_and_has_no_ports_of_this_machine(node: Node, serve: FakeServe) -> None:
    view = instances.create(node, body(replicas=2))
    assert [(each.status, each.address) for each in view.replicas] == [
        ("running", "10.0.0.1:4000"),
        ("running", "10.0.0.1:4001"),
    ]
    assert list(deployed(serve)) == ["directory", "tei-a"]
    assert node.state.read().get("a").ports == ()
    assert [each.name for each in overview.show_all(node)] == ["a"]
    assert overview.show(node, "a").mapping()["replicas_ready"] == 2


def test_a_dry_run_creates_nothing(node: Node, serve: FakeServe) -> None:
    assert instances.create(node, body(), dry_run=True).status == "starting"
    assert serve.puts == []
    assert not node.state.read().instances


def test_a_change_that_serve_refuses_is_none_and_stops_no_other(node: Node, serve: FakeServe) -> None:
    """It refused everything that followed, with words about this instance."""
    for name in ("a", "b"):
        instances.create(node, body(name=name))
    before, events = node.state.read().instances, len(node.journal.since(0))
    serve.refuses = "these labels are none"
    for verb in (
        lambda: replacement.set_fields(node, "a", {"node_labels": ["zone=a"]}, whole=False),
        lambda: instances.delete(node, "a"),
        lambda: instances.stop(node, "a"),
    ):
        with pytest.raises(Problem, match="these labels are none"):
            verb()
        assert node.state.read().instances == before
    assert len(node.journal.since(0)) == events
    serve.refuses = ""
    instances.delete(node, "b")
    assert list(deployed(serve)) == ["directory", "tei-a"]


def test_who_is_refused_by_serve_finds_nothing_afterwards(node: Node, serve: FakeServe) -> None:
    serve.refuses = "these labels are none"
    with pytest.raises(Problem, match="these labels are none") as refused:
        instances.create(node, body())
    assert refused.value.code == "CLUSTER_REFUSES"
    assert not node.state.read().instances


def test_a_name_is_given_once(node: Node) -> None:
    instances.create(node, body())
    with pytest.raises(Problem, match="already exists"):
        instances.create(node, body())
    with pytest.raises(Problem, match="already means"):
        instances.create(node, body(name="b", aliases=["a"]))


def test_stop_start_restart_and_delete_reach_serve(node: Node, serve: FakeServe) -> None:
    instances.create(node, body())
    assert instances.stop(node, "a").status == "stopped"
    assert "tei-a" not in deployed(serve)
    with pytest.raises(Problem, match="stopped already"):
        instances.stop(node, "a")
    assert instances.start(node, "a").status == "running"
    with pytest.raises(Problem, match="use restart"):
        instances.start(node, "a")
    launch = deployed(serve)["tei-a"]["args"]["launch"]
    assert restarts.restart(node, "a").mapping()["restarts"] == 1
    assert deployed(serve)["tei-a"]["args"]["launch"] == launch + 1
    assert instances.delete(node, "a").status == "stopped"
    assert "tei-a" not in deployed(serve)
    assert not node.state.read().instances


def test_one_that_failed_is_started_anew(node: Node, serve: FakeServe) -> None:
    instances.create(node, body())
    serve.states["tei-a"], serve.statuses["tei-a"] = [], "DEPLOY_FAILED"
    serve.messages["tei-a"] = "RuntimeError: no such model"
    failed = overview.show(node, "a")
    assert (failed.status, failed.last_error) == ("failed", "RuntimeError: no such model")
    launch = deployed(serve)["tei-a"]["args"]["launch"]
    instances.start(node, "a")
    assert deployed(serve)["tei-a"]["args"]["launch"] == launch + 1


def test_fields_change_and_what_decides_vectors_does_not(node: Node, serve: FakeServe) -> None:
    instances.create(node, body())
    view = replacement.set_fields(node, "a", {"replicas": 3, "aliases": ["x"]}, whole=False)
    assert len(view.replicas) == 3
    assert deployed(serve)["tei-a"]["deployments"][0]["num_replicas"] == 3
    with pytest.raises(Problem, match='"pooling"') as refused:
        replacement.set_fields(node, "a", {"pooling": "cls"}, whole=False)
    assert (refused.value.kind, refused.value.code) == (Kind.PRECONDITION, "ON_A_CLUSTER")
    with pytest.raises(Problem, match='"name" cannot change'):
        replacement.set_fields(node, "a", {"name": "b"}, whole=False)
    puts = len(serve.puts)
    replacement.set_fields(node, "a", {"replicas": 2}, whole=False, dry_run=True)
    assert len(serve.puts) == puts
    assert replacement.set_fields(node, "a", {"model_id": "org/model"}, whole=True).instance.spec.aliases == ()


def test_what_only_one_machine_does_is_refused(node: Node) -> None:
    instances.create(node, body())
    for verb in (sleep.sleep, sleep.wake, replacement.undo):
        with pytest.raises(Problem) as refused:
            verb(node, "a")
        assert refused.value.code == "ON_A_CLUSTER"
    with pytest.raises(Problem) as refused:
        overview.log_window(node, "a", 0, None, None)
    assert refused.value.code == "ON_A_CLUSTER"


def test_nothing_changes_while_ray_is_away(tmp_path: Path) -> None:
    with FakeServe() as gone:
        node = node_at(tmp_path, gone)
        instances.create(node, body())
    for change in (
        lambda: instances.create(node, body(name="b")),
        lambda: instances.delete(node, "a"),
        lambda: instances.stop(node, "a"),
        lambda: replacement.set_fields(node, "a", {"replicas": 2}, whole=False),
    ):
        with pytest.raises(Problem, match="Nobody of the cluster answers") as refused:
            change()
        assert refused.value.code == "CLUSTER_UNAVAILABLE"
    assert list(node.state.read().instances) == ["a"]
    assert node.state.read().get("a").wanted == "running"


def test_the_token_is_shown(tmp_path: Path) -> None:
    with FakeServe(token="secret") as serve:
        with pytest.raises(Problem, match="ray_token_file"):
            instances.create(node_at(tmp_path, serve), body())
        file = tmp_path / "token"
        file.write_text("secret\n")
        assert instances.create(node_at(tmp_path, serve, ray_token_file=str(file)), body()).status == "running"


def test_seeds_are_added_once(tmp_path: Path, serve: FakeServe) -> None:
    seeded = node_at(tmp_path, serve, instances=[body(replicas=2)])
    instances.seed(seeded)
    assert seeded.state.read().get("a").ports == ()
    cluster.deploy(seeded)
    instances.delete(seeded, "a")
    instances.seed(seeded)
    assert not seeded.state.read().instances


def test_without_restore_the_head_begins_with_its_seeds_alone(tmp_path: Path, serve: FakeServe) -> None:
    instances.create(node_at(tmp_path, serve), body(name="b"))
    seeded = node_at(tmp_path, serve, instances=[body()], auto_restore_on_restart=False)
    instances.seed(seeded)
    assert list(seeded.state.read().instances) == ["a"]


def test_a_deployment_that_differs_is_seen(node: Node, serve: FakeServe) -> None:
    instances.create(node, body())
    assert cluster.is_deployed(node, sights.look(node))
    serve.deployed = {"applications": serve.deployed["applications"][:1]}
    assert not cluster.is_deployed(node, sights.look(node))


def test_an_instance_that_ran_on_a_cluster_gets_ports_when_it_runs_on_one_machine(
    tmp_path: Path, serve: FakeServe
) -> None:
    instances.create(node_at(tmp_path, serve), body(replicas=2))
    alone = Node.at(parse({}, {}, {}, str(tmp_path)))
    instances.seed(alone)
    assert len(set(alone.state.read().get("a").ports)) == 2
