"""An appliance with its cache on, and ways to ask it: each gives the vectors' bytes, and what is said of the cache."""

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import requests

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.arrows import dense_request, vectors
from testing.running import RunningAppliance, eventually

FAMILIES = Path(__file__).parents[1] / "tests" / "data" / "families"


class CachedAppliance(RunningAppliance):
    """An appliance with a dense and a sparse instance, and folders of models that a test may change."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder, seeds="", settings="multiplexer_workers = 1\nhealth_check_interval_secs = 1", cache=True
        )
        self.models = folder / "models"

    def model(self, name: str, family: str = "bert-cls") -> Path:
        """A copy of a model, of which no other instance is."""
        shutil.copytree(FAMILIES / family, self.models / name)
        return self.models / name

    def add(self, name: str, family: str = "bert-cls", **fields: Any) -> Path:
        """An instance of its own copy of a model, until its answers are kept."""
        folder = self.model(name, family)
        self.create(name, model_id=str(folder), **fields)
        self.wait_ready(name)
        if fields.get("cache") is False:
            eventually(lambda: self.fingerprint(name))
        else:
            self.wait_kept(name, sparse=fields.get("pooling") == "splade")
        return folder

    def wait_kept(self, name: str, sparse: bool = False) -> None:
        """Until the instance's answers are kept: REST knows its fingerprint, and so does the multiplexer, which looks
        at the files and the processes by itself."""
        eventually(lambda: self.fingerprint(name))
        asked = self.said_of_sparse if sparse else lambda name, text: self.embed(name, text)[1]
        eventually(lambda: asked(name, f"begin {name}") != "bypass")

    def fingerprint(self, name: str) -> str | None:
        found: str | None = self.instance(name)["fingerprint"]
        return found

    def embed(self, name: str, text: str, metadata: Any = (), **options: Any) -> tuple[bytes, str]:
        """(the vector's bytes, what is said of the cache)."""
        inner = tei.EmbedRequest(inputs=text, **{"truncate": True, "normalize": True, **options})
        request = mux.EmbedRequest(target=mux.Target(instance_name=name), request=inner)
        reply, call = self.channel_stub().Embed.with_call(request, timeout=30, metadata=metadata)
        said = dict(call.initial_metadata())
        return np.array(reply.embeddings, np.float32).tobytes(), str(said.get("x-tei-cache"))

    def said_of_sparse(self, name: str, text: str) -> str:
        """What is said of the cache with a sparse vector."""
        inner = tei.EmbedSparseRequest(inputs=text, truncate=True)
        request = mux.EmbedSparseRequest(target=mux.Target(instance_name=name), request=inner)
        _, call = self.channel_stub().EmbedSparse.with_call(request, timeout=30)
        return str(dict(call.initial_metadata()).get("x-tei-cache"))

    def channel_stub(self) -> Any:
        if not hasattr(self, "kept"):
            self.kept = self.stub()
        return self.kept

    def http(self, path: str, body: Any, **headers: str) -> requests.Response:
        url = f"http://127.0.0.1:{self.http_port}{path}"
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return requests.post(url, json=body, headers=named, timeout=30)

    def events(self, word: str) -> list[dict[str, Any]]:
        return [event for event in self.get("/events").json() if event["event"] == word]


def stream_of(box: CachedAppliance, name: str, texts: list[str]) -> tuple[list[bytes], str]:
    requests_ = [
        mux.EmbedRequest(
            target=mux.Target(instance_name=name), request=tei.EmbedRequest(inputs=text, truncate=True, normalize=True)
        )
        for text in texts
    ]
    call = box.channel_stub().EmbedStream(iter(requests_), timeout=30)
    found = [np.array(reply.embeddings, np.float32).tobytes() for reply in call]
    return found, str(dict(call.trailing_metadata()).get("x-tei-cache"))


def batch_of(
    box: CachedAppliance, name: str, texts: list[str | None], **options: Any
) -> tuple[list[bytes | None], str]:
    reply, call = box.channel_stub().EmbedArrow.with_call(dense_request(name, texts, **options), timeout=30)
    found = [None if each is None else each.tobytes() for each in vectors(reply)]
    return found, str(dict(call.initial_metadata())["x-tei-cache"])


def openai(box: CachedAppliance, name: str, texts: Any) -> tuple[list[bytes], str]:
    reply = box.http("/v1/embeddings", {"model": name, "input": texts})
    rows = [np.array(row["embedding"], np.float32).tobytes() for row in reply.json()["data"]]
    return rows, reply.headers["x-tei-cache"]


def kill_multiplexers(box: CachedAppliance) -> None:
    """In the middle of whatever they are at; until the next ones answer."""
    for process in box.left_over():
        if "appliance.multiplexer" in process.cmdline():
            process.send_signal(signal.SIGKILL)
    info = mux.InfoRequest(target=mux.Target(instance_name="dense"))
    eventually(lambda: box.stub().Info(info, timeout=10), 120)
    box.kept = box.stub()


def entries_of(box: CachedAppliance) -> list[Path]:
    return sorted((box.folder / "cache").glob("*/*.db"))
