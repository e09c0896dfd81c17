"""An instance whose model is not here: it is fetched first, and no process starts that cannot work."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.engines import FAMILIES, files_of
from testing.hub import Hub
from testing.running import RunningAppliance, eventually

pytestmark = pytest.mark.processes

FILES = files_of("bert-cls")
WEIGHTS = "model.safetensors"
FOREIGN = {**FILES, "config.json": json.dumps({**json.loads(FILES["config.json"]), "model_type": "mamba"}).encode()}


@pytest.fixture(scope="module")
def node(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    folder = tmp_path_factory.mktemp("supply")
    environ = hub.environment(folder / "hf", HF_HUB_DOWNLOAD_TIMEOUT="1")
    with RunningAppliance(folder, seeds="", settings="health_check_interval_secs = 1", environ=environ) as running:
        yield running


def embed(node: RunningAppliance, name: str) -> int:
    request = mux.EmbedRequest(target=mux.Target(instance_name=name), request=tei.EmbedRequest(inputs="hello"))
    return len(node.stub().Embed(request, timeout=20).embeddings)


def refused(node: RunningAppliance, name: str, **fields: Any) -> tuple[int, str, str]:
    """Status, code and words; and nothing is there afterwards."""
    answer = node.post("/instances", {"name": name, "model_id": "org/none", **fields})
    assert node.get(f"/instances/{name}").status_code == 404
    return answer.status_code, answer.json()["code"], answer.json()["error"]


def started(node: RunningAppliance, name: str) -> bool:
    """Whether a process of the instance ever wrote to its log."""
    return (node.folder / "logs" / f"{name}-0.log").exists()


def failed(node: RunningAppliance, name: str) -> str:
    eventually(lambda: node.instance(name)["status"] == "failed", 30)
    return str(node.instance(name)["last_error"])


def test_a_model_that_is_not_here_is_downloaded_and_then_serves(node: RunningAppliance, hub: Hub) -> None:
    hub.add("org/first", FILES)
    hub.misbehave(WEIGHTS, slow=20_000)
    created = node.create("first", model_id="org/first", replicas=2)
    assert (created["status"], created["pid"]) == ("downloading", None)
    eventually(lambda: (node.instance("first")["progress"] or {}).get("bytes_total"), 20)
    while_away = node.instance("first")
    assert while_away["status"] == "downloading"
    assert while_away["last_error"] is None
    assert while_away["progress"]["bytes_total"] == sum(map(len, FILES.values()))
    assert not started(node, "first")
    with pytest.raises(grpc.RpcError) as refusal:
        embed(node, "first")
    assert (refusal.value.code(), "not on this machine yet" in refusal.value.details()) == (
        grpc.StatusCode.UNAVAILABLE,
        True,
    )
    assert node.post("/instances/first/start").json()["code"] == "ALREADY_RUNNING"
    hub.behave()
    node.wait_ready("first")
    ready = node.instance("first")
    assert (ready["status"], ready["replicas_ready"], ready["progress"], ready["restarts"]) == ("running", 2, None, 0)
    assert embed(node, "first") > 0
    assert node.get("/health").json()["status"] == "healthy"
    node.delete("/instances/first")


def test_two_instances_wait_for_one_download(node: RunningAppliance, hub: Hub) -> None:
    hub.add("org/shared", FILES)
    for name in ("one", "other"):
        node.create(name, model_id="org/shared")
    for name in ("one", "other"):
        node.wait_ready(name)
        assert embed(node, name) > 0
    assert len(hub.seen("GET", f"org/shared/resolve/{hub.repos['org/shared'].refs['main']}/{WEIGHTS}")) <= 1
    for name in ("one", "other"):
        node.delete(f"/instances/{name}")


def test_a_model_that_cannot_come_is_a_reason_and_no_process(node: RunningAppliance, hub: Hub) -> None:
    assert node.create("late", model_id="org/late")["status"] == "downloading"
    assert "org/late" in failed(node, "late")
    assert node.instance("late")["restarts"] == 0
    assert not started(node, "late")
    assert node.get("/health").json()["status"] == "degraded"
    hub.add("org/late", FILES)  # now it is there
    assert node.post("/instances/late/start").json()["status"] == "downloading"
    node.wait_ready("late")
    node.delete("/instances/late")


def test_a_model_that_the_engine_cannot_serve_is_a_reason_and_no_process(node: RunningAppliance, hub: Hub) -> None:
    hub.add("org/mamba", FOREIGN)
    node.create("mamba", model_id="org/mamba")
    reason = failed(node, "mamba")
    assert "model type mamba" in reason
    assert "Traceback" not in reason
    assert not started(node, "mamba")
    answer = node.post("/instances/mamba/restart")  # its files are here by now
    assert (answer.status_code, answer.json()["code"]) == (422, "UNSUPPORTED_MODEL")
    node.delete("/instances/mamba")
    # The next one is refused at once.
    assert refused(node, "again", model_id="org/mamba")[:2] == (422, "UNSUPPORTED_MODEL")


@pytest.mark.parametrize(
    ("fields", "status", "code", "words"),
    [
        ({"download": "never"}, 409, "MODEL_NOT_DOWNLOADED", "download it first"),
        ({"model_id": "/nowhere/model"}, 422, "MODEL_NOT_FOUND", "/nowhere/model"),
        ({"model_id": "no id at all"}, 422, "MODEL_NOT_FOUND", "no hub id"),
        ({"revision": "HEAD~1"}, 422, "MODEL_NOT_FOUND", "revision must be a branch, tag or commit"),
        ({"extra_args": ["--huggingface-hub-cache", "/elsewhere"]}, 409, "MODEL_NOT_DOWNLOADED", "/elsewhere"),
        ({"extra_args": ["--max-batch-reqests", "8"]}, 422, "VALIDATION_ERROR", "--max-batch-reqests"),
        ({"extra_args": ["--max-batch-requests", "eight"]}, 422, "VALIDATION_ERROR", "--max-batch-requests"),
        ({"extra_args": ["stray"]}, 422, "VALIDATION_ERROR", "stray"),
        ({"extra_args": ["--help"]}, 422, "VALIDATION_ERROR", "--help"),
        ({"dtype": "float16"}, 422, "UNSUPPORTED_MODEL", "float32"),
        ({"extra_args": ["--runtime", "openvino"]}, 422, "UNSUPPORTED_MODEL", "pip install"),
    ],
    ids=str,
)
def test_what_can_never_start_is_refused(
    node: RunningAppliance, fields: dict[str, Any], status: int, code: str, words: str
) -> None:
    answer = refused(node, "never", **fields)
    assert answer[:2] == (status, code), answer
    assert words in answer[2]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pooling": "splade"}, "splade"),
        ({"extra_args": ["--default-prompt-name", "nope"]}, "prompts"),
    ],
    ids=str,
)
def test_what_the_folder_of_a_model_excludes_is_refused(
    node: RunningAppliance, fields: dict[str, Any], words: str
) -> None:
    status, _, message = refused(node, "never", model_id=str(FAMILIES / "bert-cls"), **fields)
    assert status == 422
    assert words in message


def test_a_folder_that_lacks_something_is_refused_by_its_name(node: RunningAppliance, tmp_path: Path) -> None:
    for name, content in FILES.items():
        if name != "tokenizer.json":
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
    assert refused(node, "never", model_id=str(tmp_path))[1:] == (
        "MODEL_INCOMPLETE",
        f'Model "{tmp_path}" is a folder without tokenizer.json: add what is missing',
    )


def test_flags_of_tei_without_a_meaning_here_are_logged(node: RunningAppliance) -> None:
    given = ["--otlp-endpoint", "http://x:4317", "--disable-spans", "--payload-limit=9", "--hf-token", "hf_secret"]
    node.create("flags", model_id=str(FAMILIES / "bert-cls"), extra_args=given)
    node.wait_ready("flags")
    lines = "\n".join(node.get("/instances/flags/logs").json()["lines"])
    for flag in ("--otlp-endpoint", "--disable-spans", "--payload-limit", "--hf-token"):
        assert f"{flag} is ignored" in lines
    assert "hf_secret" not in lines
    node.delete("/instances/flags")


def test_a_download_goes_on_after_a_new_start_and_what_was_lost_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    """`down` in the middle of it; then the cache is deleted while the appliance is down."""
    hub.add("org/again", FILES)
    hub.misbehave(WEIGHTS, slow=20_000)
    environ = hub.environment(tmp_path / "hf", HF_HUB_DOWNLOAD_TIMEOUT="1")
    seeds = '[[instances]]\nname = "again"\nmodel_id = "org/again"\n'
    with RunningAppliance(tmp_path, seeds=seeds, environ=environ) as node:
        eventually(lambda: (node.instance("again")["progress"] or {}).get("bytes_done"), 20)
        node.stop()
        hub.behave()
        node.up()
        node.wait_ready("again")
        node.stop()
        for snapshot in (tmp_path / "hf").rglob("snapshots"):
            subprocess.run(["rm", "-r", str(snapshot)], check=True)
        node.up()
        node.wait_ready("again")
        assert node.instance("again")["restarts"] == 0
        assert embed(node, "again") > 0


def test_a_dry_run_says_that_it_would_be_downloaded(node: RunningAppliance) -> None:
    told = node.post("/instances?dry_run=true", {"name": "dry", "model_id": "org/dry"})
    assert (told.status_code, told.json()["status"], told.json()["last_error"]) == (200, "downloading", None)


def test_a_revision_that_is_not_registered_is_refused_by_its_name(node: RunningAppliance, hub: Hub) -> None:
    hub.add("org/revised", FILES)
    hub.add("org/revised", FILES, revision="v1")
    assert node.post("/models", {"model_id": "org/revised"}).status_code == 201
    status, code, words = refused(node, "revised", model_id="org/revised", revision="v1")
    assert (status, code) == (409, "MODEL_NOT_DOWNLOADED")
    assert "registered at revision main" in words
    assert node.post("/models", {"model_id": "org/revised", "revision": "v1"}).status_code == 200
    node.create("revised", model_id="org/revised", revision="v1")
    node.wait_ready("revised")
    node.delete("/instances/revised")


def test_a_revision_is_fetched_whatever_git_allows_in_its_name(node: RunningAppliance, hub: Hub) -> None:
    """Its name was written into the registry and could not be read back."""
    hub.add("org/tagged", FILES, revision="1.0+onnx")
    node.create("tagged", model_id="org/tagged", revision="1.0+onnx")
    node.wait_ready("tagged")
    node.delete("/instances/tagged")


def test_a_job_that_an_operator_stops_is_a_reason(node: RunningAppliance, hub: Hub) -> None:
    hub.add("org/halted", FILES)
    hub.misbehave(WEIGHTS, slow=2_000)
    node.create("halted", model_id="org/halted")
    eventually(lambda: (node.instance("halted")["progress"] or {}).get("bytes_done"), 20)
    (job,) = [line.split()[0] for line in node.supervisorctl("status").splitlines() if line.startswith("job.")]
    node.supervisorctl("stop", job)
    hub.behave()
    eventually(lambda: node.instance("halted")["status"] == "failed", 90)
    assert "stopped with supervisorctl" in node.instance("halted")["last_error"]
    assert node.post("/instances/halted/start").status_code == 200
    node.wait_ready("halted")
    node.delete("/instances/halted")


def test_what_is_held_back_starts_when_its_reason_is_over(tmp_path: Path) -> None:
    """A folder that was not mounted at one start is there at the next."""
    folder, away = tmp_path / "model", tmp_path / "away"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    seeds = f'[[instances]]\nname = "mounted"\nmodel_id = "{folder}"\n'
    with RunningAppliance(tmp_path, seeds=seeds) as node:
        node.wait_ready("mounted")
        node.stop()
        folder.rename(away)
        node.up()
        assert "no folder on this machine" in failed(node, "mounted")
        assert node.instance("mounted")["restarts"] == 0
        node.stop()
        away.rename(folder)
        node.up()
        node.wait_ready("mounted")
