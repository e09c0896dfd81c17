"""nginx and Envoy with certificates, before an appliance that wants them, too: who gets through, and who does not."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
import requests

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub
from testing.certificates import Authority, Issued
from testing.fronts import RunningFront
from testing.running import TINY, eventually
from tests.security import Caller, Secured

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
BOX_NAME = "box.internal"


class Certificates(NamedTuple):
    """inside: of the appliance and what it trusts; outside: of the front and its callers."""

    inside: Authority
    outside: Authority
    box: Issued
    front_to_box: Issued
    front: Issued
    caller: Issued


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    inside, outside = Authority(folder / "inside", "inside"), Authority(folder / "outside", "outside")
    return Certificates(
        inside,
        outside,
        inside.issue("box", [f"DNS:{BOX_NAME}", "IP:127.0.0.1", "DNS:localhost"]),
        inside.issue("front"),
        outside.issue("front", ["IP:127.0.0.1"]),
        outside.issue("caller"),
    )


@pytest.fixture(scope="module")
def box(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("box")
    settings = (
        f'[tls]\ncert_file = "{certificates.box.chain}"\nkey_file = "{certificates.box.key_path}"\n'
        f'client_ca_file = "{certificates.inside.pem}"\nrequire_client_cert = true\nallowed_subjects = ["front"]\n'
    )
    caller = Caller(trusts=certificates.inside, shows=certificates.front_to_box)
    seeds = f'[[instances]]\nname = "tiny"\nmodel_id = "{TINY}"\n'
    with Secured(folder, settings, caller, seeds, caller.environ) as running:
        running.wait_ready("tiny")
        yield running


def secured(kind: str, folder: Path, box: Secured, certificates: Certificates, name: str = BOX_NAME) -> RunningFront:
    files = {
        "cert": certificates.front.chain,
        "key": certificates.front.key_path,
        "client-ca": certificates.outside.pem,
        "boxes-ca": certificates.inside.pem,
        "client-cert": certificates.front_to_box.chain,
        "client-key": certificates.front_to_box.key_path,
    }
    flags = [f"--{flag}={path}" for flag, path in files.items()]
    return RunningFront(kind, folder, *flags, f"--boxes-name={name}", f"127.0.0.1:{box.grpc_port}:{box.http_port}")


def embed(front: RunningFront, certificates: Certificates, shown: Issued | None) -> int:
    """How many numbers the vector has."""
    own = (shown.key_path.read_bytes(), shown.chain.read_bytes()) if shown else (None, None)
    credentials = grpc.ssl_channel_credentials(certificates.outside.pem.read_bytes(), *own)
    inner = tei.EmbedRequest(inputs="x", truncate=True)
    request = mux.EmbedRequest(target=mux.Target(instance_name="tiny"), request=inner)
    with grpc.secure_channel(f"127.0.0.1:{front.grpc_port}", credentials) as channel:
        return len(TeiMultiplexerStub(channel).Embed(request, timeout=30).embeddings)


def over_http(front: RunningFront, certificates: Certificates, shown: Issued | None) -> int:
    """The status."""
    own = (str(shown.chain), str(shown.key_path)) if shown else None
    url = f"https://127.0.0.1:{front.http_port}/v1/embeddings"
    body = {"model": "tiny", "input": "x"}
    return requests.post(url, json=body, verify=str(certificates.outside.pem), cert=own, timeout=30).status_code


@pytest.mark.parametrize("kind", ["nginx", "envoy"])
def test_certificates_on_both_sides(kind: str, tmp_path: Path, box: Secured, certificates: Certificates) -> None:
    with secured(kind, tmp_path / kind, box, certificates) as front:
        eventually(lambda: embed(front, certificates, certificates.caller) > 0)
        eventually(lambda: over_http(front, certificates, certificates.caller) == 200)
        for shown in (None, certificates.front_to_box):  # nobody, and one of another authority
            with pytest.raises(grpc.RpcError):
                embed(front, certificates, shown)
            try:
                assert over_http(front, certificates, shown) == 400  # nginx says so in HTTP
            except requests.ConnectionError:
                assert kind == "envoy"


@pytest.mark.parametrize("kind", ["nginx", "envoy"])
def test_an_appliance_that_shows_another_name_is_not_trusted(
    kind: str, tmp_path: Path, box: Secured, certificates: Certificates
) -> None:
    with secured(kind, tmp_path / kind, box, certificates, "other.internal") as front:
        with pytest.raises(grpc.RpcError) as refused:
            embed(front, certificates, certificates.caller)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert over_http(front, certificates, certificates.caller) == 503
