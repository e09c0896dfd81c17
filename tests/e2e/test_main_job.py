"""The main job on a real model: started as a newcomer starts it, embedded over gRPC, managed over REST."""

import json
import math
import shutil
from pathlib import Path

import grpc
import numpy as np
import pytest

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.engines import FAMILIES
from testing.running import MINILM, RunningAppliance, eventually
from testing.texts import mixed_texts

pytestmark = pytest.mark.e2e
TARGETS = {
    "name": mux.Target(instance_name="minilm"),
    "model": mux.Target(model_id=MINILM),
    "index": mux.Target(instance_index=0),
}


def embed_request(text: str, target: mux.Target = TARGETS["name"]) -> mux.EmbedRequest:
    return mux.EmbedRequest(target=target, request=tei.EmbedRequest(inputs=text, truncate=True, normalize=True))


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_every_kind_of_target_reaches_the_model(appliance: RunningAppliance, target: mux.Target) -> None:
    reply = appliance.stub().Embed(embed_request("hello world", target), timeout=10)
    assert len(reply.embeddings) == 384
    assert math.sqrt(math.fsum(value * value for value in reply.embeddings)) == pytest.approx(1, abs=1e-5)
    assert reply.metadata.compute_tokens == 4


def test_vectors_equal_sentence_transformers(appliance: RunningAppliance) -> None:
    """Cosine >= 0.9999 to the numbers of scripts/reference_minilm.py, through the multiplexer, in order."""
    expected = np.load("tests/data/minilm.npz")["vectors"].astype(np.float32)
    texts = mixed_texts(1000)[:300]
    replies = appliance.stub().EmbedStream((embed_request(text) for text in texts), timeout=100)
    found = np.array([reply.embeddings for reply in replies], np.float32)
    assert found.shape == (300, 384)
    expected = expected[:300] / np.linalg.norm(expected[:300], axis=1, keepdims=True)
    assert (found * expected).sum(axis=1).min() >= 0.9999


def test_info_tells_the_model(appliance: RunningAppliance) -> None:
    info = appliance.stub().Info(mux.InfoRequest(target=TARGETS["name"]), timeout=10)
    assert (info.model_id, info.max_input_length, info.model_dtype) == (MINILM, 256, "float32")


def test_unary_replies_carry_compute_times(appliance: RunningAppliance) -> None:
    _, call = appliance.stub().Embed.with_call(embed_request("hello"), timeout=10)
    assert dict(call.initial_metadata())["x-compute-tokens"] == "3"


def test_an_unknown_instance_is_named_with_what_exists(appliance: RunningAppliance) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        appliance.stub().Embed(embed_request("x", mux.Target(instance_name="minilmm")), timeout=10)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert 'did you mean "minilm"' in caught.value.details()


def test_the_command_line_embeds_and_reports(appliance: RunningAppliance) -> None:
    embedded = appliance.cli("embed", "hello world")
    assert embedded.returncode == 0, embedded.stderr
    assert len(json.loads(embedded.stdout)) == 384
    status = appliance.cli("status")
    assert status.returncode == 0
    assert "minilm" in status.stdout
    assert "running" in status.stdout


def test_lifecycle_over_rest(own_appliance: RunningAppliance) -> None:
    running = own_appliance
    created = running.create("one", replicas=2)
    assert created["status"] == "starting"
    ready = running.wait_ready("one")
    assert [replica["status"] for replica in ready["replica_list"]] == ["running", "running"]
    assert running.post("/instances/one/start").status_code == 409

    stopped = running.post("/instances/one/stop")
    assert (stopped.status_code, stopped.json()["status"]) == (200, "stopped")
    assert running.post("/instances/one/stop").json()["code"] == "NOT_RUNNING"

    def refused() -> bool:
        with pytest.raises(grpc.RpcError) as caught:
            running.stub().Embed(embed_request("x", mux.Target(instance_name="one")), timeout=10)
        return bool(caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION)

    eventually(refused, timeout=5)  # the multiplexer looks at the state file a few times a second

    assert running.post("/instances/one/start").status_code == 200
    before = running.wait_ready("one")["replica_list"]
    assert running.post("/instances/one/restart").status_code == 200
    eventually(lambda: not running.instance("one")["rolling"], timeout=60)  # one replica after the other
    after = running.wait_ready("one")
    assert not {each["pid"] for each in before} & {each["pid"] for each in after["replica_list"]}
    assert after["restarts"] == 2

    deleted = running.delete("/instances/one")
    assert (deleted.status_code, deleted.json()["name"]) == (200, "one")
    assert running.get("/instances/one").json()["code"] == "INSTANCE_NOT_FOUND"
    assert "one" not in running.supervisorctl("status")
    assert not running.processes_of("one")


def test_stop_is_sticky_over_a_restart_of_everything(own_appliance: RunningAppliance) -> None:
    own_appliance.create("kept")
    own_appliance.create("halted")
    own_appliance.wait_ready("kept")
    own_appliance.post("/instances/halted/stop")
    assert own_appliance.stop() == 0
    own_appliance.up()
    own_appliance.wait_ready("kept")
    assert own_appliance.instance("halted")["status"] == "stopped"


def test_supervisorctl_shows_and_controls_everything(own_appliance: RunningAppliance) -> None:
    own_appliance.create("bge-small")
    own_appliance.wait_ready("bge-small")
    eventually(lambda: "bge-small:bge-small-0            RUNNING" in own_appliance.supervisorctl("status"))
    for program in ("control", "multiplexer", "gateway", "monitor"):
        assert program in own_appliance.supervisorctl("status")
    own_appliance.supervisorctl("stop", "bge-small:*")
    assert own_appliance.instance("bge-small")["status"] == "stopped"
    own_appliance.create("other")  # another change does not undo the operator's
    assert own_appliance.instance("bge-small")["status"] == "stopped"
    assert own_appliance.post("/instances/bge-small/start").status_code == 200
    own_appliance.wait_ready("bge-small")


def test_a_bad_model_fails_with_the_reason(own_appliance: RunningAppliance, tmp_path: Path) -> None:
    """Of which only the bytes of its weights are wrong: that is found when they are read."""
    shutil.copytree(FAMILIES / "bert-cls", tmp_path / "bad")
    weights = tmp_path / "bad" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    own_appliance.create("bad", model_id=str(tmp_path / "bad"))

    def failed() -> bool:
        return bool(own_appliance.instance("bad")["status"] == "failed")

    eventually(failed, timeout=40)
    assert "was the download cut off?" in own_appliance.instance("bad")["last_error"]
    assert own_appliance.get("/health").json()["status"] == "degraded"
    lines = own_appliance.get("/instances/bad/logs", start=-2).json()
    assert len(lines["lines"]) == 2
