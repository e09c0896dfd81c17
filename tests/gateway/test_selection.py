"""Which instance answers where peers have some, too: what is here is served here, over HTTP as over gRPC."""

from pathlib import Path

import falcon
import falcon.testing
import pytest

from appliance.core import routing, state
from appliance.core.routing import Target
from appliance.drivers.statefile import StateFile
from appliance.gateway.selection import InstanceSelector
from appliance.node.context import now
from appliance.node.directory import Directory
from testing.specs import configured, spec

PEERS = """
[[instances]]
name = "a"
model_id = "org/theirs"
aliases = ["ada", "theirs"]
addresses = ["10.0.0.1:9001"]

[[instances]]
name = "b"
model_id = "org/ours"
addresses = ["10.0.0.1:9001"]

[[instances]]
name = "bert"
model_id = "org/theirs"
addresses = ["10.0.0.1:9001"]
"""


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    settings = configured(data_dir=str(tmp_path), peers=["10.0.0.1:9001"])
    Path(settings.layout.peers).write_text(PEERS)
    file = StateFile(Path(settings.state_file), now, lambda message: None)
    ours = spec("ours", model_id="org/ours", aliases=("ada", "bert"))
    file.update(lambda before: state.add(before, ours, settings, (), now()))
    directory = Directory.of(settings)
    directory.refresh()
    return directory


def selected(directory: Directory, model: str | None, **headers: str) -> list[str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = falcon.Request(falcon.testing.create_environ(headers=named))
    request.context.instance = None
    return [each.name for each in InstanceSelector(directory).select(request, model, ()).instances]


@pytest.mark.parametrize("word", ["ours", "ada", "bert", "org/ours"])
def test_what_is_here_is_served_here_whatever_peers_call_theirs(directory: Directory, word: str) -> None:
    assert selected(directory, word) == ["ours"]
    target = Target(instance_name=word) if word == "ours" else Target(model_id=word)
    assert [route.name for route in routing.routes_of(directory.table, target)] == ["ours"]


def test_by_the_header_as_well(directory: Directory) -> None:
    assert selected(directory, None, X_TEI_Model="org/ours") == ["ours"]
    assert selected(directory, None, X_TEI_Model="ada") == ["ours"]


def test_what_is_not_here_is_served_there(directory: Directory) -> None:
    assert selected(directory, "a") == ["a"]
    assert selected(directory, "theirs") == ["a"]
    assert selected(directory, "org/theirs") == ["a", "bert"]


def test_peers_change_nothing_for_those_who_name_nobody(directory: Directory) -> None:
    assert selected(directory, None) == ["ours"]
