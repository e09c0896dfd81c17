"""The steps of a rolling restart, by what is seen of the replicas."""

import pytest

from appliance.core.rolling import Seen, Step, next_replica, next_step

OLD, NEW = 100, 200
WELL, LOADING = Seen("RUNNING", 1, answers=True), Seen("STARTING", 1, answers=False)


@pytest.mark.parametrize(
    ("replica", "other", "step"),
    [
        (Seen("RUNNING", OLD, True), WELL, Step.STOP),
        (Seen("RUNNING", OLD, False), WELL, Step.STOP),  # one that does not answer is restarted as well
        (Seen("RUNNING", OLD, True), LOADING, Step.WAIT),
        (Seen("RUNNING", OLD, True), Seen("FATAL", None, False, quarantined=True), Step.STOP),
        (Seen("RUNNING", OLD, True), Seen("STOPPED", None, False), Step.STOP),  # it waited for that for ever
        (Seen("RUNNING", OLD, True), Seen("STOPPING", 1, False), Step.WAIT),
        (Seen("RUNNING", OLD, True), Seen("FATAL", None, False), Step.WAIT),
        (Seen("STOPPING", OLD, False), WELL, Step.WAIT),
        (Seen("STOPPED", None, False), WELL, Step.START),
        (Seen("STOPPED", None, False), LOADING, Step.START),
        (Seen("FATAL", None, False), WELL, Step.START),
        (Seen("BACKOFF", None, False), WELL, Step.WAIT),
        (Seen("ABSENT", None, False), WELL, Step.WAIT),
        (Seen("STARTING", NEW, False), WELL, Step.WAIT),
        (Seen("RUNNING", NEW, True), LOADING, Step.DONE),
        (Seen("STOPPED", None, False, quarantined=True), WELL, Step.GIVE_UP),
        (Seen("RUNNING", OLD, False, ejected=True), LOADING, Step.STOP),
        (Seen("RUNNING", OLD, False), LOADING, Step.WAIT),  # it has missed one probe, and answers others
    ],
)
def test_each_row_of_the_table(replica: Seen, other: Seen, step: Step) -> None:
    assert next_step(OLD, replica, {1: other}) is step


@pytest.mark.parametrize(
    ("last", "turn"),
    [
        (WELL, 0),
        (LOADING, 0),
        (Seen("STOPPED", None, False), 1),
        (Seen("FATAL", None, False), 1),
        (Seen("STOPPED", None, False, quarantined=True), 0),
        (Seen("RUNNING", 1, False, ejected=True), 1),  # with max_failures_before_restart = 0 nobody else ends it
        (Seen("RUNNING", NEW, False, ejected=True), 0),
    ],
)
def test_one_that_is_stopped_or_hangs_goes_before_the_others_wait_for_it(last: Seen, turn: int) -> None:
    assert next_replica({0: OLD, 1: 1}, {0: Seen("RUNNING", OLD, True), 1: last}) == turn


def test_one_that_was_stopped_by_hand_holds_up_none_of_the_others() -> None:
    """`supervisorctl stop a:a-0` in the midst of a rolling restart: the rest waited for it without end."""
    old, stopped = Seen("RUNNING", OLD, True), Seen("STOPPED", None, False)
    assert next_step(OLD, old, {0: stopped, 1: WELL}) is Step.STOP
    assert next_step(OLD, old, {0: stopped, 1: LOADING}) is Step.WAIT
    assert next_replica({2: OLD}, {0: stopped, 1: WELL, 2: old}) == 2


def test_never_two_are_away() -> None:
    """Whatever order things happen in: a replica is stopped only while all others answer."""
    others = {1: WELL, 2: LOADING}
    assert next_step(OLD, Seen("RUNNING", OLD, True), others) is Step.WAIT
