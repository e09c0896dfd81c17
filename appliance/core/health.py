"""What the monitor does about a replica: observations in, actions out.

Theory of operation. Each look is a level: the process as supervisor shows it, whether its port listens, and the newest
finished probe (one real request with a deadline). What happened in between, and how often events came, does not
matter. A `Record` is what is remembered of one replica from look to look; a new launch forgets it.

    look                                                 done
    a probe is answered                                  misses = 0; ready (first time), readmitted if it was ejected
    a probe is missed                                    misses + 1; ejected from routing
    a probe is missed, misses >= max_failures > 0        restart, but not before the back-off since the last one is over
    a golden answer is wrong, the first time             ejected, restart
    a golden answer is wrong, once more                  quarantine
    another process than before, or none                 a death at that moment; not journalled where we restarted it
    stopped, and it was not we                           journalled: an operator did it
    another program listens on its port                  another port, or, where the port was asked for, quarantine
    five deaths within ten minutes                       quarantine
    FATAL                                                quarantine: supervisor gave up on it
    FATAL by deaths that were caused by a call           start
    no port within the start-up timeout                  quarantine
    quarantined, and a process runs                      stop it

The back-off is 1, 2, 4 ... 60 s and begins anew after ten good minutes, which also forgive a wrong answer. A probe
that was not answered in time while the replica was busy (`core.busy`) counts as nothing; the next comes after a second,
so that a hang after some work is noticed as soon as a hang at once. Deaths for which a call was convicted
(`core.suspects`) do not count. A replica that is not wanted, or stopped by an operator, is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from appliance.core.status import ALIVE

FIRST_BACKOFF_SECS, LONGEST_BACKOFF_SECS = 1.0, 60.0
GOOD_SECS = DEATHS_SECS = 600.0
MOST_DEATHS = 5
DEADLINE_SECS, NEXT_DEADLINE_SECS = 5.0, 3.0  # of a probe, and of those right after a missed one
BUSY_SECS = 1.0
GOLDEN_SECS = 60.0
DOUBT_EVENT = "doubt"  # of supervisor's remote communication: "NAME:REPLICA:LAUNCH" shall be compared at once


class ProbeResult(StrEnum):
    ANSWERED = "answered"
    BUSY = "busy"  # not in time, but it has work that may take as long
    MISSED = "missed"
    WRONG = "wrong"  # answered, and not what it answered when it was new


class Act(StrEnum):
    """What is done; the values are the words of monitor.log."""

    READY = "ready"
    EJECT = "withhold"
    READMIT = "release"
    RESTART = "restart"
    QUARANTINE = "quarantine"
    STOP = "stop"
    STOPPED = "stopped"
    START = "start"
    MOVE = "move"
    DIED = "died"


@dataclass(frozen=True)
class Action:
    act: Act
    reason: str = ""


@dataclass(frozen=True)
class Policy:
    """Of one instance. max_failures 0: never restarted for missed probes. movable: its port was not asked for."""

    interval_secs: float
    max_failures: int
    startup_secs: float
    movable: bool = True


@dataclass(frozen=True)
class Look:
    """One look at one replica. ``probe`` and its ``detail``: the newest finished since the look before, or None.

    stranger: who else listens on its port. excused: recent deaths for which a call was convicted.
    """

    launch: int
    state: str  # supervisor's, or ABSENT
    pid: int | None = None
    uptime: float | None = None
    ending: str = ""  # of one that does not live, as `Process.ending`
    listening: bool = False
    ejected: bool = False
    quarantined: bool = False
    probe: ProbeResult | None = None
    detail: str = ""
    stranger: str = ""
    excused: int = 0


@dataclass(frozen=True)
class Record:
    """What is remembered of one replica of one launch. Times are seconds of any steady clock."""

    launch: int
    pid: int | None = None
    ready: bool = False  # this process has answered
    ended: int | None = None  # the process that we ended last
    misses: int = 0
    deaths: tuple[float, ...] = ()
    drifts: int = 0
    backoff: float = FIRST_BACKOFF_SECS
    restart_after: float = float("-inf")
    good_since: float | None = None
    probe_at: float = float("-inf")  # when the next probe is due
    golden_at: float = float("-inf")


def decide(record: Record | None, look: Look, policy: Policy, now: float) -> tuple[Record, tuple[Action, ...]]:
    """The table above. Returns what to remember and what to do, in that order of time."""
    if record is None or record.launch != look.launch:
        record = Record(look.launch)
    if look.quarantined:
        stop = (Action(Act.STOP),) if look.state in ALIVE else ()
        return Record(look.launch), stop
    if look.state in ("STOPPED", "STOPPING"):  # as a person wished, not a death
        stopped = (Action(Act.STOPPED),) if look.state == "STOPPED" and record.pid else ()
        pid = record.pid if look.state == "STOPPING" else None
        return replace(doubted(record), pid=pid, ready=False, misses=0, good_since=None), stopped
    record, died = count_death(record, look, now)
    if look.stranger:
        return record, (*died, leave(look, policy))
    if look.state == "FATAL" and look.excused:
        return record, (*died, Action(Act.START))
    if look.state == "FATAL":
        why = f"as often as it was started, it {look.ending}"
        return record, (*died, Action(Act.QUARANTINE, why))
    recent = sum(now - death < DEATHS_SECS for death in record.deaths)
    if (deaths := recent - look.excused) >= MOST_DEATHS:
        minutes = int(DEATHS_SECS / 60)
        return record, (*died, Action(Act.QUARANTINE, f"it died {deaths} times within {minutes} minutes"))
    if look.state not in ALIVE:
        return record, died
    if not look.listening and not record.ready and (look.uptime or 0) > policy.startup_secs:
        why = f"it did not open its port within {policy.startup_secs:g} s (startup_timeout_secs)"
        return record, (*died, Action(Act.QUARANTINE, why))
    record, judged = judge(record, look, policy, now)
    return record, (*died, *judged)


def count_death(record: Record, look: Look, now: float) -> tuple[Record, tuple[Action, ...]]:
    """A death is another process than at the last look, or none."""
    pid = look.pid if look.state in ALIVE else None
    if record.pid is None or pid == record.pid:
        return replace(record, pid=pid or record.pid), ()
    recent = tuple(death for death in record.deaths if now - death < DEATHS_SECS)
    fresh = replace(
        record, pid=pid, deaths=(*recent, now), ready=False, misses=0, good_since=None, probe_at=now, golden_at=now
    )
    if record.pid == record.ended:  # that was a restart of ours, and is journalled as one
        return fresh, ()
    # Supervisor forgets how a process ended when it starts the next.
    how = "ended and was started again" if look.state in ALIVE else look.ending
    return fresh, (Action(Act.DIED, how),)


def judge(record: Record, look: Look, policy: Policy, now: float) -> tuple[Record, tuple[Action, ...]]:
    """What a living process has answered."""
    if look.probe is ProbeResult.ANSWERED:
        return answered(record, look, now)
    if look.probe is ProbeResult.WRONG:
        drifted = replace(record, drifts=record.drifts + 1, good_since=None)
        if record.drifts:
            return drifted, (Action(Act.QUARANTINE, f"its answers are wrong after a restart, too: {look.detail}"),)
        return restarted(drifted, now), (eject(look), Action(Act.RESTART, f"its answers are wrong: {look.detail}"))
    if look.probe is ProbeResult.MISSED:
        missed = replace(record, misses=record.misses + 1, good_since=None)
        first = (eject(look),) if not look.ejected else ()
        if policy.max_failures and missed.misses >= policy.max_failures and now >= record.restart_after:
            why = f"it missed {missed.misses} probes: {look.detail}"
            return restarted(missed, now), (*first, Action(Act.RESTART, why))
        return missed, first
    return record, ()


def leave(look: Look, policy: Policy) -> Action:
    why = f"its port is in use by {look.stranger}"
    return Action(Act.MOVE if policy.movable else Act.QUARANTINE, why)


def eject(look: Look) -> Action:
    return Action(Act.EJECT, look.detail)


def answered(record: Record, look: Look, now: float) -> tuple[Record, tuple[Action, ...]]:
    good_since = now if record.good_since is None else record.good_since
    forgiven = now - good_since >= GOOD_SECS
    calm = replace(
        record,
        ready=True,
        misses=0,
        good_since=good_since,
        backoff=FIRST_BACKOFF_SECS if forgiven else record.backoff,
        drifts=0 if forgiven else record.drifts,
    )
    done = () if record.ready else (Action(Act.READY),)
    return calm, (*done, *((Action(Act.READMIT),) if look.ejected else ()))


def restarted(record: Record, now: float) -> Record:
    return replace(
        record,
        ended=record.pid,
        misses=0,
        restart_after=now + record.backoff,
        backoff=min(2 * record.backoff, LONGEST_BACKOFF_SECS),
    )


def doubted(record: Record) -> Record:
    """A caller got an answer of it that cannot be right, or its next process is another one: its answers are compared
    with the golden ones at once."""
    return replace(record, probe_at=float("-inf"), golden_at=float("-inf"))


def due(record: Record, now: float) -> bool:
    """Whether it is time for the next probe."""
    return now >= record.probe_at


def calm(record: Record, look: Look) -> bool:
    """Whether an answer to the next probe would change nothing: the replica is ready, and misses none."""
    return record.ready and not record.misses and not look.ejected


def settled(record: Record, look: Look) -> bool:
    """Whether nothing happens to it by itself: it is well, or at rest for good."""
    at_rest = look.state not in ALIVE and (look.quarantined or (look.state == "STOPPED" and record.pid is None))
    return at_rest or calm(record, look)


def deadline(record: Record) -> float:
    """Seconds that the next probe may take. After a miss less, so that what hangs is replaced within 30 s."""
    return NEXT_DEADLINE_SECS if record.misses else DEADLINE_SECS


def probed(record: Record, outcome: ProbeResult, golden: bool, policy: Policy, now: float) -> Record:
    """After a probe has ended: when the next ones are due."""
    waits = {ProbeResult.MISSED: 0.0, ProbeResult.BUSY: min(BUSY_SECS, policy.interval_secs)}
    wait = waits.get(outcome, policy.interval_secs)
    # A wrong one is compared again, or the next answer would readmit it.
    right = golden and outcome is ProbeResult.ANSWERED
    return replace(record, probe_at=now + wait, golden_at=now + GOLDEN_SECS if right else record.golden_at)
