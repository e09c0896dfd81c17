"""When a silent program counts as hung."""

import pytest

from appliance.core.hanging import BUSY_SECS, IDLE_SECS, LOOKS, ProcessActivity, Silence, silent, why_hung

BEFORE = Silence(pid=7, since=1000.0, looked_at=1005.0, active_secs=50.0, looks=LOOKS)


@pytest.mark.parametrize(
    ("activity", "hangs_after"),
    [
        (ProcessActivity(50.0), IDLE_SECS),
        (ProcessActivity(51.4), IDLE_SECS),
        (ProcessActivity(20.0), IDLE_SECS),  # threads have ended, and with them what they waited
        (ProcessActivity(50.0, stopped=True), IDLE_SECS),
        (ProcessActivity(1000.0), BUSY_SECS),
    ],
    ids=["idle", "its clocks tick", "threads ended", "stopped", "busy"],
)
def test_it_hangs_when_its_time_is_over(activity: ProcessActivity, hangs_after: float) -> None:
    assert why_hung(BEFORE, activity, 1000.0 + hangs_after - 0.1) == ""
    assert f"no heartbeat for {hangs_after:.0f} s" in why_hung(BEFORE, activity, 1000.0 + hangs_after)


def test_a_tenth_of_the_time_is_busy() -> None:
    assert why_hung(BEFORE, ProcessActivity(52.0), 1025.0) == ""
    assert why_hung(BEFORE, ProcessActivity(51.9), 1025.0) == "has had no heartbeat for 25 s and did nothing"


def test_who_waited_for_a_disk_at_one_look_is_busy() -> None:
    silence = silent(None, 7, ProcessActivity(50.0, blocked=True), 1005.0, 1000.0)
    for now in (1010.0, 1015.0):
        silence = silent(silence, 7, ProcessActivity(50.0), now, 1000.0)
    assert why_hung(silence, ProcessActivity(50.0), 1000 + BUSY_SECS - 1) == ""
    assert why_hung(silence, ProcessActivity(50.0), 1000 + BUSY_SECS)


def test_a_heartbeat_between_two_looks_ends_the_silence() -> None:
    silence = silent(None, 7, ProcessActivity(50.0), 1005.0, 1000.0)
    assert silent(silence, 7, ProcessActivity(50.0), 1010.1, 1005.1) == Silence(7, 1005.1, 1010.1, 50.0)


def test_a_debugger_has_all_the_time() -> None:
    assert why_hung(BEFORE, ProcessActivity(50.0, stopped=True, traced=True), 1e9) == ""


def test_one_look_after_a_long_time_shows_no_hang() -> None:
    """The machine may have slept meanwhile."""
    assert why_hung(silent(None, 7, ProcessActivity(50.0), 1e6, 1e6 - 3600.0), ProcessActivity(50.0), 1e6) == ""


def test_each_program_has_its_patience() -> None:
    assert why_hung(BEFORE, ProcessActivity(50.0), 1000 + IDLE_SECS, patience_secs=120) == ""
    assert why_hung(BEFORE, ProcessActivity(50.0, stopped=True), 1000 + IDLE_SECS, patience_secs=120)


def test_the_next_process_begins_anew() -> None:
    second = silent(silent(None, 7, ProcessActivity(1.0), 10.0, 4.0), 7, ProcessActivity(2.0), 15.0, 4.0)
    assert second == Silence(7, 4.0, 10.0, 1.0, 2)
    assert silent(second, 8, ProcessActivity(0.5), 30.0, 23.0) == Silence(8, 23.0, 30.0, 0.5, 1)
