"""Replicas that others run: what is in a listing is served in every way, and what goes wrong there has a name."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
import requests

from appliance.wire.envelope import CACHE_KEY, INSTANCE_KEY
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei.v1 import tei_pb2_grpc as tei_stubs
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.arrows import dense_request, vectors
from testing.background import Background
from testing.certificates import Authority
from testing.engines import Engine
from testing.random_models import random_model
from testing.running import TINY, RunningAppliance, eventually
from tests.security import Caller, Secured

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300)]
NAME = "far"
KINDS = ("static", "dns")


def listing(*addresses: str, name: str = NAME, model: str = TINY, more: str = "") -> str:
    quoted = ", ".join(f'"{each}"' for each in addresses)
    return (
        f'[[instances]]\nname = "{name}"\nmodel_id = "{model}"\naliases = ["{name}-alias"]\ntask = "embedding"\n'
        f"addresses = [{quoted}]\n{more}"
    )


class Far(NamedTuple):
    """An appliance whose replicas are processes that it has not started."""

    running: RunningAppliance
    engines: list[Engine]
    file: Path

    def write(self, *texts: str) -> None:
        self.file.write_text("".join(texts) or "instances = []\n")

    @property
    def addresses(self) -> list[str]:
        return [f"localhost:{engine.port}" for engine in self.engines]


@pytest.fixture(scope="module", params=KINDS)
def far(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    room = tmp_path_factory.mktemp(request.param)
    file = room / "directory.toml"
    with ExitStack() as stack:
        engines = [stack.enter_context(Engine(room, TINY)) for _ in range(2)]
        file.write_text(listing(*[f"localhost:{engine.port}" for engine in engines]))
        settings = f'directory = "{request.param}:{file}"\nmultiplexer_workers = 2'
        running = stack.enter_context(RunningAppliance(room, seeds="", settings=settings))
        far = Far(running, engines, file)
        eventually(lambda: embed(far, "begin") is not None)
        yield far


def embed(far: Far, text: str, timeout: float = 20.0, **target: Any) -> np.ndarray:
    inner = tei.EmbedRequest(inputs=text, truncate=True, normalize=True)
    request = mux.EmbedRequest(target=mux.Target(**(target or {"instance_name": NAME})), request=inner)
    return np.array(far.running.stub().Embed(request, timeout=timeout).embeddings, np.float32)


def found(far: Far, text: str, **target: Any) -> np.ndarray:
    """As `embed`, as soon as that is answered."""
    (vector,) = eventually(lambda: [embed(far, text, **target)], 60)
    return np.array(vector)


def right(far: Far, text: str) -> np.ndarray:
    """As an engine itself answers."""
    request = tei.EmbedRequest(inputs=text, truncate=True, normalize=True)
    for engine in far.engines:
        if engine.process.poll() is None:
            return np.array(engine.stub("Embed").Embed(request).embeddings, np.float32)
    raise AssertionError("no engine runs")


def agrees(found: np.ndarray | None, wanted: np.ndarray) -> bool:
    return found is not None and bool(np.allclose(found, wanted, atol=1e-5))


def test_every_way_leads_there(far: Far) -> None:
    running, text = far.running, "to other machines"
    wanted = right(far, text)
    assert agrees(embed(far, text), wanted)
    assert agrees(embed(far, text, model_id=TINY), wanted)
    assert agrees(embed(far, text, model_id=f"{NAME}-alias"), wanted)
    assert agrees(embed(far, text, instance_index=0), wanted)
    native = tei_stubs.EmbedStub(grpc.insecure_channel(f"127.0.0.1:{running.grpc_port}"))
    request = tei.EmbedRequest(inputs=text, truncate=True, normalize=True)
    assert agrees(np.array(native.Embed(request, metadata=[(INSTANCE_KEY, NAME)]).embeddings), wanted)
    many = [mux.EmbedRequest(target=mux.Target(instance_name=NAME), request=request) for _ in range(50)]
    replies = list(running.stub().EmbedStream(iter(many), timeout=20))
    assert len(replies) == 50
    assert all(agrees(np.array(each.embeddings), wanted) for each in replies)
    arrow = vectors(running.stub().EmbedArrow(dense_request(NAME, [text] * 3), timeout=20))
    assert all(agrees(row, wanted) for row in arrow)
    url = f"http://127.0.0.1:{running.http_port}"
    answer = requests.post(f"{url}/v1/embeddings", json={"input": text, "model": NAME}, timeout=20).json()
    assert "data" in answer, answer
    assert agrees(np.array(answer["data"][0]["embedding"]), wanted)
    nobody_named = requests.post(f"{url}/embed", json={"inputs": text}, timeout=20).json()
    assert agrees(np.array(nobody_named[0]), wanted)
    assert [each["id"] for each in requests.get(f"{url}/v1/models", timeout=20).json()["data"]] == [
        NAME,
        f"{NAME}-alias",
    ]


class Callers(Background):
    def __init__(self, far: Far) -> None:
        super().__init__()
        self.far, self.answered = far, 0
        self.failed: list[str] = []
        self.wanted = right(far, "steady")
        self.threads = [threading.Thread(target=self.call) for _ in range(4)]

    def call(self) -> None:
        while self.paused():
            try:
                assert agrees(embed(self.far, "steady"), self.wanted)
                self.answered += 1
            except Exception as error:
                self.failed.append(repr(error))


def test_a_replica_that_dies_fails_nobody_and_is_used_again_when_it_is_back(far: Far) -> None:
    gone, other = far.engines
    with Callers(far) as callers:
        time.sleep(0.5)
        gone.stop(signal.SIGKILL)
        time.sleep(1.0)
        gone.start()
        eventually(gone.answers, 30)
        other.stop(signal.SIGTERM)  # now all depends on the one that is back
        time.sleep(1.0)
    other.start()
    eventually(other.answers, 30)
    assert callers.failed == []
    assert callers.answered > 50


def test_changes_of_the_listing_are_followed(far: Far) -> None:
    first, second = far.addresses
    try:
        far.write(listing(first), listing(second, name="new"))
        assert agrees(found(far, "x", instance_name="new"), right(far, "x"))
        far.write(listing(first, second))
        eventually(lambda: refused(far, "new", grpc.StatusCode.NOT_FOUND))
    finally:
        far.write(listing(first, second))


def refusal(far: Far, name: str) -> grpc.RpcError | None:
    try:
        embed(far, "x", timeout=20, instance_name=name)
    except grpc.RpcError as error:
        return error
    return None


def refused(far: Far, name: str, code: grpc.StatusCode, words: str = "") -> bool:
    """Whether a call ends so."""
    error: Any = refusal(far, name)
    return error is not None and error.code() is code and words in error.details()


def test_a_broken_listing_and_a_new_multiplexer_keep_what_was_good(far: Far) -> None:
    far.write("[[instances]]\nname = ")
    try:
        far.running.supervisorctl("restart", "multiplexer:*")
        assert agrees(found(far, "kept"), right(far, "kept"))
    finally:
        far.write(listing(*far.addresses))


def test_a_program_that_serves_another_model_gets_no_call(far: Far, tmp_path: Path) -> None:
    """Addresses are given away again: its vectors would be taken for those of the model."""
    other = random_model(tmp_path / "other", width=32, layers=1, positions=64)
    with Engine(tmp_path, other) as stranger:
        try:
            far.write(listing(*far.addresses), listing(f"localhost:{stranger.port}", name="taken"))
            eventually(lambda: refused(far, "taken", grpc.StatusCode.UNAVAILABLE), 90)
            assert not any(refusal(far, "taken") is None for _ in range(20))
        finally:
            far.write(listing(*far.addresses))


def test_the_doctor_tells_who_answers(far: Far) -> None:
    try:
        far.write(listing(*far.addresses), listing("127.0.0.1:9", name="nowhere"))
        eventually(lambda: refused(far, "nowhere", grpc.StatusCode.UNAVAILABLE))
        told = json.loads(far.running.cli("doctor", "--json").stdout)
        found = {each["what"]: (each["verdict"], each["found"]) for each in told}
        assert found[f"instance {NAME}"] == ("ok", "2 of 2 addresses answer")
        assert found["instance nowhere"] == ("wrong", "0 of 1 addresses answer")
    finally:
        far.write(listing(*far.addresses))


def test_where_no_replica_is_the_answer_says_which_addresses_were_tried(far: Far) -> None:
    try:
        far.write(listing(*far.addresses), listing("127.0.0.1:9", name="nowhere"))
        eventually(lambda: refused(far, "nowhere", grpc.StatusCode.UNAVAILABLE, "127.0.0.1:9"))
    finally:
        far.write(listing(*far.addresses))


def test_an_instance_is_not_made_where_it_would_get_no_call(far: Far) -> None:
    body = {"name": "own", "model_id": TINY}
    reply = requests.post(f"{far.running.url}/instances", json=body, timeout=20)
    assert reply.status_code == 409
    assert reply.json()["code"] == "INSTANCES_ARE_LISTED"


def test_calls_go_through_tls_with_our_certificate(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The replica is another appliance, which asks for a certificate."""
    tmp_path = tmp_path_factory.mktemp("tls")  # a socket's path has at most 107 characters
    authority = Authority(tmp_path, "both")
    server = authority.issue("replica", ["DNS:localhost", "IP:127.0.0.1"])
    shown = authority.issue("front")
    tls = (
        f'[tls]\ncert_file = "{server.chain}"\nkey_file = "{server.key_path}"\nclient_ca_file = "{authority.pem}"\n'
        'require_client_cert = true\nallowed_subjects = ["front"]\n'
    )
    seed = f'[[instances]]\nname = "{NAME}"\nmodel_id = "{TINY}"\n'
    file = tmp_path / "directory.toml"
    trusting = f'directory = "static:{file}"\n[remote_tls]\nca_file = "{authority.pem}"\n'
    showing = f'cert_file = "{shown.chain}"\nkey_file = "{shown.key_path}"\n'
    caller = Caller(trusts=authority, shows=shown)
    with Secured(made(tmp_path / "behind"), tls, caller, seeds=seed) as behind:
        file.write_text(listing(f"localhost:{behind.grpc_port}", more='fingerprint = {model = "tiny"}\n'))
        with RunningAppliance(made(tmp_path / "stranger"), seeds="", settings=trusting) as stranger:
            eventually(lambda: refused(Far(stranger, [], file), NAME, grpc.StatusCode.UNAVAILABLE))
        with RunningAppliance(made(tmp_path / "front"), seeds="", settings=trusting + showing, cache=True) as front:
            far = Far(front, [], file)
            one = found(far, "through TLS")
            inner = tei.EmbedRequest(inputs="through TLS", truncate=True, normalize=True)
            request = mux.EmbedRequest(target=mux.Target(instance_name=NAME), request=inner)
            reply, call = front.stub().Embed.with_call(request)  # of the fingerprint in the listing
            assert (CACHE_KEY, "hit") in call.initial_metadata()
            assert agrees(np.array(reply.embeddings), one)
            many = [f"{number} words" for number in range(3000)]  # more than one record of TLS
            assert len(vectors(front.stub().EmbedArrow(dense_request(NAME, many)))) == 3000


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder
