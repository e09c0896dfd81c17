"""A generation starts beside the one that is called, and takes over; replicas come and go beside those that stay."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import requests

from appliance.multiplexer.whole_stream import digest_of
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.agreement import wait_for_agreement
from testing.arrows import dense_request, vectors
from testing.background import PAUSE_SECS
from testing.calling import PATIENT_SECS, WAYS, calling_all_the_time, new_text
from testing.engines import FAMILIES
from testing.random_models import random_model
from testing.running import TINY, TINY_WIDTH, RunningAppliance, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300)]
OTHER_WIDTH = 64
CLASSIFIER = str(FAMILIES / "roberta-classify")
NEW = "new"


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    with RunningAppliance(tmp_path_factory.mktemp("box"), seeds="") as running:
        yield running


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose vectors have another width."""
    return str(random_model(tmp_path_factory.mktemp("other") / "other", width=OTHER_WIDTH, layers=1, positions=64))


@pytest.fixture(scope="module")
def relabelled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The classifier with other names of its classes."""
    folder = tmp_path_factory.mktemp("relabelled") / "classifier"
    shutil.copytree(CLASSIFIER, folder)
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = {number: f"{NEW} {label}" for number, label in config["id2label"].items()}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def patch(box: RunningAppliance, name: str, body: Any, **query: Any) -> Any:
    return requests.patch(f"{box.url}/instances/{name}", json=body, params=query, timeout=60)


def swap(box: RunningAppliance, name: str, body: Any) -> dict[str, Any]:
    """The instance as it is when the next generation has taken over, which starts once the present one has answered."""

    def begun() -> Any:
        answer = patch(box, name, body, allow_incompatible="true", strategy="beside")
        return None if "has not answered yet" in answer.text else answer

    answer = eventually(begun)
    assert answer.status_code == 200, answer.text
    generation = answer.json()["replacement"]["generation"]
    return eventually(lambda: (seen := box.instance(name))["generation"] == generation and seen)


def events(box: RunningAppliance, name: str) -> list[str]:
    return [each["event"] for each in box.get("/events").json() if each["instance"] == name]


def processes(box: RunningAppliance, name: str) -> set[str]:
    """Of the group, as supervisord has them."""
    node = box.node()
    return {each.name for each in node.supervisor.processes() if each.group == name and each.pid}


def test_the_next_generation_takes_over_and_an_undo_takes_a_moment(box: RunningAppliance, other: str) -> None:
    box.create("swapped")
    before = box.wait_ready("swapped")
    answer = patch(box, "swapped", {"model_id": other}, allow_incompatible="true").json()
    assert (answer["model_id"], answer["generation"], answer["pid"]) == (TINY, 1, before["pid"])
    assert answer["replacement"] | {"needs": 0, "status": ""} == {
        "strategy": "beside",
        "generation": 2,
        "changes": ["model_id"],
        "needs": 0,
        "status": "",
        "replicas_ready": 0,
    }
    assert answer["replacement"]["needs"]["memory"] > 0
    refused = patch(box, "swapped", {"max_batch_tokens": 4096})
    assert (refused.status_code, refused.json()["code"]) == (409, "REPLACEMENT_UNDER_WAY")
    assert WAYS[0](box, "swapped") == TINY_WIDTH
    now = eventually(lambda: (seen := box.instance("swapped"))["generation"] == 2 and seen)
    assert (now["model_id"], now["status"], now["replacement"], now["last_error"]) == (other, "running", None, None)
    assert now["undo"]["changes"] == ["model_id"]
    assert now["undo"]["ready_until"] is not None
    assert [way(box, "swapped") for way in WAYS] == [OTHER_WIDTH] * len(WAYS)
    assert processes(box, "swapped") == {"swapped-0", "swapped@2-0"}

    back = box.post("/instances/swapped/undo").json()
    assert (back["model_id"], back["pid"], back["status"], back["generation"]) == (TINY, before["pid"], "running", 3)
    assert [way(box, "swapped") for way in WAYS] == [TINY_WIDTH] * len(WAYS)
    assert box.post("/instances/swapped/undo").json()["model_id"] == other
    assert events(box, "swapped").count("replaced") == 3
    assert not {"quarantined", "unhealthy", "fell_back"} & set(events(box, "swapped"))


def test_what_was_before_goes_when_its_time_is_over(box: RunningAppliance) -> None:
    box.create("brief", undo_secs=0)
    box.wait_ready("brief")
    swap(box, "brief", {"max_batch_tokens": 4096})
    eventually(lambda: processes(box, "brief") == {"brief@2-0"})
    assert "released" in events(box, "brief")
    assert box.instance("brief")["undo"] == {"changes": ["max_batch_tokens"], "ready_until": None}
    assert box.instance("brief")["status"] == "running"
    wait_for_agreement(box, box.node_id())
    undone = box.post("/instances/brief/undo").json()
    assert (undone["max_batch_tokens"], undone["replacement"]["generation"]) == (4096, 3)
    assert eventually(lambda: (seen := box.instance("brief"))["generation"] == 3 and seen)["max_batch_tokens"] == 16384


def test_a_dry_run_says_which_way_it_would_go(box: RunningAppliance) -> None:
    box.create("planned", port=box.instance_ports[1] - 2)
    before = box.wait_ready("planned")
    would = patch(box, "planned", {"max_batch_tokens": 4096}, dry_run="true").json()
    assert (would["replacement"]["strategy"], would["max_batch_tokens"]) == ("in_place", 4096)
    assert would["replacement"]["changes"] == ["max_batch_tokens"]
    refused = patch(box, "planned", {"max_batch_tokens": 4096}, strategy="beside")
    assert (refused.status_code, refused.json()["code"]) == (409, "CANNOT_START_BESIDE")
    assert f"port {before['port']}, which was asked for" in refused.json()["error"]
    nonsense = patch(box, "planned", {"max_batch_tokens": 4096}, strategy="sideways")
    assert (nonsense.status_code, "beside, in_place" in nonsense.json()["error"]) == (422, True)
    assert box.instance("planned")["pid"] == before["pid"]


def test_what_does_not_come_up_never_gets_a_call(box: RunningAppliance, tmp_path: Path) -> None:
    box.create("safe")
    before = box.wait_ready("safe")
    folder = tmp_path / "damaged"
    shutil.copytree(TINY, folder)
    (folder / "tokenizer.json").write_text("{}")  # found by the engine alone
    assert patch(box, "safe", {"model_id": str(folder)}, allow_incompatible="true").status_code == 200
    while "fell_back" not in events(box, "safe"):
        assert WAYS[0](box, "safe") == TINY_WIDTH
        time.sleep(PAUSE_SECS)
    after = box.instance("safe")
    assert (after["model_id"], after["pid"], after["status"], after["replacement"]) == (
        *(TINY, before["pid"], "running", None),
    )
    assert after["last_error"].startswith("Generation 2 did not take over")
    assert "Last log lines" in after["last_error"]
    eventually(lambda: processes(box, "safe") == {"safe-0"})
    assert not {"quarantined", "replaced"} & set(events(box, "safe"))
    wait_for_agreement(box, box.node_id())


def test_vectors_that_do_not_go_together_do_not_take_over(box: RunningAppliance, tmp_path: Path) -> None:
    """The files of the folder are other ones by now, which only the golden answers tell."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    box.create("drifts", model_id=str(folder))
    box.wait_ready("drifts")
    eventually(lambda: (Path(box.node().layout.golden) / "drifts.json").exists())
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    weights.write_bytes(content[:begin] + np.roll(np.frombuffer(content[begin:], np.float32), 1000).tobytes())
    assert patch(box, "drifts", {"max_batch_tokens": 4096}, strategy="beside").status_code == 200
    eventually(lambda: "fell_back" in events(box, "drifts"))
    assert "its vectors do not go together with those so far" in box.instance("drifts")["last_error"]
    assert box.instance("drifts")["max_batch_tokens"] == 16384
    assert swap(box, "drifts", {"max_batch_tokens": 4096})["last_error"] is None


@pytest.mark.parametrize("verb", ["undo", "stop", "sleep", "delete"])
def test_whoever_comes_between_has_his_way(box: RunningAppliance, other: str, verb: str) -> None:
    name = f"between-{verb}"
    box.create(name)
    before = box.wait_ready(name)
    assert patch(box, name, {"model_id": other}, allow_incompatible="true").json()["replacement"]
    answer = box.delete(f"/instances/{name}") if verb == "delete" else box.post(f"/instances/{name}/{verb}")
    assert answer.status_code == 200, answer.text
    if verb == "undo":
        assert (answer.json()["pid"], answer.json()["replacement"]) == (before["pid"], None)
        assert processes(box, name) == {f"{name}-0"}
    else:
        assert not processes(box, name)
    if verb in ("stop", "sleep"):
        now = box.instance(name)
        assert (now["model_id"], now["undo"]["changes"]) == (other, ["model_id"])
        assert box.post(f"/instances/{name}/{'start' if verb == 'stop' else 'wake'}").status_code == 200
        assert WAYS[0](box, name) == OTHER_WIDTH
    wait_for_agreement(box, box.node_id())


def test_replicas_come_and_go_and_the_others_stay(box: RunningAppliance) -> None:
    first = box.create("grows")["port"]
    pid = box.wait_ready("grows")["pid"]
    for replicas in (3, 2, 1, 2):
        assert patch(box, "grows", {"replicas": replicas}).status_code == 200
        found = box.wait_ready("grows")["replica_list"]
        assert (found[0]["port"], found[0]["pid"]) == (first, pid)
        assert len({each["port"] for each in found}) == len({each["pid"] for each in found}) == replicas
        assert processes(box, "grows") == {f"grows-{index}" for index in range(replicas)}
        assert WAYS[1](box, "grows") == TINY_WIDTH
    assert box.instance("grows")["generation"] == 1
    assert box.instance("grows")["restarts"] == 0
    assert "restarted" not in events(box, "grows")
    wait_for_agreement(box, box.node_id())


def test_no_call_fails_and_no_batch_is_mixed(box: RunningAppliance, other: str) -> None:
    """Replacements, undos and other numbers of replicas under load: each reply is of one model as a whole."""
    box.create("mixed", undo_secs=1)
    box.wait_ready("mixed")
    with calling_all_the_time(box, "mixed") as widths:
        for model in (other, TINY) * 2:
            swap(box, "mixed", {"model_id": model})
            assert patch(box, "mixed", {"replicas": 2 if model == other else 1}).status_code == 200
            assert box.post("/instances/mixed/undo").status_code == 200
            time.sleep(0.5)
            assert box.post("/instances/mixed/undo").status_code == 200
    assert set(widths) == {TINY_WIDTH, OTHER_WIDTH}
    wait_for_agreement(box, box.node_id())


def test_a_stream_of_batches_that_belong_together_is_of_one_generation(box: RunningAppliance, other: str) -> None:
    """As the gateway sends a list that is too long for one message. Others go on with the next generation."""
    box.create("streamed")
    box.wait_ready("streamed")
    swap(box, "streamed", {"model_id": other})
    stub = box.stub()  # one connection, and so one process of the multiplexer

    def width(reply: Any) -> int:
        return int(np.array(vectors(reply)).shape[1])

    def widths(*metadata: tuple[str, str]) -> list[int]:
        answered = threading.Event()
        seen: list[int] = []

        def messages() -> Iterator[Any]:
            yield dense_request("streamed", [new_text()])
            assert answered.wait(PATIENT_SECS)
            assert box.post("/instances/streamed/undo").status_code == 200
            eventually(lambda: width(stub.EmbedArrow(dense_request("streamed", [new_text()]))) != seen[0])
            yield dense_request("streamed", [new_text()])

        for reply in stub.EmbedArrowStream(messages(), timeout=PATIENT_SECS, metadata=metadata):
            seen.append(width(reply))
            answered.set()
        return seen

    assert widths() == [OTHER_WIDTH, TINY_WIDTH]
    mixed = [dense_request("streamed", [new_text()], noop=noop) for noop in (False, True, False)]
    assert len(list(stub.EmbedArrowStream(iter(mixed), timeout=PATIENT_SECS, metadata=(("x-tei-whole", "yes"),)))) == 3
    with pytest.raises(grpc.RpcError, match="was replaced meanwhile") as refused:
        widths(("x-tei-whole", "yes"))
    assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS


def test_a_stream_of_predictions_is_of_one_generation_where_its_caller_says_so(
    box: RunningAppliance, relabelled: str
) -> None:
    """As the gateway sends a list for `/predict`. The rest of a stream goes to another replica when its own ends."""
    box.create("classes", model_id=CLASSIFIER, undo_secs=0)
    box.wait_ready("classes")
    stub = box.stub()

    def question() -> mux.PredictPairRequest:
        inner = tei.PredictPairRequest(inputs=[new_text()], truncate=True)
        return mux.PredictPairRequest(target=mux.Target(instance_name="classes"), request=inner)

    def is_new(reply: Any) -> bool:
        return all(each.label.startswith(NEW) for each in reply.predictions)

    def asked(model: str, *metadata: tuple[str, str]) -> tuple[list[bool], dict[str, Any]]:
        """Of each reply whether it is the relabelled model's, where the instance is replaced after the first one."""
        answered, seen = threading.Event(), list[bool]()

        def messages() -> Iterator[Any]:
            yield question()
            assert answered.wait(PATIENT_SECS)
            swap(box, "classes", {"model_id": model})
            eventually(lambda: len(processes(box, "classes")) == 1)
            eventually(lambda: is_new(stub.PredictPair(question())) == (model == relabelled))
            yield question()

        replies = stub.PredictPairStream(messages(), timeout=PATIENT_SECS, metadata=metadata)
        for reply in replies:
            seen.append(is_new(reply))
            answered.set()
        return seen, dict(replies.initial_metadata())

    assert asked(relabelled) == ([False, True], {})
    with pytest.raises(grpc.RpcError, match="was replaced") as refused:
        asked(CLASSIFIER, ("x-tei-whole", "yes"))
    assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
    told = stub.PredictPairStream(iter([question()]), timeout=PATIENT_SECS, metadata=(("x-tei-whole", "yes"),))
    assert not is_new(next(told))
    (generations,) = [value for key, value in told.initial_metadata() if key == "x-tei-generations"]
    assert generations == digest_of((("classes", box.instance("classes")["generation"]),))

    def rest_of(earlier: str) -> int:
        metadata = (("x-tei-whole", earlier),)
        return len(list(stub.PredictPairStream(iter([question()]), timeout=PATIENT_SECS, metadata=metadata)))

    assert rest_of(generations) == 1
    with pytest.raises(grpc.RpcError, match="was replaced"):
        rest_of(digest_of((("classes", 1),)))
    with pytest.raises(grpc.RpcError, match=r'x-tei-whole is yes, or what x-tei-generations was, not "no"'):
        rest_of("no")


def test_what_never_answered_is_mended_by_another_spec(box: RunningAppliance, tmp_path: Path) -> None:
    """There is nothing that the vectors of the next generation would have to go together with."""
    folder = tmp_path / "damaged"
    shutil.copytree(TINY, folder)
    good = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text("{}")
    box.create("mended", model_id=str(folder))
    eventually(lambda: box.instance("mended")["status"] == "failed", 90)
    (folder / "tokenizer.json").write_text(good)
    assert patch(box, "mended", {"max_batch_tokens": 4096}, strategy="beside").status_code == 200
    assert eventually(lambda: (seen := box.instance("mended"))["generation"] == 2 and seen)["status"] == "running"
    # Nobody wants to go back to what never answered.
    eventually(lambda: box.instance("mended")["undo"]["ready_until"] is None)


def test_an_undo_of_what_does_not_run_any_more_starts_it_anew(box: RunningAppliance) -> None:
    box.create("stopped-behind")
    box.wait_ready("stopped-behind")
    swap(box, "stopped-behind", {"max_batch_tokens": 4096})
    box.supervisorctl("stop", "stopped-behind:stopped-behind-0")
    undone = box.post("/instances/stopped-behind/undo").json()
    assert undone["replacement"]["generation"] == 3
    now = eventually(lambda: (seen := box.instance("stopped-behind"))["generation"] == 3 and seen)
    assert (now["max_batch_tokens"], now["status"]) == (16384, "running")
    wait_for_agreement(box, box.node_id())
