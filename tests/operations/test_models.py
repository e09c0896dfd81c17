"""The registry over REST: the real hub client against a loopback hub, in jobs under supervisord."""

import hashlib
import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import requests

from appliance.drivers import hub as cache
from testing.engines import FAMILIES, files_of
from testing.hub import Hub
from testing.running import MINILM, RunningAppliance, eventually, free_ports

pytestmark = pytest.mark.processes

FILES = files_of("bert-cls")
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def node(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    folder = tmp_path_factory.mktemp("registry")
    environ = hub.environment(folder / "hf", HF_HUB_DOWNLOAD_TIMEOUT="1")
    settings = f'models = ["{MINILM}"]\nhealth_check_interval_secs = 1'
    with RunningAppliance(folder, seeds="", settings=settings, environ=environ) as running:
        yield running


@pytest.fixture
def model(hub: Hub, request: pytest.FixtureRequest) -> Iterator[str]:
    """The id of a fresh small model on the hub."""
    name = f"org/{abs(hash(request.node.name)) % 10**8}"
    hub.add(name, FILES)
    yield name
    hub.behave()


def path(model_id: str, verb: str = "") -> str:
    return f"/models/{quote(model_id, safe='')}{verb and '/' + verb}"


def show(node: RunningAppliance, model_id: str) -> dict[str, Any]:
    found: dict[str, Any] = node.get(path(model_id)).json()
    return found


def add(node: RunningAppliance, model_id: str, **fields: Any) -> dict[str, Any]:
    answer = node.post("/models", {"model_id": model_id, **fields})
    assert answer.status_code == 201, answer.text
    assert answer.headers["Location"] == path(model_id)
    found: dict[str, Any] = answer.json()
    return found


def refused(answer: requests.Response, status: int, code: str) -> str:
    assert (answer.status_code, answer.json().get("code")) == (status, code), answer.text
    return str(answer.json()["error"])


def jobs(node: RunningAppliance) -> list[str]:
    return [line.split()[0] for line in node.supervisorctl("status").splitlines() if line.startswith("job.")]


def test_a_model_goes_from_available_to_serving(node: RunningAppliance, hub: Hub, model: str) -> None:
    assert add(node, model)["status"] == "available"
    assert node.post("/models", {"model_id": model}).status_code == 200
    answer = node.post(path(model, "download"))
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["status"], found["downloaded"], found["source"]) == ("downloaded", True, "hub")
    assert sorted(file["name"] for file in found["files"]) == sorted(FILES)
    assert all(file["size"] == len(FILES[file["name"]]) and len(file["sha256"]) == 64 for file in found["files"])
    assert found["cache_size_bytes"] == sum(map(len, FILES.values()))
    assert found["metadata"]["task"] == "dense"
    assert found["metadata"]["hidden_size"] == 32
    assert found["metadata"]["parameters"] > 1000
    answer = node.post(path(model, "load"))
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["status"], found["verification_error"]) == ("verified", None)
    assert found["verification"]["dimensions"] == 32
    assert found["verification"]["memory_bytes"] > 10**7
    assert found["last_verified"].startswith("20")
    node.create("served", model_id=model)
    node.wait_ready("served")
    assert "used by served" in refused(node.delete(path(model)), 409, "MODEL_IN_USE")
    node.delete("/instances/served")
    assert node.delete(path(model)).status_code == 200
    refused(node.get(path(model)), 404, "MODEL_NOT_FOUND")
    assert jobs(node) == []


def test_minilm_of_the_package_is_verified_and_serves(node: RunningAppliance) -> None:
    (found,) = (each for each in node.get("/models").json() if each["model_id"] == MINILM)
    assert (found["status"], found["source"]) == ("downloaded", "package")
    found = node.post(path(MINILM, "load")).json()
    assert (found["status"], found["verification"]["dimensions"]) == ("verified", 384)
    assert show(node, MINILM)["metadata"]["num_hidden_layers"] == 6


def test_a_job_that_is_killed_goes_on_where_it_was(node: RunningAppliance, hub: Hub) -> None:
    name, big = "org/big", {**FILES, WEIGHTS: FILES[WEIGHTS] + bytes(12_000_000)}
    hub.add(name, big)
    hub.misbehave(WEIGHTS, slow=4_000_000)
    add(node, name)
    answer = node.post(path(name, "download") + "?wait=false")
    assert (answer.status_code, answer.json()["status"]) == (202, "downloading")
    assert answer.headers["Location"] == path(name)
    half = eventually(lambda: (told := show(node, name)["progress"]) and told["bytes_done"] > 6_000_000 and told)
    assert half["bytes_total"] == sum(map(len, big.values()))
    assert half["bytes_per_sec"] > 0
    assert "downloaded since" in refused(node.post(path(name, "download")), 409, "MODEL_BUSY")
    refused(node.post(path(name, "load")), 409, "MODEL_BUSY")
    refused(node.delete(path(name)), 409, "MODEL_BUSY")
    (process,) = (p for p in node.left_over() if "appliance.jobs" in p.cmdline())
    process.send_signal(signal.SIGKILL)
    eventually(lambda: show(node, name)["status"] == "downloaded", 30)
    ranges = [
        int(seen.range.removeprefix("bytes=").partition("-")[0]) for seen in hub.seen("GET", WEIGHTS) if seen.range
    ]
    assert max(ranges) > 4_000_000
    hub.behave()
    assert show(node, name)["progress"] is None


def test_control_may_die_and_clients_may_leave_while_it_downloads(node: RunningAppliance, hub: Hub, model: str) -> None:
    hub.misbehave(WEIGHTS, slow=40_000)
    add(node, model)
    with pytest.raises(requests.Timeout):
        requests.post(node.url + path(model, "download"), timeout=0.5)
    node.supervisorctl("restart", "control")
    eventually(lambda: show(node, model)["status"] == "downloaded", 30)


def test_a_download_is_cancelled_and_taken_up_again(node: RunningAppliance, hub: Hub, model: str) -> None:
    hub.misbehave(WEIGHTS, hang=50_000)
    add(node, model)
    node.post(path(model, "download") + "?wait=false")
    eventually(lambda: show(node, model)["progress"]["step"] == "downloading")
    answer = node.post(path(model, "cancel"))
    assert (answer.status_code, answer.json()["status"]) == (200, "available")
    assert "Cancelled" in answer.json()["download_error"]
    assert jobs(node) == []
    hub.behave()
    assert node.post(path(model, "download")).json()["status"] == "downloaded"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"flipped": 1000}, "thrown away"),
        ({"short": 1000}, "came with 1000 bytes"),
        ({"status": 404}, "404"),
        ({"status": 429, "retry_after": 1}, "429"),
        ({"status": 500}, "500"),
        ({"silent": True}, "does not answer"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_file_that_comes_wrong_is_refused_by_name(
    node: RunningAppliance, hub: Hub, model: str, fault: dict[str, Any], words: str
) -> None:
    hub.misbehave(WEIGHTS, **fault)
    add(node, model)
    began = time.monotonic()
    message = refused(node.post(path(model, "download")), 500, "MODEL_DOWNLOAD_FAILED")
    assert words in message
    assert time.monotonic() - began < 60
    found = show(node, model)
    assert (found["status"], found["downloaded"]) == ("available", False)
    assert found["download_error"] == message
    hub.behave()
    assert node.post(path(model, "download")).json()["status"] == "downloaded"
    assert show(node, model)["download_error"] is None


def test_a_gated_model_needs_its_token(node: RunningAppliance, hub: Hub, model: str) -> None:
    hub.require_token(model, "hf_secret")
    add(node, model)
    assert "HF_TOKEN" in refused(node.post(path(model, "download")), 500, "MODEL_DOWNLOAD_FAILED")


def test_what_does_not_exist_says_so(node: RunningAppliance, hub: Hub, model: str) -> None:
    refused(node.post(path("org/unheard", "download")), 404, "MODEL_NOT_FOUND")
    add(node, "org/unheard")
    assert "no model" in refused(node.post(path("org/unheard", "download")), 500, "MODEL_DOWNLOAD_FAILED")
    assert "not downloaded" in refused(node.post(path("org/unheard", "load")), 500, "MODEL_LOAD_FAILED")
    add(node, model, revision="v9")
    assert "no such revision" in refused(node.post(path(model, "download")), 500, "MODEL_DOWNLOAD_FAILED")


def test_a_pinned_revision_is_another_model(node: RunningAppliance, hub: Hub, model: str) -> None:
    first = hub.add(model, FILES)
    second = hub.add(model, {**FILES, "config.json": FILES["config.json"] + b"\n"}, revision="v2")
    add(node, model, revision="v2")
    found = node.post(path(model, "download")).json()
    assert (found["revision"], found["commit"]) == ("v2", second)
    assert first != second


def test_pickles_are_refused(node: RunningAppliance, hub: Hub) -> None:
    hub.add("org/pickled", {**{k: v for k, v in FILES.items() if k != WEIGHTS}, "pytorch_model.bin": b"pickle"})
    add(node, "org/pickled")
    message = refused(node.post(path("org/pickled", "download")), 500, "MODEL_DOWNLOAD_FAILED")
    assert "allow_pickle" in message


ODD: list[tuple[str, Callable[[Path], object]]] = [
    ("failed", lambda config: config.write_text("{")),
    ("failed", lambda config: config.write_text('{"architectures": 7, "id2label": 1, "model_type": []}')),
    ("available", lambda config: config.mkdir()),
]


def test_a_model_folder_of_the_wrong_shape_is_listed_with_what_is_wrong_and_can_be_deleted(
    node: RunningAppliance,
) -> None:
    repositories = {}
    for number, (_, odd) in enumerate(ODD):
        repository = Path(node.environ["HF_HOME"], "hub", f"models--odd--{number}")
        shutil.copytree(FAMILIES / "bert-cls", snapshot := repository / "snapshots" / ("a" * 40))
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("a" * 40)
        (snapshot / "config.json").unlink()
        odd(snapshot / "config.json")
        repositories[f"odd/{number}"] = repository
    answer = node.get("/models")
    assert answer.status_code == 200, answer.text
    listed = {each["model_id"]: each for each in answer.json()}
    assert {MINILM, *repositories} <= set(listed)
    for (status, _), (model_id, repository) in zip(ODD, repositories.items(), strict=True):
        assert listed[model_id]["status"] == status
        assert "config.json" in listed[model_id]["verification_error"]
        assert show(node, model_id) == listed[model_id]
        assert node.delete(path(model_id)).status_code == 200
        assert not repository.exists()


def test_a_revision_that_leads_out_of_the_cache_is_refused(node: RunningAppliance) -> None:
    for revision in ("/dev/zero", "../../x", "main/../../x"):
        created = node.post("/instances", {"name": "zeros", "model_id": MINILM, "revision": revision})
        assert "revision" in refused(created, 422, "VALIDATION_ERROR")
        refused(node.post("/models", {"model_id": "org/none", "revision": revision}), 422, "VALIDATION_ERROR")


def test_a_folder_is_a_model_and_a_flipped_byte_refuses_its_start(node: RunningAppliance, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(FAMILIES / "bert-cls", folder)
    add(node, str(folder))
    assert show(node, str(folder))["status"] == "downloaded"
    assert node.post(path(str(folder), "load")).json()["status"] == "verified"
    node.create("mine", model_id=str(folder))
    node.wait_ready("mine")
    node.post("/instances/mine/stop")
    weights = folder / WEIGHTS
    raw = bytearray(weights.read_bytes())
    raw[-7] ^= 1
    weights.write_bytes(raw)
    found = show(node, str(folder))
    assert (found["status"], WEIGHTS in found["verification_error"]) == ("failed", True)
    for answer in (node.post("/instances/mine/start"), node.post("/instances", {"name": "b", "model_id": str(folder)})):
        assert WEIGHTS in refused(answer, 409, "MODEL_CHANGED")
    raw[-7] ^= 1
    weights.write_bytes(raw)
    assert node.post("/instances/mine/start").status_code == 200  # its time is new, its content is not
    node.post("/instances/mine/stop")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 4}')
    message = refused(node.post("/instances/mine/start"), 409, "MODEL_CHANGED")
    assert "sentence_bert_config.json was added" in message
    # It was meant, so what the message says is done.
    for advised in ("DELETE /models/ID?keep_files=true", "POST /models"):
        assert advised in message
    assert node.delete(f"{path(str(folder))}?keep_files=true").status_code == 200
    add(node, str(folder))
    assert node.post(path(str(folder), "load")).json()["status"] == "verified"
    assert node.post("/instances/mine/start").status_code == 200
    node.delete("/instances/mine")
    assert node.delete(path(str(folder))).status_code == 200
    assert weights.exists()


def test_supervisord_does_not_start_a_changed_model_either(node: RunningAppliance, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(FAMILIES / "bert-cls", folder)
    add(node, str(folder))
    node.post(path(str(folder), "load"))
    node.create("mine", model_id=str(folder))
    node.wait_ready("mine")
    weights = folder / WEIGHTS
    raw = bytearray(weights.read_bytes())
    raw[-7] ^= 1
    weights.write_bytes(raw)
    (process,) = node.processes_of("mine")
    process.kill()
    eventually(lambda: WEIGHTS in (node.instance("mine")["last_error"] or ""), 40)
    assert "another content" in node.instance("mine")["last_error"]
    node.delete("/instances/mine")


def test_tei_is_run_through_the_same_check(tmp_path: Path) -> None:
    """The binary gets its flags unchanged, under the process id that supervisord knows."""
    binary = tmp_path / "router"
    binary.write_text('#!/bin/sh\necho "$$ $*"\n')
    binary.chmod(0o755)
    command = [
        sys.executable,
        "-m",
        "appliance.tei",
        str(binary),
        "--model-id",
        "a b",
        "--port",
        "1",
        "--x=y z",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        told = process.communicate(timeout=60)[0]
    assert told == f"{process.pid} --model-id a b --port 1 --x=y z\n"


def test_a_model_that_does_not_load_is_failed_with_its_last_words(node: RunningAppliance, hub: Hub) -> None:
    hub.add("org/broken", {**FILES, "config.json": b'{"architectures": ["BertModel"], "model_type": "nonsense"}'})
    add(node, "org/broken")
    node.post(path("org/broken", "download"))
    answer = node.post(path("org/broken", "load"))
    assert (answer.status_code, answer.json()["status"]) == (200, "failed")
    assert "max_position_embeddings" in answer.json()["verification_error"]
    assert show(node, "org/broken")["last_verified"] is None


def test_a_download_that_mends_a_file_ends_what_a_load_has_said_of_it(node: RunningAppliance, model: str) -> None:
    add(node, model)
    folder = Path(node.post(path(model, "download")).json()["cache_path"])
    weights = (folder / WEIGHTS).resolve()
    raw = bytearray(weights.read_bytes())
    raw[-7] ^= 1
    weights.write_bytes(raw)
    found = node.post(path(model, "load")).json()
    assert (found["status"], WEIGHTS in found["verification_error"]) == ("failed", True)
    found = node.post(path(model, "download")).json()
    assert (found["status"], found["verification_error"]) == ("downloaded", None)
    found = node.post(path(model, "load")).json()
    assert (found["status"], found["verification_error"]) == ("verified", None)


TOO_LONG = "x" * 10_000
HOSTILE = [
    "../..",
    "..",
    "a/../b",
    "%2e%2e",
    TOO_LONG,
    "a\0b",
    "--flag",
    "-x",
    "ünï/cödé",
    "a//b",
    "/..",
    "a\nb",
    " ",
]


@pytest.mark.parametrize("model_id", HOSTILE, ids=lambda each: repr(each[:20]))
def test_hostile_ids_are_refused_and_touch_nothing(node: RunningAppliance, model_id: str) -> None:
    refused(node.post("/models", {"model_id": model_id}), 422, "VALIDATION_ERROR")
    for answer in (
        node.get(path(model_id)),
        node.post(path(model_id, "download")),
        node.post(path(model_id, "load")),
        node.delete(path(model_id)),
    ):
        # A client that asks for `/models/..` has asked for another path.
        assert answer.status_code == {"..": 404, TOO_LONG: 414}.get(model_id, 422), answer.text
        assert answer.json()["code"] != "INTERNAL_ERROR"
    assert not any(".." in each.name for each in cache.cache_folder().parent.glob("*"))


def one_call(node: RunningAppliance, verb: str, name: str, wait: str) -> requests.Response:
    if verb in ("download", "load"):
        return requests.post(node.url + path(name, verb), params={"wait": wait}, timeout=60)
    if verb == "add":
        return node.post("/models", {"model_id": name})
    return {"delete": node.delete, "show": node.get, "list": lambda _: node.get("/models")}[verb](path(name))


def test_eight_models_and_eight_clients_at_once_leave_nothing_stuck(node: RunningAppliance, hub: Hub) -> None:
    """Any verb of any model at any time: only the codes of the contract, and afterwards every model has a status."""
    names = [f"crowd/{number}" for number in range(8)]
    for name in names:
        hub.add(name, FILES)
    until = time.monotonic() + float(os.environ.get("APPLIANCE_CONTENTION_SECS", "5"))
    answers: Counter[tuple[str, int, str]] = Counter()

    def hammer(seed: int) -> None:
        dice = random.Random(seed)
        while time.monotonic() < until:
            verb = dice.choice(["add", "download", "download", "load", "delete", "show", "list"])
            answer = one_call(node, verb, dice.choice(names), dice.choice(["true", "false"]))
            found = answer.json()
            answers[verb, answer.status_code, found.get("code", "") if isinstance(found, dict) else ""] += 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hammer, range(8)))
    assert sum(answers.values()) > 50
    codes = {"", "MODEL_BUSY", "MODEL_NOT_FOUND", "MODEL_LOAD_FAILED"}
    assert {code for _, status, code in answers} <= codes, answers
    assert all(status < 500 or code == "MODEL_LOAD_FAILED" for _, status, code in answers), answers
    eventually(lambda: not [job for job in jobs(node) if job], 60)
    settled = {"available", "downloaded", "verified", "failed"}
    assert {each["status"] for each in node.get("/models").json()} <= settled
    for name in names:
        node.post("/models", {"model_id": name})
        assert node.post(path(name, "download")).json()["status"] in ("downloaded", "verified")


# -- the command line -------------------------------------------------------------------------------------------------


def done(node: RunningAppliance, *arguments: str, environ: dict[str, str] | None = None) -> str:
    command, environ = node.command(*arguments), {**node.environ, **(environ or {})}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_verification_that_is_cancelled_is_none(node: RunningAppliance, model: str) -> None:
    """The command said of the one before that it was this one."""
    assert json.loads(done(node, "models", "verify", MINILM, "--json"))["status"] == "verified"
    told = subprocess.Popen(
        node.command("models", "verify", MINILM), env=node.environ, stderr=subprocess.PIPE, text=True
    )
    with told:
        eventually(lambda: show(node, MINILM)["status"] == "loading", every=0.02)
        assert node.post(path(MINILM, "cancel")).json()["status"] == "verified"
        _, words = told.communicate(timeout=60)
    assert told.returncode == 1
    assert "It was cancelled" in words


def test_a_model_goes_the_same_way_on_the_command_line(node: RunningAppliance, model: str) -> None:
    assert "downloaded" in done(node, "models", "download", model)
    eventually(lambda: not jobs(node))  # nobody waited for it over REST: the monitor clears it away
    assert json.loads(done(node, "models", "verify", model, "--json"))["status"] == "verified"
    assert json.loads(done(node, "models", "show", model, "--json"))["metadata"]["task"] == "dense"
    assert model in done(node, "models", "list")
    assert f"{WEIGHTS}  " in done(node, "models", "show", model)
    assert MINILM in done(node, "models", "download", "--all")
    failed = node.cli("models", "download", "org/unheard-of")
    assert (failed.returncode, "has no model" in failed.stderr) == (1, True)
    assert node.cli("models", "download").returncode == 1
    assert "available" in done(node, "models", "delete", model)


def test_a_model_is_carried_to_a_machine_without_a_hub(node: RunningAppliance, model: str, tmp_path: Path) -> None:
    done(node, "models", "download", model)
    file = tmp_path / "model.tar"
    assert model in done(node, "models", "export", model, str(file))
    away = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_CACHE": str(tmp_path / "hf/hub"), "HF_HUB_OFFLINE": "1"}
    away |= {"TEI_MANAGER_DATA_DIR": str(tmp_path / "data"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    away["TEI_MANAGER_API_PORT"] = str(free_ports(1)[0])  # where nothing runs
    found = json.loads(done(node, "models", "import", str(file), "--json", environ=away))
    assert (found["status"], found["commit"]) == ("downloaded", show(node, model)["commit"])
    assert {each["name"]: each["sha256"] for each in found["files"]} == {
        name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()
    }
    snapshot = Path(found["cache_path"])
    assert all((snapshot / name).read_bytes() == content for name, content in FILES.items())


def test_import_and_export_are_of_the_appliance_that_runs_whoever_asks(
    node: RunningAppliance, model: str, tmp_path: Path
) -> None:
    """With another HOME and another cache on the command line."""
    done(node, "models", "download", model)
    before = show(node, model)
    elsewhere = {"HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf"), "HF_HUB_CACHE": str(tmp_path / "hf/hub")}
    file = tmp_path / "model.tar"
    assert f"{len(before['files'])} files of {model}" in done(
        node, "models", "export", model, str(file), environ=elsewhere
    )
    with tarfile.open(file) as archive:  # as other programs read it
        names = [name for name in archive.getnames() if name.startswith("files/")]
        assert {name: archive.extractfile(name).read() for name in names} == {  # type: ignore[union-attr]
            f"files/{name}": content for name, content in FILES.items()
        }
    done(node, "models", "delete", model, environ=elsewhere)
    found = json.loads(done(node, "models", "import", str(file), "--json", environ=elsewhere))
    assert {**found, "added_at": ""} == {**before, "added_at": ""}
    assert show(node, model)["cache_path"] == before["cache_path"]
    assert json.loads(done(node, "models", "verify", model, "--json", environ=elsewhere))["status"] == "verified"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.tar"]
    renamed = json.loads(done(node, "models", "import", str(file), "--as", "org/renamed", "--json"))
    assert renamed["model_id"] == "org/renamed"


def test_an_export_of_a_file_that_changed_leaves_no_archive(node: RunningAppliance, model: str, tmp_path: Path) -> None:
    """Also when nothing but its digest tells: then the answer is too short."""
    done(node, "models", "download", model)
    weights = Path(show(node, model)["cache_path"], WEIGHTS)
    about, content = weights.stat(), bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(about.st_atime_ns, about.st_mtime_ns))
    failed = node.cli("models", "export", model, str(tmp_path / "model.tar"))
    assert (failed.returncode, "Verify the model" in failed.stderr, list(tmp_path.iterdir())) == (1, True, [])
    unknown = node.cli("models", "export", "org/nobody-has", str(tmp_path / "model.tar"))
    assert (unknown.returncode, list(tmp_path.iterdir())) == (1, [])
    assert "not registered" in unknown.stderr


def damages(good: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """(what was done to an archive, a word of the refusal); each archive is at folder/archive.tar."""
    target, raw = folder / "archive.tar", good.read_bytes()
    with tarfile.open(good) as archive:
        members = [(info, (archive.extractfile(info) or io.BytesIO()).read()) for info in archive]
    manifest = json.loads(members[0][1])

    def write(entries: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        with tarfile.open(target, "w") as archive:
            for info, content in entries:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))

    def listing(**change: Any) -> tuple[tarfile.TarInfo, bytes]:
        return tarfile.TarInfo("manifest.json"), json.dumps({**manifest, **change}).encode()

    flipped = bytearray(raw)
    flipped[raw.index(members[-1][1][:500])] ^= 1
    target.write_bytes(flipped)
    yield "a flipped byte", "digest"
    target.write_bytes(raw[: len(raw) // 2])
    yield "cut off", "refused"
    target.write_bytes(b"no archive at all" * 100)
    yield "something else", "refused"
    target.write_bytes(b"no archive at all" * 2_000_000)  # the refusal comes while it is still being sent
    yield "something large", "refused"
    write(members[1:])
    yield "no manifest", "manifest"
    write(members[:-1])
    yield "a file less", "missing"
    write([*members, (tarfile.TarInfo("files/more"), b"x")])
    yield "a file more", "files/more"
    evil = {"name": "../../evil", "size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    write([listing(files=[*manifest["files"], evil]), *members[1:], (tarfile.TarInfo("files/../../evil"), b"x")])
    yield "a name that leaves", "../../evil"
    link = tarfile.TarInfo(members[-1][0].name)
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    write([*members[:-1], (link, b"")])
    yield "a link", "is not as"
    write([listing(model_id="../../x"), *members[1:]])
    yield "a hostile id", "model_id"
    pickled = b"cos\nsystem\n(S'true'\ntR."
    weights = next(number for number, (info, _) in enumerate(members) if info.name == f"files/{WEIGHTS}")
    entry = {"name": "pytorch_model.bin", "size": len(pickled), "sha256": hashlib.sha256(pickled).hexdigest()}
    files = [*(file for file in manifest["files"] if file["name"] != WEIGHTS), entry]
    rest = [*members[1:weights], *members[weights + 1 :]]
    write([listing(files=files), *rest, (tarfile.TarInfo("files/pytorch_model.bin"), pickled)])
    yield "pickled weights", "allow_pickle"
    write([listing(format="other"), *members[1:]])
    yield "another format", "format"


def test_of_an_archive_comes_in_what_a_download_would_fetch(node: RunningAppliance, tmp_path: Path) -> None:
    """No code, and no pickle beside weights that are none."""
    files = {**FILES, "pytorch_model.bin": b"pickle", "modeling.py": b"raise SystemExit"}
    told = [
        {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    ]
    about = {"format": "tei-appliance-model-1", "model_id": "org/more", "revision": "", "commit": "", "files": told}
    with tarfile.open(tmp_path / "more.tar", "w") as archive:
        for name, content in {"manifest.json": json.dumps(about).encode(), **files}.items():
            info = tarfile.TarInfo(name if name == "manifest.json" else f"files/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    found = json.loads(done(node, "models", "import", str(tmp_path / "more.tar"), "--json"))
    assert {each["name"] for each in found["files"]} == set(FILES)
    snapshot = Path(found["cache_path"])
    assert not [path.name for path in snapshot.rglob("*") if path.suffix in (".py", ".bin")]
    assert node.delete(path("org/more")).status_code == 200


@pytest.mark.parametrize("where", ["where nothing runs", "by the appliance that runs"])
def test_a_damaged_archive_is_refused_and_nothing_is_imported(
    node: RunningAppliance, model: str, tmp_path: Path, where: str
) -> None:
    done(node, "models", "download", model)
    done(node, "models", "export", model, str(tmp_path / "good.tar"))
    environ, cache = dict(node.environ), Path(node.environ["HF_HOME"], "hub")
    if where == "where nothing runs":
        cache = tmp_path / "hub"
        environ |= {"HF_HUB_CACHE": str(cache), "TEI_MANAGER_DATA_DIR": str(tmp_path / "data")}
        environ["TEI_MANAGER_API_PORT"] = str(free_ports(1)[0])
    before = sorted(cache.glob("*"))
    command = node.command("models", "import", str(tmp_path / "archive.tar"))
    for what, word in damages(tmp_path / "good.tar", tmp_path):
        result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
        assert result.returncode == 1, what
        assert "Traceback" not in result.stderr, what
        assert word in result.stderr, what
        assert sorted(cache.glob("*")) == before, what
        assert not list(tmp_path.glob("evil")), what


def test_a_refused_archive_is_told_while_it_is_still_being_sent(node: RunningAppliance) -> None:
    """Over the port as well, with the length known and without."""
    parts = [b"no archive at all" * 100_000] * 20
    for body in (b"".join(parts), iter(parts)):
        refused = requests.post(f"{node.url}/archives", data=body, timeout=30)
        assert (refused.status_code, refused.json()["code"]) == (422, "IMPORT_FAILED")
    with socket.create_connection(("127.0.0.1", node.api_port)) as connection:
        connection.sendall(b"POST /archives HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
