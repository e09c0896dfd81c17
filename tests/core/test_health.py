"""What is done about a replica: histories as data, one line a look, with what must be done at it."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core import health
from appliance.core.health import Act, Action, Look, Policy, ProbeResult, Record

POLICY = Policy(interval_secs=10, max_failures=3, startup_secs=300)
A, B, M, W = ProbeResult.ANSWERED, ProbeResult.BUSY, ProbeResult.MISSED, ProbeResult.WRONG
READY, EJECT, READMIT = Act.READY, Act.EJECT, Act.READMIT
RESTART, QUARANTINE, STOP, DIED = Act.RESTART, Act.QUARANTINE, Act.STOP, Act.DIED
STOPPED, START, MOVE = Act.STOPPED, Act.START, Act.MOVE


def up(pid: int = 1, probe: ProbeResult | None = None, **other: Any) -> Look:
    return Look(launch=1, state="RUNNING", pid=pid, uptime=20.0, listening=True, probe=probe, **other)


def gone(state: str = "EXITED", ending: str = "ended with exit status 1", **other: Any) -> Look:
    return Look(launch=1, state=state, ending=ending, **other)


History = list[tuple[float, Look, list[Act]]]  # at second, what is seen, what is done
HISTORIES: dict[str, History] = {
    "answers": [(0, up(), []), (1, up(probe=A), [READY]), (11, up(probe=A), []), (700, up(probe=A), [])],
    "one miss is ejected, the next answer readmitted": [
        (0, up(probe=A), [READY]),
        (10, up(probe=M), [EJECT]),
        (11, up(probe=A, ejected=True), [READMIT]),
    ],
    "three misses restart": [
        (0, up(probe=A), [READY]),
        (10, up(probe=M), [EJECT]),
        (13, up(probe=M, ejected=True), []),
        (16, up(probe=M, ejected=True), [RESTART]),
        (17, up(pid=2, ejected=True), []),  # told as a restart
        (19, up(pid=2, probe=A, ejected=True), [READY, READMIT]),
    ],
    "looks without news change nothing": [
        (0, up(probe=A), [READY]),
        (10, up(probe=M), [EJECT]),
        *((10 + second, up(ejected=True), []) for second in range(1, 30)),
    ],
    "busy is not missed": [(0, up(probe=A), [READY]), *((second, up(probe=B), []) for second in range(1, 60))],
    "a restart waits for the back-off": [
        (0, up(probe=M), [EJECT]),
        (1, up(probe=M, ejected=True), []),
        (2, up(probe=M, ejected=True), [RESTART]),  # the next not before 3
        (2.2, up(probe=M, ejected=True), []),
        (2.4, up(probe=M, ejected=True), []),
        (2.6, up(probe=M, ejected=True), []),
        (3.1, up(probe=M, ejected=True), [RESTART]),  # the next not before 5.1
        (4.0, up(probe=M, ejected=True), []),
        (5.0, up(probe=M, ejected=True), []),
        (5.2, up(probe=M, ejected=True), [RESTART]),
    ],
    "wrong answers: once more, then no more": [
        (0, up(probe=A), [READY]),
        (60, up(probe=W), [EJECT, RESTART]),
        (61, up(pid=2, ejected=True), []),
        (65, up(pid=2, probe=W, ejected=True), [QUARANTINE]),
        (66, up(pid=2, quarantined=True), [STOP]),
        (67, gone("STOPPED", quarantined=True), []),
    ],
    "right again after the restart": [
        (0, up(probe=A), [READY]),
        (60, up(probe=W), [EJECT, RESTART]),
        (61, up(pid=2, ejected=True), []),
        (65, up(pid=2, probe=A, ejected=True), [READY, READMIT]),
    ],
    "five deaths in ten minutes": [
        (0, up(pid=1), []),
        (10, up(pid=2), [DIED]),
        (20, gone(), [DIED]),
        (21, up(pid=3), []),
        (30, up(pid=4), [DIED]),
        (40, up(pid=5), [DIED]),
        (50, up(pid=6), [DIED, QUARANTINE]),
    ],
    "five deaths in an hour": [
        (0, up(pid=1), []),
        *((700.0 * number, up(pid=number + 1), [DIED]) for number in range(1, 8)),
    ],
    "supervisor gave up": [(0, up(), []), (5, gone("FATAL"), [DIED, QUARANTINE])],
    "never opened its port": [
        (0, replace(up(), listening=False, uptime=299.0), []),
        (2, replace(up(), listening=False, uptime=301.0), [QUARANTINE]),
    ],
    "an operator's stop is no death": [
        (0, up(probe=A), [READY]),
        (1, gone("STOPPING"), []),
        (2, gone("STOPPED"), [STOPPED]),
        (3, gone("STOPPED"), []),
        (50, up(pid=2), []),
        (51, up(pid=2, probe=A), [READY]),
    ],
    "what we ended is told once, and what ends by itself after it is a death": [
        *((second, up(probe=M, ejected=second > 0), [[EJECT], [], [RESTART]][second]) for second in range(3)),
        (3, gone(), []),
        (4, up(pid=2), []),
        (5, up(pid=3), [DIED]),
    ],
    "a port that somebody else has taken is left": [
        (0, up(probe=A), [READY]),
        (1, replace(gone(), stranger="process 7 (x)"), [DIED, MOVE]),
        (2, replace(up(pid=2), listening=False, stranger="process 7 (x)"), [MOVE]),
        (3, up(pid=3), [DIED]),
    ],
    "deaths for which a call was convicted do not count": [
        (0, up(pid=1), []),
        *((float(number), replace(up(pid=number + 1), excused=number - 1), [DIED]) for number in range(1, 9)),
        (9, replace(gone("FATAL"), excused=8), [DIED, START]),
        (10, replace(up(pid=20), excused=4), [QUARANTINE]),
    ],
    "deaths and their convictions are forgotten at the same time": [
        (0, up(pid=1), []),
        *((float(number), replace(up(pid=number + 1), excused=number), [DIED]) for number in range(1, 7)),
        (500, up(pid=7, excused=6), []),
        (5000, up(pid=7, probe=A, excused=0), [READY]),
    ],
    "a new launch begins anew": [
        (0, up(probe=M), [EJECT]),
        (1, up(probe=M, ejected=True), []),
        (2, replace(up(pid=2), launch=2), []),
        (3, replace(up(pid=2, probe=M), launch=2), [EJECT]),
        (4, replace(up(pid=2, probe=M, ejected=True), launch=2), []),
        (5, replace(up(pid=2, probe=M, ejected=True), launch=2), [RESTART]),
    ],
    "starting is patience": [
        (0, gone("ABSENT"), []),
        (1, replace(up(), listening=False, uptime=1.0), []),
        (200, replace(up(), listening=False, uptime=200.0), []),
        (201, up(probe=A), [READY]),
    ],
}


@pytest.mark.parametrize("name", HISTORIES)
def test_history(name: str) -> None:
    record: Record | None = None
    for at, look, wanted in HISTORIES[name]:
        record, actions = health.decide(record, look, POLICY, at)
        assert [action.act for action in actions] == wanted, f"at {at} s"


def test_a_port_that_was_asked_for_is_not_left() -> None:
    look = replace(up(), listening=False, stranger="process 7 (x)")
    _, (action,) = health.decide(None, look, replace(POLICY, movable=False), 0)
    assert action == Action(QUARANTINE, "its port is in use by process 7 (x)")


def test_a_doubted_replica_is_asked_and_compared_at_once() -> None:
    record, _ = health.decide(None, up(probe=A), POLICY, 0)
    record = health.probed(record, A, True, POLICY, 0)
    assert not health.due(record, 1)
    assert health.due(health.doubted(record), 1)
    assert health.doubted(record).golden_at < 0


def test_zero_failures_never_restart() -> None:
    record, done = None, []
    for second in range(100):
        look = up(probe=M, ejected=second > 0)
        record, actions = health.decide(record, look, replace(POLICY, max_failures=0), second)
        done += [action.act for action in actions]
    assert done == [EJECT]


def test_backoff_doubles_to_a_minute_and_ten_good_minutes_forgive() -> None:
    record = Record(1)
    waits = []
    for _ in range(9):
        record = health.restarted(record, 0)
        waits.append(record.restart_after)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    for at in (1000, 1300, 1599):
        record, _ = health.decide(record, up(probe=A), POLICY, at)
    assert record.backoff == 60
    record, _ = health.decide(record, up(probe=A), POLICY, 1600)
    assert record.backoff == 1


def test_after_a_wrong_answer_the_next_probe_compares_again() -> None:
    """Else it would be taken for a good one, and readmit the replica."""
    record = Record(1, golden_at=0)
    assert health.probed(record, W, True, POLICY, 100).golden_at <= 100
    assert health.probed(record, A, True, POLICY, 100).golden_at == 160
    assert health.probed(record, A, False, POLICY, 100).golden_at == 0


@pytest.mark.parametrize("interval", [0.5, 10])
def test_a_busy_replica_is_asked_again_soon_and_a_silent_one_at_once(interval: float) -> None:
    """So that work which turns out to hang is found as soon as a hang."""
    policy = replace(POLICY, interval_secs=interval)
    due = {outcome: health.probed(Record(1), outcome, False, policy, 100).probe_at - 100 for outcome in (A, B, M, W)}
    assert due == {A: interval, B: min(1, interval), M: 0, W: interval}


def test_reasons_name_what_was_seen() -> None:
    _, (action,) = health.decide(None, up(probe=M, detail="no answer within 5 s"), POLICY, 0)
    assert action.reason == "no answer within 5 s"
    _, actions = health.decide(Record(1, pid=1), gone("FATAL", "ended with exit status 3"), POLICY, 0)
    assert [action.reason for action in actions] == [
        "ended with exit status 3",
        "as often as it was started, it ended with exit status 3",
    ]


LOOKS = st.builds(
    Look,
    launch=st.integers(1, 2),
    state=st.sampled_from(["RUNNING", "STARTING", "EXITED", "BACKOFF", "FATAL", "STOPPED", "ABSENT"]),
    pid=st.one_of(st.none(), st.integers(1, 3)),
    uptime=st.floats(0, 1000),
    listening=st.booleans(),
    ejected=st.booleans(),
    quarantined=st.booleans(),
    probe=st.one_of(st.none(), st.sampled_from(list(ProbeResult))),
)


@given(st.lists(st.tuples(st.floats(0.1, 100), LOOKS), max_size=60))
def test_whatever_is_seen(looks: list[tuple[float, Look]]) -> None:
    """Restarts keep their distance, nothing is done to what does not run, and records stay small."""
    record: Record | None = None
    now = 0.0
    restarts: list[float] = []
    for gap, look in looks:
        now += gap
        launch = record.launch if record else None
        record, actions = health.decide(record, look, POLICY, now)
        acts = [action.act for action in actions]
        if launch != look.launch:
            restarts = []
        if RESTART in acts and look.probe is M:
            restarts.append(now)
        assert all(later - earlier >= 1 for earlier, later in itertools.pairwise(restarts))
        assert not (set(acts) & {RESTART, READMIT, EJECT}) or look.state in ("RUNNING", "STARTING")
        assert not look.quarantined or set(acts) <= {STOP}
        assert len(record.deaths) <= 60
