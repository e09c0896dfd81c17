"""Status: the table at the top of core/status, row by row, and that there is a row for everything."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core.status import Process, instance_status, replica_status
from testing.specs import LAW

TIMEOUT = 300
STATUSES = {"starting", "running", "unhealthy", "stopping", "stopped", "failed"}
SUPERVISOR = ["STOPPED", "STARTING", "RUNNING", "BACKOFF", "STOPPING", "EXITED", "FATAL", "UNKNOWN"]


def seen(state: str | None, age: float = 1.0) -> Process | None:
    return None if state is None else Process("a", "a-0", state, pid=1, started=1000.0, now=1000.0 + age)


def rows(wanted: str, states: str, answers: bool | None, age: float | None, expected: str) -> list[tuple]:
    return [
        (wanted, None if state == "absent" else state, answer, years, expected)
        for state in states.split()
        for answer in ([True, False] if answers is None else [answers])
        for years in ([1.0, TIMEOUT + 1.0] if age is None else [age])
    ]


@pytest.mark.parametrize(
    ("wanted", "state", "answers", "age", "expected"),
    [
        *rows("running", "STOPPING", None, None, "stopping"),
        *rows("stopped", "STOPPING", None, None, "stopping"),
        *rows("stopped", "STARTING RUNNING", None, None, "stopping"),
        *rows("stopped", "absent STOPPED EXITED BACKOFF FATAL UNKNOWN", None, None, "stopped"),
        *rows("running", "FATAL UNKNOWN", None, None, "failed"),
        *rows("running", "STOPPED", None, None, "stopped"),
        *rows("running", "absent EXITED", None, None, "starting"),
        *rows("running", "BACKOFF", None, None, "starting"),
        *rows("running", "STARTING RUNNING", True, None, "running"),
        *rows("running", "STARTING RUNNING", False, 1.0, "starting"),
        *rows("running", "STARTING RUNNING", False, float(TIMEOUT), "starting"),
        *rows("running", "STARTING RUNNING", False, TIMEOUT + 0.1, "failed"),
    ],
)
def test_the_row_decides(wanted: str, state: str | None, answers: bool, age: float, expected: str) -> None:
    assert replica_status(wanted, seen(state, age), answers, TIMEOUT) == expected


def test_a_process_that_was_never_started_is_about_to_be() -> None:
    """Its model has just come; nobody has stopped it."""
    waiting = Process("a", "a-0", "STOPPED")
    assert replica_status("running", waiting, False, TIMEOUT) == "starting"
    assert replica_status("stopped", waiting, False, TIMEOUT) == "stopped"


@LAW
@given(
    st.sampled_from(["running", "stopped"]),
    st.sampled_from([None, *SUPERVISOR]),
    st.booleans(),
    st.floats(-10, 1e9),
    st.integers(1, 86400),
)
def test_there_is_a_status_for_all(wanted: str, state: str | None, answers: bool, age: float, limit: int) -> None:
    assert replica_status(wanted, seen(state, age), answers, limit) in STATUSES


@LAW
@given(st.lists(st.sampled_from(sorted(STATUSES)), min_size=1, max_size=6))
def test_an_instance_has_the_best_status_of_its_replicas(replicas: list[str]) -> None:
    status = instance_status(replicas)
    assert status in replicas
    assert (status == "running") == ("running" in replicas)
    assert (status == "stopped") == (set(replicas) == {"stopped"})
    assert instance_status(replicas[::-1]) == status
    assert status != "failed" or not {"running", "unhealthy", "starting", "stopping"} & set(replicas)


@pytest.mark.parametrize("step", [-86400.0, 86400.0])
def test_a_clock_that_is_set_while_a_model_loads_fails_nothing(step: float) -> None:
    young = Process("a", "a-0", "RUNNING", pid=1, started=1000.0, now=1010.0 + step, age=10.0)
    old = replace(young, age=TIMEOUT + 1.0)
    assert replica_status("running", young, False, TIMEOUT) == "starting"
    assert replica_status("running", old, False, TIMEOUT) == "failed"
    assert (young.uptime, replace(young, state="EXITED").uptime) == (10.0, None)


@pytest.mark.parametrize("state", SUPERVISOR)
def test_only_what_lives_has_an_uptime(state: str) -> None:
    process = seen(state, 5.0)
    uptime = process and process.uptime
    assert uptime == (5.0 if state in ("STARTING", "RUNNING") else None)
