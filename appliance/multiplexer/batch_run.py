"""One batch in progress: which slice goes to which replica, what follows when a slice fails, and when the batch ends.

`core.batching` cuts slices and mends them. A run decides; what it learns of the world and does to it goes through its
`Effects`, so that no clock, thread or connection is here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import grpc

from appliance.core import batching, routing
from appliance.core.batching import Mended, Slice, WaitingSlices
from appliance.core.problems import Kind, Problem
from appliance.core.routing import Replica, Target
from appliance.drivers.tei import Backend
from appliance.multiplexer.cooperation import ReplyScheduler, WouldBlock
from appliance.multiplexer.suspicion import Suspicion
from appliance.wire.calls import Metadata

log = logging.getLogger(__name__)
SLICES_IN_FLIGHT = 2  # per replica and job: one computes, one is on its way
POLL_SECS = 0.05  # how often a run without news looks for permits, new replicas and its own end


@dataclass(frozen=True)
class TextFailure:
    """Why a text, and with it each of its rows, has no answer: in the words of the replica that refused it."""

    code: grpc.StatusCode
    details: str


Generations = tuple[tuple[str, int], ...]  # instances, each with the number of its spec


class Replaced(Problem):
    """An instance got another spec in the middle of a batch: all of it has to be computed anew."""

    def __init__(self, target: Target) -> None:
        super().__init__(Kind.CONFLICT, "REPLACED", f"{target} was replaced meanwhile: send it again as a whole")


@dataclass(frozen=True)
class BatchJob:
    """What one batch call asks for. Its texts are distinct, and each is known by its number.

    method: the unary name of what is asked; requests: the serialized TEI request of each text; lengths: a measure of
    the cost of each; on_answer(text, reply bytes) is called once for each answered text, from one thread at a time for
    each slice; caller_left() tells whether the caller has left. keep_failures: the job goes on when a text has failed.
    generations: of the instances that it may be answered by, none where they do not matter.
    """

    target: Target
    method: str
    path: str
    requests: Sequence[bytes]
    lengths: Sequence[int]
    on_answer: Callable[[int, bytes], None]
    deadline: float | None
    caller_left: Callable[[], bool]
    keep_failures: bool
    generations: Generations = ()
    waits: bool = True  # for a replica that is on its way
    is_combined: bool = False  # single texts of several callers
    scheduler: ReplyScheduler | None = None  # of the thread, where other calls run in it, too
    metadata_for_peer: Metadata = field(default_factory=list)

    def refuse_replaced(self, present: Generations) -> None:
        """Raises: Replaced when an instance has another spec than at the beginning, or the target names another one."""
        known = dict(self.generations)
        if known and any(known.get(name) != number for name, number in present):
            raise Replaced(self.target)


@dataclass
class SliceOutcome:
    """How one slice ended: texts answered in order, and the failure that ended the rest, if any."""

    slice: Slice
    backend: Backend
    answered: int = 0
    failure: TextFailure | None = None
    died: bool = False  # the replica ended the stream, not the text
    lost: bool = False  # its connection broke, as it does when the process ends
    wrong: bool = False  # it answered what cannot be right
    reached: bool = True  # the replica may have worked on it
    would_block: bool = False  # it has to wait for more than replies, where it must not
    problem: Problem | None = None  # the whole job cannot go on


class Start(StrEnum):
    """What became of a slice that was to start at a replica."""

    STARTED = "started"
    NO_LEASE = "no lease"  # the replica is shared or exclusive just now
    NO_PERMITS = "no permits"  # the run waits for them


class Effects(Protocol):
    """The world of a run."""

    def now(self) -> float:
        """Seconds of a steady clock."""

    def ready(self) -> Sequence[Backend]:
        """The replicas of the job's target that are ready. Raises: Problem, unavailable where there are none."""

    def is_expected(self) -> bool:
        """Whether a replica starts, or wakes up. Raises: Problem where it cannot."""

    def start(self, slice_: Slice, backend: Backend) -> Start:
        """Send a slice to a replica, if it may be leased and there are permits. Its outcome comes later."""

    def keep_waiting(self, wanted: bool) -> None:
        """Whether the permits are still waited for that a slice did not get."""

    def next_outcome(self, within_secs: float) -> SliceOutcome | None:
        """The outcome of a slice; None when time has passed, or permits may be there."""

    def suspicion(self, replica: Replica) -> Suspicion: ...

    def ended_by_itself(self, replica: Replica) -> bool:
        """Whether a replica that went away should still run."""

    def report_doubt(self, backend: Backend) -> None:
        """What the replica answered cannot be right."""

    def end(self) -> None:
        """The run is over: slices in flight are cancelled, nothing is waited for."""


class BatchRun:
    """replicas: those that were ready at the beginning, for the message that none is any more.

    failures: texts that failed beforehand. max_wait_secs: how long none may be ready.
    """

    def __init__(
        self,
        job: BatchJob,
        effects: Effects,
        waiting: WaitingSlices,
        replicas: Sequence[Replica],
        failures: dict[int, TextFailure],
        max_wait_secs: float,
    ) -> None:
        self.job = job
        self.effects = effects
        self.waiting = waiting
        self.replicas = replicas
        self.failures = failures
        self.max_wait_secs = max_wait_secs
        self.in_flight: Counter[Backend] = Counter()
        self.unreachable_since: float | None = None  # no replica is ready, or none could be reached
        self.rest_until = 0.0

    def run(self) -> dict[int, TextFailure]:
        """Until every text is answered or has failed; returns those that failed.

        The first one ends the run, unless the job keeps failures. Raises: Problem when no replica is ready for too
        long, the deadline passes, or the caller has left.
        """
        try:
            while self.goes_on():
                self.start_slices()
                self.refuse_ended()
                if outcome := self.effects.next_outcome(POLL_SECS):
                    self.settle(outcome)
        finally:
            self.effects.end()
        return self.failures

    def goes_on(self) -> bool:
        if self.failures and not self.job.keep_failures:
            return False
        return bool(self.waiting or self.in_flight.total())

    # -- sending ------------------------------------------------------------------------------------------------------

    def start_slices(self) -> None:
        """Start what can be started now."""
        ready = self.ready()
        self.refuse_unreachable(ready)
        lacks_permits = self.effects.now() >= self.rest_until and self.start_while_permitted(ready)
        self.effects.keep_waiting(lacks_permits)

    def start_while_permitted(self, ready: Sequence[Backend]) -> bool:
        """Start slices as long as one can start. Returns whether it ended because there were no permits.

        A slice that has to wait for a lease holds up no other; one that has to wait for permits does.
        """
        while True:
            for slice_ in self.waiting.candidates():
                start = self.start(ready, slice_)
                if start is Start.NO_PERMITS:
                    return True
                if start is Start.STARTED:
                    self.waiting.remove(slice_)
                    break
            else:
                return False

    def start(self, ready: Sequence[Backend], slice_: Slice) -> Start:
        """At the least busy replica that may be leased: on another one a suspect may be alone, which is little work."""
        leased = set[Backend]()
        while backend := self.choose(ready, slice_, leased):
            start = self.effects.start(slice_, backend)
            if start is Start.STARTED:
                self.in_flight[backend] += 1
            if start is not Start.NO_LEASE:
                return start
            leased.add(backend)
        return Start.NO_LEASE

    def ready(self) -> Sequence[Backend]:
        """Empty while all are away for the moment. Raises: Problem when the instance is stopped or deleted."""
        try:
            return self.effects.ready()
        except Problem as problem:
            if problem.kind is not Kind.UNAVAILABLE:
                raise
            return ()

    def choose(self, ready: Sequence[Backend], slice_: Slice, leased: Container[Backend]) -> Backend | None:
        """The least busy replica; not the one that died with the slice, while there is another one. leased: those that
        it cannot have just now."""
        return routing.pick(
            ready,
            load=lambda each: each.outstanding,
            avoids=(lambda each: each.replica.address == slice_.avoid) if slice_.avoid else None,
            admits=lambda each: each not in leased and self.in_flight[each] < SLICES_IN_FLIGHT,
        )

    # -- ending early -------------------------------------------------------------------------------------------------

    def refuse_unreachable(self, ready: Sequence[Backend]) -> None:
        """Raises: Problem unavailable when no replica was ready, or could be reached, for too long, and none starts."""
        if self.in_flight.total() or (ready and self.unreachable_since is None):
            return
        now = self.effects.now()
        if self.unreachable_since is None or (not ready and self.effects.is_expected()):
            self.unreachable_since = now
        if now - self.unreachable_since > self.max_wait_secs:
            raise routing.none_ready(self.replicas)

    def refuse_ended(self) -> None:
        """Raises: Problem when the deadline passed or the caller has left."""
        if self.job.caller_left():
            raise Problem(Kind.UNAVAILABLE, "CANCELLED", "The caller is gone")
        if self.job.deadline is not None and self.effects.now() > self.job.deadline:
            words = f"The deadline passed; {self.waiting.text_count} rows had not been sent yet"
            raise Problem(Kind.TIMEOUT, "TIMEOUT", words)

    # -- outcomes -----------------------------------------------------------------------------------------------------

    def settle(self, outcome: SliceOutcome) -> None:
        """Count what a slice has done, and put what is left of it in front of the waiting ones.

        Raises: Problem that ends the job; WouldBlock.
        """
        self.in_flight[outcome.backend] -= 1
        if outcome.would_block:
            raise WouldBlock
        if outcome.answered:
            self.acquit_answered(outcome)
        if problem := outcome.problem:  # a copy: an exception that its own frames know keeps all texts in memory
            raise Problem(problem.kind, problem.code, problem.message, problem.retry_after_ms)
        if outcome.failure is None:
            return
        self.refuse_ended()  # then it ended with its call, and no replica is to blame
        mended = self.mend(outcome, outcome.failure)
        if mended.left:
            self.waiting.put_back(mended.left)
        if mended.failed is not None:
            self.failures[mended.failed] = outcome.failure

    def acquit_answered(self, outcome: SliceOutcome) -> None:
        """The method has answered, and so have the texts of a careful slice: they do not end replicas."""
        self.unreachable_since = None
        suspicion = self.effects.suspicion(outcome.backend.replica)
        suspicion.answered(self.job.method)
        for text in outcome.slice.texts[: outcome.answered] if outcome.slice.careful else ():
            suspicion.answered(self.job.method, self.job.requests[text])

    def mend(self, outcome: SliceOutcome, failure: TextFailure) -> Mended:
        """What becomes of the rest of a slice, by what ended it; replicas and texts that deserve it are reported."""
        address = outcome.backend.replica.address
        if not outcome.reached and not outcome.answered:
            now = self.effects.now()
            self.rest_until = now + POLL_SECS
            if self.unreachable_since is None:
                self.unreachable_since = now
            return Mended(None, batching.after_no_connection(outcome.slice, address))
        if not outcome.died:
            return batching.after_bad_text(outcome.slice, outcome.answered)
        hung = failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
        mended = batching.after_death(outcome.slice, outcome.answered, address, hung)
        log_loss(outcome, failure)
        if outcome.wrong:
            self.effects.report_doubt(outcome.backend)
        if outcome.lost and not outcome.backend.is_cut:
            self.suspect(outcome, mended.failed)
        return mended

    def suspect(self, outcome: SliceOutcome, blamed: int | None) -> None:
        """Remember the texts that were in work at a death, so that their like is tried alone, and no replica is given
        up for them; a text that is blamed is convicted, which is then its failure."""
        replica, texts = outcome.backend.replica, outcome.slice.texts[outcome.answered :]
        if not self.effects.ended_by_itself(replica):
            return
        suspicion = self.effects.suspicion(replica)
        if blamed is not None:
            convicted = suspicion.convict(self.job.method, self.job.requests[blamed], replica)
            outcome.failure = TextFailure(grpc.StatusCode.INTERNAL, convicted.message)
            return
        in_work = texts[:1] if outcome.slice.careful else texts
        suspicion.suspect(self.job.method, [self.job.requests[text] for text in in_work], replica)


def log_loss(outcome: SliceOutcome, failure: TextFailure) -> None:
    """For the log: operators see here which replica a batch has lost."""
    replica, owed = outcome.backend.replica, len(outcome.slice.texts) - outcome.answered
    words = 'Replica %s of "%s" went away and owes %s rows of a batch: %s'
    log.warning(words, replica.index, replica.instance, owed, failure.details)
