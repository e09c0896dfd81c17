"""The listing of a cluster, as a multiplexer keeps it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.core.settings import Settings, parse
from appliance.export.ray import configuration
from appliance.multiplexer.cluster_keeper import ClusterKeeper
from appliance.node.directory import Directory, read_listing
from testing.fake_serve import FakeServe
from tests.export.test_ray import instance, settings


@pytest.fixture
def serve() -> Iterator[FakeServe]:
    with FakeServe() as running:
        running.deployed = configuration([instance("a", replicas=2)], settings())
        yield running


def keeper_at(there: Settings) -> ClusterKeeper:
    assert there.cluster_directory
    return ClusterKeeper(there, there.cluster_directory)


def settings_at(folder: Path, port: int) -> Any:
    return parse({"directory": f"ray:127.0.0.1:{port}"}, {}, {}, str(folder))


def addresses(folder: Path) -> dict[str, list[str]]:
    return {each.name: [str(one) for one in each.addresses] for each in read_listing(folder / "listing.toml")}


def test_what_the_directory_tells_is_followed(tmp_path: Path, serve: FakeServe) -> None:
    keeper = keeper_at(settings_at(tmp_path, serve.port))
    keeper.look()
    assert addresses(tmp_path) == {"a": ["10.0.0.1:4000", "10.0.0.1:4001"]}
    serve.states["tei-a"] = ["RUNNING", "STOPPING"]
    keeper.look()
    assert addresses(tmp_path) == {"a": ["10.0.0.1:4000"]}


def test_where_some_have_not_answered_those_from_before_count_as_well(tmp_path: Path, serve: FakeServe) -> None:
    keeper = keeper_at(settings_at(tmp_path, serve.port))
    keeper.look()
    serve.states["tei-a"], serve.incomplete = [], ["a"]
    keeper.look()
    assert addresses(tmp_path) == {"a": ["10.0.0.1:4000", "10.0.0.1:4001"]}
    serve.incomplete = []
    keeper.look()
    assert addresses(tmp_path) == {"a": []}


def test_what_was_known_last_stays_while_the_directory_is_away_also_over_a_start(tmp_path: Path) -> None:
    with FakeServe() as serve:
        serve.deployed = configuration([instance("a")], settings())
        there = settings_at(tmp_path, serve.port)
        keeper_at(there).look()
    keeper_at(there).start()
    directory = Directory.of(there)
    directory.refresh()
    (route,) = directory.table.routes
    assert [each.address for each in route.replicas] == ["10.0.0.1:4000"]
    assert route.arrival == "starting"
    assert not route.is_local
