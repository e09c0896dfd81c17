"""Whatever a hub answers, or something in between that is none, is a refusal with a name: without one a job has no
result, and supervisord starts it again without end."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from appliance.core.problems import Problem
from appliance.drivers import hubfetch
from appliance.drivers.hubfetch import RemoteFile
from testing.durability import Synced, names_of

COMMIT, BLOB = "a" * 40, "b" * 40


class Answering(HTTPServer):
    """Gives one answer to all that is asked."""

    answer = b""


class Handler(BaseHTTPRequestHandler):
    server: Answering

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.answer)))
        self.end_headers()
        self.wfile.write(self.server.answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answering]:
    with Answering(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.05,))
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{running.server_port}")
        yield running
        running.shutdown()
        thread.join()


def info(**fields: Any) -> bytes:
    return json.dumps({"id": "org/model", "sha": COMMIT, **fields}).encode()


def file(**fields: Any) -> dict[str, Any]:
    return {"rfilename": "config.json", "size": 2, "blobId": BLOB, **fields}


def test_what_a_hub_lists_is_read(hub: Answering) -> None:
    hub.answer = info(siblings=[file()])
    listing = hubfetch.listing("org/model", "main")
    assert (listing.commit, listing.files) == (COMMIT, (RemoteFile("config.json", 2, BLOB),))


ANSWERS = {
    "a page": b"<html>Please log in to the proxy</html>",
    "nothing": b"",
    "a list": b"[]",
    "null": b"null",
    "no id": json.dumps({"sha": COMMIT}).encode(),
    "no commit": json.dumps({"id": "org/model"}).encode(),
    "a file without a name": info(siblings=[{"size": 2, "blobId": BLOB}]),
    "a large file without a digest": info(siblings=[file(lfs={"size": 2})]),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_what_is_no_listing_is_a_download_that_failed(hub: Answering, answer: bytes) -> None:
    """The job died of it, and was started again at once."""
    hub.answer = answer
    with pytest.raises(Problem, match=constants.ENDPOINT) as caught:
        hubfetch.listing("org/model", "main")
    assert caught.value.code == "MODEL_DOWNLOAD_FAILED"


def test_a_token_that_no_header_can_carry_is_a_download_that_failed(
    hub: Answering, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.answer = info(siblings=[file()])
    monkeypatch.setenv("HF_TOKEN", "hf_\u00e9")
    with pytest.raises(Problem, match="HF_TOKEN") as caught:
        hubfetch.listing("org/model", "main")
    assert caught.value.code == "MODEL_DOWNLOAD_FAILED"
    repository = hubfetch.Repository("org/model", tmp_path / "models--org--model")
    with pytest.raises(Problem) as caught:
        repository.fetch(COMMIT, RemoteFile("config.json", 2, BLOB), lambda growing: None)
    assert caught.value.code == "MODEL_DOWNLOAD_FAILED"


def test_who_is_offline_is_told_so(hub: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told that its disk refuses."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Problem, match="HF_HUB_OFFLINE is set"):
        hubfetch.listing("org/model", "main")


def test_a_power_cut_takes_nothing_of_a_download_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = hubfetch.Repository("org/model", tmp_path / "models--org--model")
    files = [RemoteFile(name, 2, digest) for name, digest in (("config.json", "a"), ("onnx/model.onnx", "b"))]
    (repository.folder / "blobs").mkdir(parents=True)
    for file in files:
        repository.blob(file).write_bytes(b"{}")
    synced = Synced(monkeypatch)
    snapshot = repository.publish("main", "c" * 40, files)
    folders = names_of(snapshot, tmp_path)
    assert {tmp_path, snapshot / "onnx", repository.folder / "blobs"} < folders
    assert not [folder for folder in folders if folder not in synced]
