"""Appliances beside each other: what one does not have a peer serves, one hop at most, and one that is away is told."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import requests

from appliance.cli.multiplexer_client import ApiKeyInterceptor
from appliance.wire.envelope import CACHE_KEY, FINGERPRINT_KEY, HOP_KEY, INSTANCE_KEY
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei.v1 import tei_pb2_grpc as tei_stubs
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub
from testing.arrows import dense_request, vectors
from testing.random_models import random_model
from testing.running import TINY, TINY_WIDTH, RunningAppliance, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300)]
KEY = "tei-" + "peers" * 8
OTHER_WIDTH = 64


def seed(name: str, model: str) -> str:
    return f'[[instances]]\nname = "{name}"\nmodel_id = "{model}"\n'


class Pair:
    """``one`` has "near" and "both"; ``two`` has "far", of another model, and "both", and asks for a key."""

    def __init__(self, room: Path) -> None:
        self.key_file = room / "key"
        self.key_file.write_text(KEY + "\n")
        other = str(random_model(room / "other", width=OTHER_WIDTH, layers=1, positions=64))
        self.two = self.appliance(room / "two", seed("far", other) + seed("both", other), "")
        grpc_port = self.two.grpc_port
        settings = f'peers = ["localhost:{grpc_port}", "127.0.0.1:9"]\npeer_key_file = "{self.key_file}"'
        self.one = self.appliance(room / "one", seed("near", TINY) + seed("both", TINY), settings)
        text = self.two.config.read_text()
        self.two.config.write_text(f'peers = ["127.0.0.1:{self.one.grpc_port}"]\n{text}')

    def appliance(self, folder: Path, seeds: str, settings: str) -> RunningAppliance:
        folder.mkdir()
        return RunningAppliance(folder, seeds=seeds, settings=settings)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair"))
    with pair.two as two, pair.one as one:
        for box, names in ((one, ("near", "both")), (two, ("far", "both"))):
            for name in names:
                box.wait_ready(name)
        eventually(lambda: embed(one, "far").size, 60)
        yield pair


def embed(box: RunningAppliance, name: str, text: str = "text", **options: Any) -> np.ndarray:
    request = tei.EmbedRequest(inputs=text, truncate=True, normalize=True)
    stub = tei_stubs.EmbedStub(channel(box))
    metadata = [(INSTANCE_KEY, name), *options.get("metadata", ())]
    return np.array(stub.Embed(request, metadata=metadata, timeout=options.get("timeout", 20)).embeddings, np.float32)


def channel(box: RunningAppliance) -> grpc.Channel:
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.intercept_channel(grpc.insecure_channel(f"127.0.0.1:{box.grpc_port}", options), ApiKeyInterceptor(KEY))


def refusal(box: RunningAppliance, name: str, **options: Any) -> Any:
    try:
        embed(box, name, **options)
    except grpc.RpcError as error:
        return error
    return None


def unavailable(box: RunningAppliance, name: str) -> str:
    """What a call is told that finds nobody; nothing where it ends otherwise."""
    error = refusal(box, name, timeout=60)
    return str(error.details()) if error and error.code() is grpc.StatusCode.UNAVAILABLE else ""


def test_what_is_not_here_is_served_there_in_every_way(pair: Pair) -> None:
    wanted = embed(pair.two, "far")
    assert wanted.shape == (OTHER_WIDTH,)
    assert np.allclose(embed(pair.one, "far"), wanted, atol=1e-5)
    stub: Any = TeiMultiplexerStub(channel(pair.one))
    model = pair.two.get("/instances/far").json()["model_id"]
    inner = tei.EmbedRequest(inputs="text", truncate=True, normalize=True)
    by_model = stub.Embed(mux.EmbedRequest(target=mux.Target(model_id=model), request=inner), timeout=20)
    assert np.allclose(by_model.embeddings, wanted, atol=1e-5)
    many = [mux.EmbedRequest(target=mux.Target(instance_name="far"), request=inner) for _ in range(30)]
    assert all(np.allclose(each.embeddings, wanted, atol=1e-5) for each in stub.EmbedStream(iter(many), timeout=20))
    rows = vectors(stub.EmbedArrow(dense_request("far", ["text"] * 40), timeout=20))
    assert len(rows) == 40
    assert all(row is not None and np.allclose(row, wanted, atol=1e-5) for row in rows)
    url = f"http://127.0.0.1:{pair.one.http_port}/v1"
    answer = requests.post(f"{url}/embeddings", json={"input": "text", "model": "far"}, timeout=20).json()
    assert np.allclose(answer["data"][0]["embedding"], wanted, atol=1e-5)
    assert {each["id"] for each in requests.get(f"{url}/models", timeout=20).json()["data"]} >= {"near", "far", "both"}


def test_it_is_said_once_what_computed_a_vector(pair: Pair) -> None:
    """By the peer: what it has loaded nobody else knows, so nobody else keeps its vectors."""

    def told(box: RunningAppliance) -> dict[str, list[Any]]:
        request = tei.EmbedRequest(inputs="told", truncate=True, normalize=True)
        call = tei_stubs.EmbedStub(channel(box)).Embed.with_call(request, metadata=[(INSTANCE_KEY, "far")], timeout=20)
        metadata = call[1].initial_metadata()
        keys = (INSTANCE_KEY, FINGERPRINT_KEY, CACHE_KEY)
        return {key: [value for each, value in metadata if each == key] for key in keys}

    told_there = eventually(lambda: (each := told(pair.two))[FINGERPRINT_KEY] and each)
    for _ in range(2):
        told_here = told(pair.one)
        assert told_here == {**told_there, CACHE_KEY: ["bypass"]}


def test_both_ask_each_other(pair: Pair) -> None:
    eventually(lambda: embed(pair.two, "near").shape == (TINY_WIDTH,))


def test_what_is_here_is_served_here(pair: Pair) -> None:
    assert embed(pair.one, "both").shape == (TINY_WIDTH,)
    assert embed(pair.two, "both").shape == (OTHER_WIDTH,)


def test_a_peer_is_asked_for_its_own_only(pair: Pair) -> None:
    """Otherwise a call for what both take to be elsewhere would go to and fro."""
    error = refusal(pair.one, "far", metadata=[(HOP_KEY, "1")])
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert embed(pair.one, "near", metadata=[(HOP_KEY, "1")]).shape == (TINY_WIDTH,)


def test_what_nobody_has_is_said_at_once_with_what_there_is(pair: Pair) -> None:
    began = time.monotonic()
    error = refusal(pair.one, "nobody")
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "near" in error.details()
    assert "far" in error.details()
    assert time.monotonic() - began < 5


def test_the_lists_of_our_own_have_nothing_of_the_peers(pair: Pair) -> None:
    assert {each["name"] for each in pair.one.get("/instances").json()} == {"near", "both"}


def test_an_instance_that_stops_there_is_not_found_here_any_more(pair: Pair) -> None:
    assert pair.two.post("/instances/far/stop").ok
    eventually(lambda: refusal(pair.one, "far").code() is grpc.StatusCode.NOT_FOUND)
    assert pair.two.post("/instances/far/start").ok
    eventually(lambda: embed(pair.one, "far").size, 60)


def doctor(box: RunningAppliance) -> dict[str, dict[str, str]]:
    return {each["what"]: each for each in json.loads(box.cli("doctor", "--json").stdout)}


def test_the_doctor_tells_what_the_peers_have(pair: Pair) -> None:
    found = doctor(pair.one)
    there = found[f"peer localhost:{pair.two.grpc_port}"]
    assert (there["verdict"], there["found"]) == ("ok", "has both, far")
    assert found["peer 127.0.0.1:9"]["verdict"] == "wrong"


def test_a_peer_whose_multiplexer_dies_is_waited_for(pair: Pair) -> None:
    for child in pair.two.supervisorctl("pid", "multiplexer:multiplexer-0").split():
        os.kill(int(child), signal.SIGKILL)
    assert embed(pair.one, "far", timeout=30).shape == (OTHER_WIDTH,)


def test_a_peer_that_is_away_is_as_a_replica_that_is_away(pair: Pair) -> None:
    """Also to a multiplexer that has never met it."""
    pair.two.supervisorctl("stop", "multiplexer:*")
    try:
        eventually(lambda: str(pair.two.grpc_port) in unavailable(pair.one, "far"), 60)
        pair.one.supervisorctl("restart", "multiplexer:*")
        eventually(lambda: str(pair.two.grpc_port) in unavailable(pair.one, "far"), 60)
        assert embed(pair.one, "near").shape == (TINY_WIDTH,)
    finally:
        pair.two.supervisorctl("start", "multiplexer:*")
    eventually(lambda: embed(pair.one, "far").size, 60)


def test_with_keys_a_peer_asks_for_ours(pair: Pair) -> None:
    """The last test: from now on the other one asks everybody."""
    two = pair.two
    created = two.cli("keys", "create", "first", "admin", "--json")
    assert created.returncode == 0, created.stderr
    eventually(lambda: refusal(pair.one, "far").code() is grpc.StatusCode.UNAUTHENTICATED)
    pair.key_file.write_text(json.loads(created.stdout)["key"])
    pair.one.supervisorctl("restart", "multiplexer:*")
    eventually(lambda: embed(pair.one, "far").size, 60)
