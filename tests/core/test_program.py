"""Programs: TEI's flags and environment for each replica, and which inherited variables must not reach it."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core import program, state
from appliance.core.problems import Kind, Problem
from appliance.core.program import MARKER, SCRUBBED_VARIABLES, Program
from appliance.core.settings import Settings
from appliance.core.state import State
from testing.specs import LAW, configured, spec

TEI = configured(tei_binary_path="/opt/tei router")
# reference/tei.md, section 1: every variable that is a TEI flag and has a name that anybody could have set.
GENERIC = """
    MODEL_ID REVISION TOKENIZATION_WORKERS DTYPE SERVED_MODEL_NAME POOLING MAX_CONCURRENT_REQUESTS MAX_BATCH_TOKENS
    MAX_BATCH_REQUESTS MAX_CLIENT_BATCH_SIZE AUTO_TRUNCATE DEFAULT_PROMPT_NAME DEFAULT_PROMPT DENSE_PATH HOSTNAME PORT
    UDS_PATH PAYLOAD_LIMIT API_KEY JSON_OUTPUT DISABLE_SPANS OTLP_ENDPOINT OTLP_SERVICE_NAME PROMETHEUS_PORT
    CORS_ALLOW_ORIGIN TASK
"""
PASSED_ON = "HF_TOKEN HF_HOME HF_ENDPOINT HUGGINGFACE_HUB_CACHE CUDA_VISIBLE_DEVICES LOG_LEVEL PATH HOME"


def programs(settings: Settings = TEI, *, wanted: str = "running", **fields: Any) -> list[Program]:
    current = state.add(State(), spec("inst", **fields), settings, (), "now")
    current = current if wanted == "running" else state.stop(current, "inst")
    return program.programs_of(current.get("inst"), settings, "/venv/python", "node")


def flags(one: Program) -> dict[str, str]:
    return dict(itertools.pairwise(one.argv))


def test_tei_gets_exactly_the_flags_of_the_spec() -> None:
    (one,) = programs(model_id="org/m", revision="r", pooling="cls", dtype="float16", port=20000, prometheus_port=21000)
    assert one.argv[3] == "/opt/tei router"
    assert flags(one) | {
        "--model-id": "org/m",
        "--revision": "r",
        "--port": "20000",
        "--prometheus-port": "21000",
        "--max-batch-tokens": "16384",
        "--max-concurrent-requests": "512",
        "--pooling": "cls",
        "--dtype": "float16",
    } == flags(one)


def test_replicas_listen_on_a_loopback_literal_because_tei_takes_a_name_for_all_interfaces() -> None:
    assert all(flags(one)["--hostname"] == "127.0.0.1" for one in programs(replicas=3))


@pytest.mark.parametrize("flag", ["--revision", "--pooling", "--dtype"])
def test_what_was_not_asked_for_is_left_to_tei(flag: str) -> None:
    assert flag not in programs()[0].argv


def test_extra_args_come_last_and_unchanged() -> None:
    extra = ["--auto-truncate=false", "--default-prompt", "a b ; %(x)s", ""]
    assert programs(extra_args=extra)[0].argv[-4:] == tuple(extra)


def test_no_flag_of_ours_is_given_twice() -> None:
    (one,) = programs(pooling="cls", dtype="float16", revision="main", extra_args=["--auto-truncate", "false"])
    given = [part for part in one.argv if part.startswith("--")]
    assert len(given) == len(set(given))


def test_the_embedded_engine_takes_the_same_flags() -> None:
    tei, embedded = programs(engine="tei")[0], programs(engine="embedded")[0]
    assert embedded.argv[0] == "/venv/python"
    assert embedded.argv[embedded.argv.index("--model-id") :] == tei.argv[tei.argv.index("--model-id") :]


def test_the_engine_is_what_is_installed_unless_asked() -> None:
    assert programs()[0].argv[:4] == ("/venv/python", "-m", "appliance.tei", "/opt/tei router")
    assert programs(configured())[0].argv[:3] == ("/venv/python", "-m", "appliance.engine")


def test_asking_for_tei_where_there_is_none_is_refused() -> None:
    with pytest.raises(Problem, match="tei_binary_path") as caught:
        program.refuse_missing_engine("tei", configured())
    assert caught.value.kind == Kind.INVALID
    for engine in (None, "embedded"):
        program.refuse_missing_engine(engine, configured())
    program.refuse_missing_engine("tei", TEI)


@LAW
@given(st.integers(1, 8), st.lists(st.integers(0, 7), max_size=4))
def test_every_replica_sees_its_own_gpu_and_ports(replicas: int, gpus: list[int]) -> None:
    made = programs(replicas=replicas, gpu_ids=gpus)
    expected = [str(gpus[i % len(gpus)]) if gpus else None for i in range(replicas)]
    assert [one.environment.get("CUDA_VISIBLE_DEVICES") for one in made] == expected
    assert len({flags(one)[flag] for one in made for flag in ("--port", "--prometheus-port")}) == 2 * replicas
    assert len({one.name for one in made}) == len({one.log_file for one in made}) == replicas
    assert len({one.environment[MARKER] for one in made}) == replicas


def test_gpu_0_is_a_choice_and_none_is_not() -> None:
    assert programs(gpu_id=0)[0].environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert "CUDA_VISIBLE_DEVICES" not in programs()[0].environment


def test_a_stopped_instance_does_not_start_with_supervisor() -> None:
    assert [one.autostart for one in programs(replicas=2)] == [True, True]
    assert [one.autostart for one in programs(replicas=2, wanted="stopped")] == [False, False]


def test_a_new_launch_changes_the_program_and_a_stop_alone_does_not_look_like_one() -> None:
    first = state.add(State(), spec(), TEI, (), "now")
    again = [state.start(first, "a"), state.restart(first, "a"), state.restart(state.stop(first, "a"), "a")]
    made = [program.programs_of(current.get("a"), TEI, "python", "node") for current in (first, *again)]
    assert made[0] != made[1]
    assert made[1:] == [made[1]] * 3


def test_stop_waits_as_long_as_the_setting_says() -> None:
    assert programs(configured(graceful_shutdown_timeout_secs=7))[0].stop_wait_secs == 7


def test_logs_go_to_the_log_folder() -> None:
    logged = [one.log_file for one in programs(configured(log_dir="/l"), replicas=2)]
    assert logged == ["/l/inst-0.log", "/l/inst-1.log"]


@pytest.mark.parametrize("variable", GENERIC.split())
def test_a_generic_variable_that_is_a_tei_flag_is_scrubbed(variable: str) -> None:
    assert variable in SCRUBBED_VARIABLES


@pytest.mark.parametrize("variable", PASSED_ON.split())
def test_what_operators_set_on_purpose_passes(variable: str) -> None:
    assert variable not in SCRUBBED_VARIABLES


def test_request_lines_are_asked_for_by_the_instance_alone() -> None:
    """Who sends traces gets them, too: what hides the lines would hide the spans."""
    assert "LOG_LEVEL" not in programs()[0].environment
    assert programs(request_logs=True)[0].environment["LOG_LEVEL"] == "info"
    assert programs(extra_args=["--otlp-endpoint=http://h:4317"])[0].environment["LOG_LEVEL"] == "info"
