"""Settings: the documented keys, defaults and variables; flag > environment > file > default; nothing wrong gets in."""

import re
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core import settings
from appliance.core.problems import Kind, Problem
from appliance.core.settings import Settings
from testing.specs import LAW, configured

EXAMPLE = Path(__file__).parents[2] / "etc" / "appliance.toml"
KEYS = [field.name for field in fields(Settings)]
EMPTY: list[Any] = []
EMPTY_TABLE: dict[str, Any] = {}
DEFAULTS = {
    "bind": "127.0.0.1",
    "api_port": 9000,
    "grpc_port": 9001,
    "http_port": 9002,
    "data_dir": "/data",
    "state_file": "/data/state.toml",
    "log_dir": "/data/logs",
    "health_check_interval_secs": 10,
    "startup_timeout_secs": 300,
    "max_failures_before_restart": 3,
    "graceful_shutdown_timeout_secs": 30,
    "auto_restore_on_restart": True,
    "max_instances": None,
    "instance_port_start": 8080,
    "instance_port_end": 8180,
    "prometheus_port_start": 8700,
    "models": (),
    "instances": (),
    "grpc_request_timeout_secs": 30,
    "grpc_max_message_size_mb": 40,
    "grpc_max_parallel_streams": 1024,
    "log_to": "files",
    "engine_cores": "shared",
}
VARIABLES = {
    "TEI_MANAGER_BIND": ("bind", "0.0.0.0", "0.0.0.0"),
    "TEI_MANAGER_API_PORT": ("api_port", "7000", 7000),
    "TEI_MANAGER_GRPC_PORT": ("grpc_port", "7001", 7001),
    "TEI_MANAGER_HTTP_PORT": ("http_port", "7002", 7002),
    "TEI_MANAGER_DATA_DIR": ("data_dir", "/elsewhere", "/elsewhere"),
    "TEI_MANAGER_STATE_FILE": ("state_file", "/elsewhere/s.toml", "/elsewhere/s.toml"),
    "TEI_MANAGER_LOG_DIR": ("log_dir", "/elsewhere/l", "/elsewhere/l"),
    "TEI_APPLIANCE_LOG_TO": ("log_to", "both", "both"),
    "TEI_APPLIANCE_ENGINE_CORES": ("engine_cores", "divided", "divided"),
    "TEI_MANAGER_INSTANCE_PORT_START": ("instance_port_start", "8100", 8100),
    "TEI_MANAGER_INSTANCE_PORT_END": ("instance_port_end", "8200", 8200),
    "TEI_MANAGER_PROMETHEUS_PORT_START": ("prometheus_port_start", "8800", 8800),
    "TEI_BINARY_PATH": ("tei_binary_path", "/opt/tei", "/opt/tei"),
    "TEI_MANAGER_HEALTH_CHECK_INTERVAL": ("health_check_interval_secs", "7", 7),
}


def refused(file: dict[str, Any], environ: dict[str, str] | None = None, flags: dict[str, Any] | None = None) -> str:
    with pytest.raises(Problem) as caught:
        settings.parse(file, environ or {}, flags or {}, "/data")
    assert (caught.value.kind, caught.value.code) == (Kind.INVALID, "VALIDATION_ERROR")
    return caught.value.message


@pytest.mark.parametrize(("key", "value"), DEFAULTS.items())
def test_the_default_is_the_documented_one(key: str, value: Any) -> None:
    assert getattr(configured(), key) == value


@pytest.mark.parametrize(("variable", "key", "text", "value"), [(k, *v) for k, v in VARIABLES.items()])
def test_a_documented_variable_sets_its_key(variable: str, key: str, text: str, value: Any) -> None:
    assert getattr(settings.parse({}, {variable: text}, {}, "/data"), key) == value


@pytest.mark.parametrize("sources", range(8))
def test_flag_beats_environment_beats_file_beats_default(sources: int) -> None:
    file = {"api_port": 7001} if sources & 1 else {}
    environ = {"TEI_MANAGER_API_PORT": "7002"} if sources & 2 else {}
    flags = {"api_port": 7003} if sources & 4 else {}
    winner = next((value for value, bit in ((7003, 4), (7002, 2), (7001, 1)) if sources & bit), 9000)
    assert settings.parse(file, environ, flags, "/data").api_port == winner


def test_a_flag_that_was_not_given_decides_nothing() -> None:
    assert settings.parse({"api_port": 7001}, {}, {"api_port": None}, "/data").api_port == 7001


def test_state_and_logs_follow_the_data_folder_unless_they_are_given() -> None:
    moved = settings.parse({"data_dir": "/file"}, {"TEI_MANAGER_DATA_DIR": "/env"}, {}, "/data")
    assert (moved.state_file, moved.log_dir) == ("/env/state.toml", "/env/logs")
    assert configured(data_dir="/x", log_dir="/y").log_dir == "/y"


@pytest.mark.parametrize("key", KEYS)
def test_a_misspelt_key_is_named_and_the_right_one_suggested(key: str) -> None:
    message = refused({key[:-1]: 1})
    assert f'"{key[:-1]}"' in message
    assert f'"{key}"' in message.split("did you mean")[1]


def test_a_key_like_no_other_is_named_without_a_wild_guess() -> None:
    assert '"zzzz"' in (message := refused({"zzzz": 1}))
    assert "did you mean" not in message


def test_a_misspelt_field_of_a_seed_is_named_with_its_table() -> None:
    message = refused({"instances": [{"name": "a", "model_id": "m"}, {"name": "b", "modl_id": "m"}]})
    assert re.search(r'instances.*modl_id.*did you mean "model_id"', message)


def test_the_wrong_seed_of_several_can_be_told_from_the_others() -> None:
    """The error names the dotted key."""
    message = refused({"instances": [{"name": "a", "model_id": "m"}, {"name": "b", "model_id": "m", "port": "x"}]})
    assert re.search(r"instances(\[1\]|\.1|\.b)\.port|\"b\".*\"port\"", message)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("api_port", value) for value in (0, -1, 65536, 2**70, 9000.0, "9000")],
        *[("grpc_port", value) for value in (True, None, [9001], {"port": 9001}, float("nan"), float("inf"))],
        *[("bind", value) for value in (7, True, "", "a\nb", ["127.0.0.1"], "x" * 10_000)],
        *[("auto_restore_on_restart", value) for value in (1, 0, "true", "yes", EMPTY, 1.0)],
        *[("max_instances", value) for value in (0, -1, "3", 1.5, True)],
        *[("models", value) for value in ("one", [1], [["a"]], {"a": 1}, [""], ["a\nb"])],
        *[("instances", value) for value in ("one", {"name": "a"}, [1], [EMPTY_TABLE], [{"name": "a"}])],
        *[("grpc_request_timeout_secs", value) for value in (-1, "30", 0.5)],
        *[("data_dir", value) for value in ("relative/folder", "", "/a\nb", "/a\0b", 7)],
        *[("instance_port_end", value) for value in (65537, 0, "8180")],
        *[
            ("prometheus_url", value)
            for value in (7, "localhost:9090", "ftp://a", "http://", "http://[x", "http://a:b")
        ],
        *[
            ("cors_allow_origins", [value])
            for value in (
                "https://a.example/",
                "a.example",
                "https://A.example",
                "https://a.example/x",
                "https://u@a",
                "",
            )
        ],
        *[("image_url_hosts", [value]) for value in ("http://a.example", "a.example/x", "u@a.example", "", "a b")],
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_key(key: str, value: Any) -> None:
    assert key in refused({key: value})


def test_origins_and_hosts_as_they_are_sent() -> None:
    origins = (
        "*",
        "https://app.example.com",
        "http://localhost:3000",
        "http://[::1]:8080",
        "null",
        "chrome-extension://abc",
    )
    loaded = settings.parse(
        {"cors_allow_origins": list(origins), "image_url_hosts": ["a.example", "a.example:8080"]}, {}, {}, "/data"
    )
    assert loaded.cors_allow_origins == origins
    assert loaded.image_url_hosts == ("a.example", "a.example:8080")


def test_an_astronomic_number_is_refused_like_any_other() -> None:
    assert "api_port" in refused({"api_port": 10**400})


NO_PORTS = ["x", "90 00", " 9000", "0x2328", "9e3", "-9000", "९०००", "9000.0", "0", "65536", "9" * 50]


@pytest.mark.parametrize("text", NO_PORTS)
def test_a_variable_that_is_no_port_is_refused_by_its_name(text: str) -> None:
    assert "TEI_MANAGER_API_PORT" in refused({}, {"TEI_MANAGER_API_PORT": text})


def test_a_wrong_flag_is_refused_by_its_name() -> None:
    assert "--api-port" in refused({}, {}, {"api_port": "nine"})


@pytest.mark.parametrize("pair", [("api_port", "grpc_port"), ("api_port", "http_port"), ("grpc_port", "http_port")])
def test_two_programs_never_share_a_port(pair: tuple[str, str]) -> None:
    message = refused({pair[0]: 7777, pair[1]: 7777})
    assert all(key in message for key in pair)


def test_a_collision_may_come_from_different_sources() -> None:
    refused({"api_port": 7000}, {"TEI_MANAGER_GRPC_PORT": "7000"})
    refused({}, {"TEI_MANAGER_GRPC_PORT": "9000"})


def test_the_port_range_may_be_empty_but_not_reversed() -> None:
    assert configured(instance_port_start=8080, instance_port_end=8080).instance_port_end == 8080
    message = refused({"instance_port_start": 8081, "instance_port_end": 8080})
    assert re.search("instance_port_end.*instance_port_start", message)


def test_two_seeds_may_not_have_one_name() -> None:
    assert '"a"' in refused({"instances": [{"name": "a", "model_id": "m"}, {"name": "a", "model_id": "n"}]})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@LAW
@given(st.sampled_from(KEYS), VALUES)
def test_any_value_of_any_key_is_taken_or_refused_by_name(key: str, value: Any) -> None:
    problem = None
    try:
        settings.parse({key: value}, {}, {}, "/data")
    except Problem as caught:
        problem = caught
    assert problem is None or (problem.kind == Kind.INVALID and key in problem.message and len(problem.message) < 1000)


# -- etc/appliance.toml -----------------------------------------------------------------------------------------------


def uncommented() -> str:
    """The example with every `# key = value`, `# [table]` and `# [[table]]` line switched on."""
    return re.sub(r"^# (\w+ = .+|\[[a-z_]+\]|\[\[[a-z_]+\]\])$", r"\1", EXAMPLE.read_text(encoding="utf-8"), flags=re.M)


def test_the_example_names_every_key_and_no_other() -> None:
    assert sorted(tomllib.loads(uncommented())) == sorted(KEYS)


def test_the_example_names_every_key_of_every_table() -> None:
    shown = tomllib.loads(uncommented())
    tables = {field.name: field.default for field in fields(Settings) if is_dataclass(field.default)}
    for name, defaults in tables.items():
        assert sorted(shown[name]) == sorted(field.name for field in fields(defaults))


def test_what_the_example_sets_are_the_defaults() -> None:
    assert configured(**tomllib.loads(EXAMPLE.read_text(encoding="utf-8"))) == configured()


def test_what_the_example_only_shows_is_accepted_too() -> None:
    shown = configured(**tomllib.loads(uncommented()))
    assert (shown.max_instances, len(shown.instances)) == (10, 1)


@pytest.mark.parametrize("variable", VARIABLES)
def test_the_example_names_the_variable(variable: str) -> None:
    assert f"[{variable}]" in EXAMPLE.read_text(encoding="utf-8")
