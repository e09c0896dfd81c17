"""tei-manager's files: what means the same is taken, the rest is refused with our name for it; nothing is silent."""

import tomllib
from datetime import UTC, datetime
from typing import Any

import pytest

from appliance.core import moving_in, settings, state_toml
from appliance.core.instance import OWNED_FLAGS
from appliance.core.problems import Problem
from appliance.core.state import State

MTLS = {"ca_cert": "/c/ca.pem", "server_cert": "/c/server.pem", "server_key": "/c/server.key"}
AUTH = {"enabled": True, "providers": ["mtls"], "mtls": MTLS}

# As its image has it (0.12), with an instance of each of its ways to write one.
SHIPPED = """
api_port = 9000
grpc_port = 9001
grpc_enabled = true
state_file = "/app/state/tei-manager-state.json"
tei_binary_path = "/usr/local/bin/text-embeddings-router"
max_instances = 10
health_check_interval_secs = 10
startup_timeout_secs = 300
max_failures_before_restart = 3
instance_port_start = 8080
instance_port_end = 8180
auto_restore_on_restart = true

[auth]
enabled = false
"""
STATE = """
last_updated = "2026-01-02T03:04:05.678901234Z"

[[instances]]
name = "bge-large-en-v1.5"
model_id = "BAAI/bge-large-en-v1.5"
port = 8080
max_batch_tokens = 32768
max_concurrent_requests = 256
gpu_id = 0
prometheus_port = 9100
extra_args = ["--dtype", "float16", "--auto-truncate"]
created_at = "2026-01-01T00:00:00Z"

[[instances]]
name = "splade"
model_id = "naver/splade-v3"
port = 8081
max_batch_tokens = 16384
max_concurrent_requests = 512
pooling = "splade"
prometheus_port = 9101
extra_args = ["--json-output", "--revision=main"]

[[instances]]
name = "off"
model_id = "org/m"
port = 8082
max_batch_tokens = 16384
max_concurrent_requests = 512
prometheus_port = 0
startup_timeout_secs = 60
extra_args = []
"""


def configured(**file: Any) -> settings.Settings:
    return settings.parse(file, {}, {}, "/data")


def refused(environ: dict[str, str] | None = None, **file: Any) -> str:
    with pytest.raises(Problem) as caught:
        settings.parse(file, environ or {}, {}, "/data")
    return caught.value.message


def test_its_shipped_configuration_is_taken_as_it_is() -> None:
    chosen = configured(**tomllib.loads(SHIPPED))
    assert chosen.state_file == "/app/state/tei-manager-state.json"
    assert (chosen.max_instances, chosen.tls.on) == (10, False)


def test_its_client_certificates_are_our_tls() -> None:
    tls = configured(auth={**AUTH, "mtls": {**MTLS, "verify_san": True, "allowed_sans": ["search.example.com"]}}).tls
    assert (tls.cert_file, tls.key_file, tls.client_ca_file) == ("/c/server.pem", "/c/server.key", "/c/ca.pem")
    assert tls.require_client_cert
    assert (tls.allowed_sans, tls.allowed_subjects) == (("search.example.com",), ())


def test_lists_that_it_does_not_read_count_for_nothing_here_either() -> None:
    mtls = {**MTLS, "verify_subject": False, "allowed_subjects": ["CN=a"], "verify_san": False, "allowed_sans": ["b"]}
    tls = configured(auth={**AUTH, "mtls": mtls}).tls
    assert (tls.allowed_sans, tls.allowed_subjects) == ((), ())


@pytest.mark.parametrize(
    ("file", "ours"),
    [
        ({"grpc_enabled": False}, "bind"),
        ({"grpc_enabled": "no"}, '"grpc_enabled"'),
        ({"grpc": {"tls": {"cert_path": "/c"}}}, "[tls]"),
        ({"grpc": {"multiplexer_port": 9001}}, "grpc_port"),
        ({"grpc": {"max_parallel_streams": 7}}, "grpc_max_parallel_streams"),
        ({"grpc": 7}, '"grpc" must be a table'),
        ({"auth": {"enabled": True}}, '"auth.providers"'),
        ({"auth": {"enabled": True, "providers": ["mtls"]}}, "[auth.mtls]"),
        ({"auth": {"enabled": True, "providers": ["oauth"], "mtls": MTLS}}, '"auth.providers"'),
        ({"auth": {**AUTH, "require_cert_headers": True}}, "a header proves nothing"),
        ({"auth": {**AUTH, "mtls": {**MTLS, "allow_self_signed": True}}}, "auth.mtls.ca_cert"),
        ({"auth": {**AUTH, "mtls": {**MTLS, "allowed_subjects": ["CN=client1"]}}}, "tls.allowed_subjects"),
        ({"auth": {**AUTH, "mtls": {"ca_cert": "/c"}}}, '"auth.mtls.server_cert" is required'),
        ({"auth": {**AUTH, "mtls": {**MTLS, "server_cert": "server.pem"}}}, "tls.cert_file"),
        ({"auth": {"enable": True}}, 'Unknown key "auth.enable"'),
        ({"auth": AUTH, "tls": {"cert_file": "/a", "key_file": "/b"}}, '"auth.mtls" and "tls"'),
    ],
    ids=str,
)
def test_what_means_something_else_is_refused_with_our_name_for_it(file: dict[str, Any], ours: str) -> None:
    assert ours in refused(**file)


@pytest.mark.parametrize("variable", ["TEI_MANAGER_GRPC_TLS_CERT_PATH", "TEI_MANAGER_AUTH_ENABLED"])
def test_a_variable_that_would_do_nothing_is_refused(variable: str) -> None:
    assert variable in refused({variable: "x"})


def test_a_variable_that_switches_grpc_off_is_refused() -> None:
    assert "TEI_MANAGER_GRPC_ENABLED" in refused({"TEI_MANAGER_GRPC_ENABLED": "false"})
    settings.parse({}, {"TEI_MANAGER_GRPC_ENABLED": "true", "TEI_MANAGER_PORT_9000_TCP": "tcp://x"}, {}, "/data")


def test_its_state_is_taken_instance_by_instance() -> None:
    table = tomllib.loads(STATE)
    assert moving_in.is_foreign(table)
    large, splade, off = moving_in.instances_of(table)
    assert (large.spec.name, large.spec.dtype, large.created_at) == (
        "bge-large-en-v1.5",
        "float16",
        "2026-01-01T00:00:00Z",
    )
    assert large.spec.extra_args == ("--auto-truncate",)
    assert (large.spec.port, large.spec.prometheus_port, large.spec.gpu_id) == (8080, 9100, 0)
    assert (splade.spec.pooling, splade.spec.revision, splade.spec.extra_args) == ("splade", "main", ())
    assert splade.created_at == ""
    assert off.spec.metrics_off


def test_a_date_of_toml_is_a_date() -> None:
    table = {"name": "a", "model_id": "m", "created_at": datetime(2026, 1, 1, tzinfo=UTC)}
    assert moving_in.moved(table, 0).created_at == "2026-01-01T00:00:00+00:00"


@pytest.mark.parametrize("date", ["junk", 5, "2026-01-01T00:00:00Z" + "0" * 60, ""])
def test_what_is_no_date_is_none(date: Any) -> None:
    assert moving_in.moved({"name": "a", "model_id": "m", "created_at": date}, 0).created_at == ""


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"name": "a/b", "model_id": "m"}, 'instances[1] ("a/b"): Field "name"'),
        ({"name": "a"}, '"model_id" is required'),
        ({"name": "a", "model_id": "m", "extra_args": ["--hostname", "x"]}, "--hostname"),
        ({"name": "a", "model_id": "m", "extra_args": ["--pooling", "max"]}, '"pooling"'),
        ({"name": "a", "model_id": "m", "extra_args": ["--dtype"]}, "--dtype"),
        ({"name": "a", "model_id": "m", "auto_start": True}, "auto_start"),
        (7, "instances[1] (without a name)"),
        ({"name": "a", "model_id": "m", "extra_args": 5}, "must be a list"),
        ({"name": "a", "model_id": "m", "extra_args": "--pooling cls"}, "must be a list"),
    ],
    ids=str,
)
def test_what_cannot_be_one_of_ours_is_named(entry: Any, why: str) -> None:
    with pytest.raises(Problem) as caught:
        moving_in.instances_of({"instances": [{"name": "ok", "model_id": "m"}, entry]})
    assert why in caught.value.message


def test_only_flags_that_we_set_ourselves_become_fields() -> None:
    assert set(moving_in.FLAG_FIELDS) < set(OWNED_FLAGS)


def test_our_own_state_is_not_taken_for_its() -> None:
    assert not moving_in.is_foreign(state_toml.dump(State()))
    assert not moving_in.is_foreign({"last_updated": "x", "instances": 7})


def test_its_state_is_no_state_of_ours_and_says_what_takes_it_over() -> None:
    with pytest.raises(ValueError, match="appliance up"):
        state_toml.load(tomllib.loads(STATE))
