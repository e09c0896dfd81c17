"""`appliance run MODEL`: one command from the name of a model to its first answer, whatever the model does."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from appliance.cli.run import name_for
from appliance.core.instance import InstanceSpec
from testing.engines import FAMILIES, HEADS, files_of
from testing.hub import Hub
from testing.running import RunningAppliance

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def node(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    folder = tmp_path_factory.mktemp("run")
    with RunningAppliance(folder, seeds="", environ=hub.environment(folder / "hf")) as running:
        yield running


def run(node: RunningAppliance, *arguments: str) -> dict[str, Any]:
    done = node.cli("run", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_a_model_of_the_hub_is_downloaded_and_answers(node: RunningAppliance, hub: Hub) -> None:
    hub.add("org/Tiny-Model.v1", files_of("bert-cls"))
    done = node.cli("run", "org/Tiny-Model.v1")
    assert done.returncode == 0, done.stderr
    assert "Tiny-Model.v1 serves org/Tiny-Model.v1 after" in done.stdout
    assert '"hello world" is [' in done.stdout
    assert "appliance embed TEXT --instance Tiny-Model.v1" in done.stdout
    # Once more, with the instance stopped: it is the same one.
    assert node.post("/instances/Tiny-Model.v1/stop").status_code == 200
    other = node.cli("run", "org/Tiny-Model.v1", "--set", "pooling=mean")  # which it has not
    assert (other.returncode, "pooling" in other.stderr) == (1, True)
    told = run(node, "org/Tiny-Model.v1")
    assert (told["name"], told["instance"]["status"]) == ("Tiny-Model.v1", "running")


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("bert-rerank", (), "ranks first"),
        ("roberta-classify", (), "with score"),
        ("bert-splade", ("--set", "pooling=splade"), "weighted tokens"),
        ("mpnet-mean", (), "numbers"),
        ("colbert", (), "token vectors"),
        ("qwen3-judge", (), "ranks first"),
        ("bge-m3", (), "numbers"),
    ],
)
def test_the_first_answer_fits_the_model(
    node: RunningAppliance, family: str, fields: tuple[str, ...], words: str
) -> None:
    told = run(node, str((HEADS if (HEADS / family).exists() else FAMILIES) / family), *fields)
    assert told["name"] == family
    assert words in told["answer"]
    node.delete(f"/instances/{family}")


def test_what_cannot_run_says_why(node: RunningAppliance) -> None:
    missing = node.cli("run", "org/nowhere")
    assert missing.returncode == 1
    assert "org/nowhere" in missing.stderr
    node.create("taken", model_id=str(FAMILIES / "bert-cls"))
    other = node.cli("run", str(FAMILIES / "mpnet-mean"), "--name", "taken")
    assert (other.returncode, "choose another name with --name" in other.stderr) == (1, True)
    unknown = node.cli("run", str(FAMILIES / "bert-cls"), "--name", "taken", "--set", "poolin=cls")  # it was a KeyError
    assert unknown.returncode == 1
    assert unknown.stderr.startswith("appliance: ")
    assert "poolin" in unknown.stderr


@pytest.mark.parametrize(
    "model_id",
    ["BAAI/bge-large-en-v1.5", "/models/my model/", "org/4b", "control", "job.1", "monitor", "org/" + "a" * 90, "/ü"],
)
def test_every_model_has_a_name(model_id: str) -> None:
    name = name_for(model_id)
    assert InstanceSpec.parse({"name": name, "model_id": "m"}).name == name


def test_a_mistyped_id_does_not_stay(node: RunningAppliance, hub: Hub) -> None:
    missing = node.cli("models", "download", "org/tpyo")
    assert (missing.returncode, "org/tpyo" in missing.stderr) == (1, True)
    assert "org/tpyo" not in [model["model_id"] for model in node.get("/models").json()]
    assert node.post("/models", {"model_id": "org/wanted"}).status_code == 201  # this one somebody asked to keep
    assert node.cli("models", "download", "org/wanted").returncode == 1
    assert "org/wanted" in [model["model_id"] for model in node.get("/models").json()]
