"""Instances of the configuration file: whichever comes first, each has the port that it asks for, or there is none."""

from pathlib import Path
from typing import Any

import pytest

from appliance.core.cluster import with_ports, without_machine
from appliance.core.problems import Problem
from appliance.node.context import Node
from appliance.operations import instances
from testing.running import TINY
from testing.specs import configured


def node_of(folder: Path, *seeds: dict[str, Any]) -> Node:
    entries = [{"model_id": str(TINY), **seed} for seed in seeds]
    return Node.at(configured(data_dir=str(folder), state_file=str(folder / "state.toml"), instances=entries, **RANGES))


PORT = 18200  # not the default: an appliance may run on this machine
RANGES = {"instance_port_start": PORT, "instance_port_end": PORT + 50, "prometheus_port_start": PORT + 600}
ANY, ASKS = {"name": "a"}, {"name": "b", "port": PORT}


@pytest.mark.parametrize("seeds", [(ANY, ASKS), (ASKS, ANY)], ids=["at first", "at last"])
def test_a_port_that_is_asked_for_is_given_to_nobody_else(tmp_path: Path, seeds: tuple[dict[str, Any], ...]) -> None:
    node = node_of(tmp_path, *seeds)
    instances.seed(node)
    assert {name: each.ports for name, each in node.state.read().instances.items()} == {"a": (PORT + 1,), "b": (PORT,)}
    assert sorted(each["instance"] for each in node.journal.since(0)) == ["a", "b"]
    instances.seed(node)
    assert len(node.journal.since(0)) == 2


def test_of_seeds_that_do_not_go_together_none_is_added(tmp_path: Path) -> None:
    node = node_of(tmp_path, ANY, ASKS, {"name": "c", "port": PORT})
    with pytest.raises(Problem, match=f"{PORT} already in use"):
        instances.seed(node)
    assert not node.state.read().instances
    assert node.journal.since(0) == []


def test_back_from_a_cluster_each_has_the_port_that_it_asks_for(tmp_path: Path) -> None:
    node = node_of(tmp_path, ANY, ASKS)
    instances.seed(node)
    elsewhere = without_machine(node.state.read())
    assert {each.ports for each in elsewhere.instances.values()} == {()}
    back = with_ports(elsewhere, node.settings).instances
    assert {name: each.ports for name, each in back.items()} == {"a": (PORT + 1,), "b": (PORT,)}
