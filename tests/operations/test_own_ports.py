"""Another configuration than that with which the ports were chosen: the appliance's own ports are taken."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from appliance.cli import up
from appliance.core import sleep as core_sleep
from appliance.core import state
from appliance.core.instance import InstanceSpec
from appliance.core.problems import Kind, Problem
from appliance.core.state import State
from appliance.drivers import ports
from appliance.drivers.supervisord import Supervisor
from appliance.node.context import Node, now
from appliance.operations import instances, sleep
from testing.running import TINY
from testing.specs import configured
from testing.stand_ins import QuietSupervisor

PORT, METRICS = 18100, 18700
KEYS = ("api_port", "grpc_port", "http_port")


def node_at(folder: Path, **keys: Any) -> Node:
    ranges = {"instance_port_start": PORT, "instance_port_end": PORT + 50, "prometheus_port_start": METRICS}
    settings = configured(data_dir=str(folder), **ranges, **keys)
    return replace(Node.at(settings), supervisor=cast(Supervisor, QuietSupervisor()))


def add(folder: Path, **fields: Any) -> tuple[int, int]:
    """An instance of the configuration before; returns its ports."""
    node, spec = node_at(folder), InstanceSpec.parse({"name": "a", "model_id": str(TINY), **fields})
    made = node.state.update(lambda before: state.add(before, spec, node.settings, (), now())).after.get("a")
    return made.ports[0], made.prometheus_ports[0]


@pytest.mark.parametrize("key", KEYS)
def test_a_port_that_was_chosen_and_is_ours_now_becomes_another(tmp_path: Path, key: str) -> None:
    """The instance listened there first, and the appliance did not come up."""
    port, metrics = add(tmp_path)
    node = node_at(tmp_path, **{key: port})
    up.find_models_and_ports(node, pytest.fail)
    after = node.state.read().get("a")
    assert after.ports[0] != port
    assert after.ports[0] not in node.settings.own_ports
    assert after.prometheus_ports == (metrics,)
    (event,) = node.journal.since(0)
    assert f"port {port} is in use by the appliance itself ({key})" in event["message"]


def test_a_metrics_port_that_is_ours_now_becomes_another(tmp_path: Path) -> None:
    port, metrics = add(tmp_path)
    node = node_at(tmp_path, http_port=metrics)
    instances.leave_taken_ports(node, "a")
    after = node.state.read().get("a")
    assert after.ports == (port,)
    assert after.prometheus_ports[0] not in (metrics, *node.settings.own_ports)


def test_a_port_that_was_asked_for_and_is_ours_now_ends_the_start(tmp_path: Path) -> None:
    """One of the two would not come up, and nobody said which and why."""
    add(tmp_path, port=PORT)
    node = node_at(tmp_path, grpc_port=PORT)
    with pytest.raises(
        Problem, match=rf"Port {PORT} of \"a\" is in use by the appliance itself \(grpc_port\)"
    ) as caught:
        up.find_models_and_ports(node, pytest.fail)
    assert (caught.value.kind, caught.value.code) == (Kind.CONFLICT, "PORT_CONFLICT")
    assert node.state.read().get("a").ports == (PORT,)


def test_what_does_not_run_ends_no_start_and_is_refused_when_it_is_called(tmp_path: Path) -> None:
    add(tmp_path, port=PORT, start="on_demand")
    node = node_at(tmp_path, grpc_port=PORT)
    node.state.update(core_sleep.sleep_on_demand)
    up.find_models_and_ports(node, pytest.fail)
    with pytest.raises(Problem, match="the appliance itself") as caught:
        sleep.wake(node, "a")
    assert caught.value.code == "PORT_CONFLICT"


def test_ports_of_the_same_configuration_stay(tmp_path: Path) -> None:
    ports = add(tmp_path)
    node = node_at(tmp_path)
    up.find_models_and_ports(node, pytest.fail)
    after = node.state.read().get("a")
    assert (*after.ports, *after.prometheus_ports) == ports
    assert node.journal.since(0) == []


def test_the_machine_is_asked_for_the_lowest_ports_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,100 that each create asked for, it took one of each range."""
    node, asked = replace(node_at(tmp_path), settings=configured(data_dir=str(tmp_path))), set[int]()
    taken, busy = node.settings.instance_port_start, node.settings.instance_port_start + 1
    before = state.add(State(), InstanceSpec.parse({"name": "a", "model_id": str(TINY)}), node.settings, (), now())

    def is_busy(candidates: Iterable[int], host: str) -> frozenset[int]:
        asked.update(candidates)
        return frozenset({busy} & set(candidates))

    monkeypatch.setattr(ports, "busy", is_busy)
    spec = InstanceSpec.parse({"name": "b", "model_id": str(TINY), "replicas": 2})
    added = instances.addition(node, before, spec, state.add, spare_ports=3)(before).get("b")
    assert added.ports == (busy + 1, busy + 2)
    assert len(asked) == 1 + 5 + 5
    assert taken not in asked


def test_each_of_many_seeds_has_its_ports(tmp_path: Path) -> None:
    names = [f"seed-{number}" for number in range(instances.SPARE_PORTS + 6)]
    seeds = [{"name": name, "model_id": str(TINY)} for name in names]
    node = replace(node_at(tmp_path), settings=configured(data_dir=str(tmp_path), instances=seeds))
    instances.seed(node)
    assert set(node.state.read().instances) == set(names)


@pytest.mark.parametrize(
    ("ranges", "seeds"),
    [
        ({"api_port": PORT, "grpc_port": PORT + 1, "http_port": PORT + 2}, [{}]),
        ({"prometheus_port_start": PORT}, [{}] * 4),
        ({}, [{"port": PORT, "prometheus_port": PORT + 3, "replicas": 3}, {}]),
    ],
    ids=["our own ports", "one range for both", "ports that another one asks for"],
)
def test_seeds_find_ports_beside_those_that_are_not_bound_yet(tmp_path: Path, ranges: Any, seeds: Any) -> None:
    named = [{"name": f"seed-{number}", "model_id": str(TINY), **each} for number, each in enumerate(seeds)]
    keys = {"instance_port_start": PORT, "instance_port_end": PORT + 100, "prometheus_port_start": METRICS, **ranges}
    node = replace(node_at(tmp_path), settings=configured(data_dir=str(tmp_path), instances=named, **keys))
    instances.seed(node)
    assert len(node.state.read().instances) == len(seeds)
