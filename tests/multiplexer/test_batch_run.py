"""A batch run by itself: a world of values answers it, so that there are no threads, sockets or seconds here."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.core import routing
from appliance.core.batching import Slice, WaitingSlices
from appliance.core.problems import Kind, Problem
from appliance.core.routing import Replica, Route, Table, Target, generations_of
from appliance.core.suspects import Standing
from appliance.multiplexer.batch_run import (
    POLL_SECS,
    SLICES_IN_FLIGHT,
    BatchJob,
    BatchRun,
    Replaced,
    SliceOutcome,
    Start,
    TextFailure,
)
from appliance.multiplexer.suspicion import Convicted, Launch, Suspicion

CODES = grpc.StatusCode
MAX_WAIT_SECS = 3.0
BAD = TextFailure(CODES.INVALID_ARGUMENT, "bad text")


@dataclass(eq=False)
class StandIn:
    """As `Backend`."""

    index: int
    outstanding: int = 0
    is_cut: bool = False
    is_ready: bool = True

    @property
    def replica(self) -> Replica:
        return Replica("one", self.index, f"r:{self.index}", "org/one", 1, 64)


Answer = Callable[[SliceOutcome, StandIn], SliceOutcome | None]  # None: it never comes


def all_answered(outcome: SliceOutcome, backend: StandIn) -> SliceOutcome:
    outcome.answered = len(outcome.slice.texts)
    return outcome


def bad_text(outcome: SliceOutcome, answered: int) -> SliceOutcome:
    outcome.answered, outcome.failure = answered, BAD
    return outcome


def death(outcome: SliceOutcome, answered: int = 0) -> SliceOutcome:
    outcome.answered, outcome.died, outcome.lost = answered, True, True
    outcome.failure = TextFailure(CODES.UNAVAILABLE, "Socket closed")
    return outcome


def hang(outcome: SliceOutcome) -> SliceOutcome:
    outcome.died, outcome.failure = True, TextFailure(CODES.DEADLINE_EXCEEDED, "no answer for 1 s")
    return outcome


def no_connection(outcome: SliceOutcome) -> SliceOutcome:
    outcome.died, outcome.reached = True, False
    outcome.failure = TextFailure(CODES.UNAVAILABLE, "Connection refused")
    return outcome


@dataclass
class World:
    """The effects of a run, whose replicas answer as ``answer`` says; without an outcome a wait takes all its time."""

    replicas: list[StandIn] = field(default_factory=lambda: [StandIn(0), StandIn(1)])
    answer: Answer = all_answered
    clock: float = 1000.0
    starts: list[tuple[Slice, int]] = field(default_factory=list)
    refuses: Callable[[Slice, StandIn], Start | None] = lambda slice_, backend: None
    news: list[SliceOutcome] = field(default_factory=list)
    waits: bool = False
    doubted: list[int] = field(default_factory=list)
    convictions: list[str] = field(default_factory=list)
    most_in_flight: Counter[int] = field(default_factory=Counter)
    at: dict[float, Callable[[], object]] = field(default_factory=dict)  # what happens when the clock shows so much
    ended: bool = False
    expects: bool = False  # a replica that starts

    def __post_init__(self) -> None:
        self.suspicions = Suspicion(Launch("one", 1), lambda conviction: self.convictions.append(conviction.message))
        self.flying: Counter[int] = Counter()

    def now(self) -> float:
        return self.clock

    def ready(self) -> list[StandIn]:
        ready = [each for each in self.replicas if each.is_ready]
        if not ready:
            raise routing.none_ready([each.replica for each in self.replicas])
        return ready

    def is_expected(self) -> bool:
        return self.expects

    def start(self, slice_: Slice, backend: Any) -> Start:
        if refusal := self.refuses(slice_, backend):
            return refusal
        self.starts.append((slice_, backend.index))
        self.flying[backend.index] += 1
        self.most_in_flight |= self.flying
        if outcome := self.answer(SliceOutcome(slice_, backend), backend):
            self.news.append(outcome)
        return Start.STARTED

    def keep_waiting(self, wanted: bool) -> None:
        self.waits = wanted

    def next_outcome(self, within_secs: float) -> SliceOutcome | None:
        if self.news:
            outcome = self.news.pop(0)
            self.flying[outcome.backend.replica.index] -= 1
            return outcome
        self.clock += within_secs
        for at in sorted(self.at):
            if at <= self.clock:
                self.at.pop(at)()
        return None

    def suspicion(self, replica: Replica) -> Suspicion:
        return self.suspicions

    def ended_by_itself(self, replica: Replica) -> bool:
        return True

    def report_doubt(self, backend: Any) -> None:
        self.doubted.append(backend.index)

    def end(self) -> None:
        self.waits = False
        self.ended = True


def job(
    texts: int, keep: bool = False, secs: float | None = None, left: Callable[[], bool] = lambda: False
) -> BatchJob:
    return BatchJob(
        target=Target("one"),
        method="Embed",
        path="/",
        requests=[b"%d" % text for text in range(texts)],
        lengths=[1] * texts,
        on_answer=lambda text, reply: None,
        deadline=None if secs is None else 1000.0 + secs,
        caller_left=left,
        keep_failures=keep,
    )


def run_of(world: World, asked: BatchJob, size: int = 4) -> BatchRun:
    texts = range(len(asked.requests))
    slices = [Slice(tuple(texts[begin : begin + size])) for begin in range(0, len(texts), size)]
    replicas = [each.replica for each in world.replicas]
    return BatchRun(asked, world, WaitingSlices(slices), replicas, {}, MAX_WAIT_SECS)  # type: ignore[arg-type]


def refusal(world: World, asked: BatchJob) -> Problem:
    with pytest.raises(Problem) as caught:
        run_of(world, asked).run()
    assert world.ended
    return caught.value


def test_slices_go_to_the_least_busy_replicas_and_two_of_them_at_once_to_each() -> None:
    world = World([StandIn(0, outstanding=9), StandIn(1), StandIn(2, is_ready=False)])
    assert run_of(world, job(40)).run() == {}
    assert [at for _, at in world.starts[:4]] == [1, 1, 0, 0]
    assert world.most_in_flight == {0: SLICES_IN_FLIGHT, 1: SLICES_IN_FLIGHT}
    assert sorted(text for slice_, _ in world.starts for text in slice_.texts) == list(range(40))
    assert world.ended


def test_what_a_dying_replica_did_not_answer_is_computed_by_another_one_text_at_a_time() -> None:
    world = World(
        answer=lambda outcome, backend: death(outcome, 1) if backend.index == 0 else all_answered(outcome, backend)
    )
    assert run_of(world, job(4)).run() == {}
    assert world.starts == [(Slice((0, 1, 2, 3)), 0), (Slice((1, 2, 3), careful=True, avoid="r:0"), 1)]
    suspicion = world.suspicions
    assert [suspicion.standing("Embed", b"%d" % text) for text in range(4)] == [Standing.FREE] * 4  # acquitted again


def test_what_was_in_work_at_a_death_is_suspect_until_it_is_answered() -> None:
    world = World(answer=lambda outcome, backend: None if outcome.slice.careful else death(outcome, 1))
    refusal(world, job(4, secs=1))
    standings = [world.suspicions.standing("Embed", b"%d" % text) for text in range(4)]
    assert standings == [Standing.FREE, *[Standing.SUSPECT] * 3]


@pytest.mark.parametrize("keep", [False, True])
def test_a_text_that_ends_replicas_is_blamed_at_the_third_death_and_convicted(keep: bool) -> None:
    def answer(outcome: SliceOutcome, backend: StandIn) -> SliceOutcome:
        texts = outcome.slice.texts
        return death(outcome, texts.index(5)) if 5 in texts else all_answered(outcome, backend)

    world = World(answer=answer)
    failures = run_of(world, job(12, keep)).run()
    assert list(failures) == [5]
    assert failures[5].code is CODES.INTERNAL
    assert failures[5].details == world.convictions[0]
    deaths = [at for slice_, at in world.starts if 5 in slice_.texts]
    assert len(deaths) == 3
    assert len(set(deaths[:2])) == len(set(deaths[1:])) == 2  # never where it has just died, while there is another one
    with pytest.raises(Convicted):
        world.suspicions.standing("Embed", b"5")


def test_a_text_that_hangs_replicas_has_failed_at_the_second_one_and_is_not_convicted() -> None:
    world = World(
        answer=lambda outcome, backend: hang(outcome) if 0 in outcome.slice.texts else all_answered(outcome, backend)
    )
    failures = run_of(world, job(3, keep=True)).run()
    assert failures == {0: TextFailure(CODES.DEADLINE_EXCEEDED, "no answer for 1 s")}
    assert not world.convictions


def test_a_bad_text_ends_the_run_at_once_unless_failures_are_kept() -> None:
    def answer(outcome: SliceOutcome, backend: StandIn) -> SliceOutcome:
        texts = outcome.slice.texts
        return bad_text(outcome, texts.index(1)) if 1 in texts else all_answered(outcome, backend)

    world = World(answer=answer)
    assert run_of(world, job(40)).run() == {1: BAD}
    assert len(world.starts) == 2 * SLICES_IN_FLIGHT  # what was in flight already, and not one more
    assert world.ended
    world = World(answer=answer)
    assert run_of(world, job(40, keep=True)).run() == {1: BAD}
    assert len(world.starts) == 11
    assert Slice((2, 3)) in [slice_ for slice_, _ in world.starts]
    assert not world.doubted


def test_an_answer_that_cannot_be_right_is_asked_of_another_replica_and_reported() -> None:
    def answer(outcome: SliceOutcome, backend: StandIn) -> SliceOutcome:
        if backend.index == 1:
            return all_answered(outcome, backend)
        outcome.died = outcome.wrong = True
        outcome.failure = TextFailure(CODES.INTERNAL, "The replica's answer cannot be right: not finite")
        return outcome

    world = World(answer=answer)
    assert run_of(world, job(4)).run() == {}
    assert [at for _, at in world.starts] == [0, 1]
    assert world.doubted == [0]
    assert world.suspicions.suspects.clean  # the replica is doubted, not the texts


def test_what_was_never_sent_goes_elsewhere_after_a_pause_and_blames_no_text() -> None:
    world = World(
        answer=lambda outcome, backend: no_connection(outcome) if backend.index == 0 else all_answered(outcome, backend)
    )
    assert run_of(world, job(4)).run() == {}
    assert world.starts == [(Slice((0, 1, 2, 3)), 0), (Slice((0, 1, 2, 3), avoid="r:0"), 1)]
    assert world.clock == pytest.approx(1000 + POLL_SECS)
    assert world.suspicions.suspects.clean


def test_where_no_replica_can_be_reached_for_too_long_the_run_ends() -> None:
    world = World(answer=lambda outcome, backend: no_connection(outcome))
    problem = refusal(world, job(4))
    assert (problem.kind, problem.code) == (Kind.UNAVAILABLE, "BACKEND_UNAVAILABLE")
    assert MAX_WAIT_SECS < world.clock - 1000 < MAX_WAIT_SECS + 3 * POLL_SECS


def test_a_run_waits_for_a_replica_that_comes_back_in_time_and_no_longer() -> None:
    world = World()
    for each in world.replicas:
        each.is_ready = False
    problem = refusal(world, job(4))
    assert problem.kind is Kind.UNAVAILABLE
    assert '"one"' in problem.message
    assert MAX_WAIT_SECS < world.clock - 1000 < MAX_WAIT_SECS + 3 * POLL_SECS
    assert not world.starts
    world = World([StandIn(0, is_ready=False)])
    world.at[1000 + MAX_WAIT_SECS - 1] = lambda: setattr(world.replicas[0], "is_ready", True)
    assert run_of(world, job(4)).run() == {}
    world = World([StandIn(0, is_ready=False)], expects=True)
    world.at[1000 + 10 * MAX_WAIT_SECS] = lambda: setattr(world.replicas[0], "is_ready", True)
    assert run_of(world, job(4)).run() == {}


def test_an_answer_ends_the_time_for_which_no_replica_could_be_reached() -> None:
    """Three spells of two seconds, each ended by an answer, are not one of six."""
    world = World([StandIn(0)])

    def answer(outcome: SliceOutcome, backend: StandIn) -> SliceOutcome:
        since = world.clock - 1000
        text = outcome.slice.texts[0]
        return all_answered(outcome, backend) if since >= 2 * (text + 1) else no_connection(outcome)

    world.answer = answer
    assert run_of(world, job(3), size=1).run() == {}
    assert world.clock >= 1006


def test_a_replica_that_was_cut_off_makes_no_text_suspect() -> None:
    def answer(outcome: SliceOutcome, backend: StandIn) -> SliceOutcome | None:
        backend.is_cut = backend.index == 0
        return death(outcome, 1) if backend.is_cut else None

    world = World(answer=answer)
    refusal(world, job(4, secs=1))
    assert [at for _, at in world.starts] == [0, 1]
    assert world.suspicions.suspects.clean


def test_a_run_ends_at_once_when_its_instance_is_stopped() -> None:
    class Stopped(World):
        def ready(self) -> list[StandIn]:
            if self.starts:
                raise routing.stopped("one")
            return super().ready()

    world = Stopped(answer=lambda outcome, backend: None)
    assert refusal(world, job(4)).code == "NOT_RUNNING"


def test_a_caller_that_leaves_ends_the_run() -> None:
    gone: list[bool] = []
    world = World(answer=lambda outcome, backend: None)
    world.at[1001.0] = lambda: gone.append(True)
    problem = refusal(world, job(40, left=lambda: bool(gone)))
    assert problem.code == "CANCELLED"
    assert world.clock < 1001 + 2 * POLL_SECS


def test_a_slice_that_ended_with_its_call_blames_no_replica(caplog: pytest.LogCaptureFixture) -> None:
    """It looks as one whose replica went away, and its texts would be tried alone, with the replica for themselves."""
    gone: list[bool] = []

    class Leaving(World):
        def next_outcome(self, within_secs: float) -> SliceOutcome | None:
            gone.append(True)
            return super().next_outcome(within_secs)

    def answer(outcome: SliceOutcome, backend: StandIn) -> SliceOutcome:
        outcome.failure, outcome.died = TextFailure(CODES.CANCELLED, "the batch has ended"), True
        return outcome

    world = Leaving(answer=answer)
    assert refusal(world, job(4, left=lambda: bool(gone))).code == "CANCELLED"
    assert (len(world.starts), caplog.messages) == (1, [])


def test_a_deadline_ends_the_run_and_says_how_much_was_not_sent() -> None:
    world = World(answer=lambda outcome, backend: None)
    problem = refusal(world, job(40, secs=2))
    assert problem.kind is Kind.TIMEOUT
    assert "24 rows had not been sent yet" in problem.message  # two slices of four at each of two replicas were
    assert world.clock < 1002 + 2 * POLL_SECS


def test_a_problem_of_a_slice_ends_the_run_as_a_copy() -> None:
    too_large = Problem(Kind.EXHAUSTED, "TOO_LARGE", "The reply would be too large", 7)

    def answer(outcome: SliceOutcome, backend: StandIn) -> SliceOutcome:
        outcome.problem = too_large
        return outcome

    problem = refusal(World(answer=answer), job(4))
    assert problem is not too_large
    assert vars(problem) == vars(too_large)


def test_a_run_waits_for_permits_no_longer_than_it_needs_them() -> None:
    world = World()
    world.refuses = lambda slice_, backend: Start.NO_PERMITS if world.clock < 1001 else None
    waits: list[bool] = []
    world.at = {1000 + secs: lambda: waits.append(world.waits) for secs in (0.3, 0.6)}
    assert run_of(world, job(8)).run() == {}
    assert waits == [True, True]
    assert not world.waits
    assert world.clock < 1001 + 2 * POLL_SECS


def test_a_slice_that_waits_for_a_lease_holds_up_no_other() -> None:
    def answer(outcome: SliceOutcome, backend: StandIn) -> SliceOutcome:
        return death(outcome) if outcome.slice == Slice((0, 1, 2, 3)) else all_answered(outcome, backend)

    world = World(answer=answer)
    world.refuses = lambda slice_, backend: Start.NO_LEASE if slice_.careful and len(world.starts) < 10 else None
    assert run_of(world, job(40)).run() == {}
    assert [slice_.careful for slice_, _ in world.starts] == [False] * 10 + [True]


def test_a_replica_that_cannot_be_leased_holds_up_no_batch() -> None:
    """A suspect is alone on the first, which counts as one text: every look chose that one, and nothing began."""
    world = World()
    busy, other = world.replicas
    other.outstanding = 2
    world.refuses = lambda slice_, backend: Start.NO_LEASE if backend is busy else None
    assert run_of(world, job(40)).run() == {}
    assert {index for _, index in world.starts} == {1}
    assert world.most_in_flight[1] == 2


def test_what_died_with_a_slice_does_not_get_it_while_another_one_is_merely_leased() -> None:
    deaths: list[int] = []

    def answer(outcome: SliceOutcome, backend: StandIn) -> SliceOutcome:
        if deaths:
            return all_answered(outcome, backend)
        deaths.append(backend.replica.index)
        return death(outcome)

    world = World(answer=answer)
    world.refuses = lambda slice_, backend: (
        Start.NO_LEASE if deaths and backend.replica.index != deaths[0] and world.clock < 1001 else None
    )
    assert run_of(world, job(4)).run() == {}
    assert [index for _, index in world.starts[1:]] == [1 - deaths[0]] * (len(world.starts) - 1)


class CountingSlices(WaitingSlices):
    def __init__(self, slices: list[Slice]) -> None:
        super().__init__(slices)
        self.looked_at = 0

    def candidates(self) -> Iterator[Slice]:
        for slice_ in super().candidates():
            self.looked_at += 1
            yield slice_


@pytest.mark.parametrize("refuse", [Start.NO_LEASE, Start.NO_PERMITS, None])
def test_the_slices_that_are_looked_at_grow_with_the_batch_and_not_with_its_square(refuse: Start | None) -> None:
    looks = []
    for texts in (200, 1600):
        world = World()
        flying = world.flying
        world.refuses = lambda slice_, backend, flying=flying: refuse if flying.total() else None
        run = run_of(world, job(texts), size=1)
        run.waiting = waiting = CountingSlices([Slice((text,)) for text in range(texts)])
        assert run.run() == {}
        looks.append(waiting.looked_at)
    assert looks[1] < 10 * looks[0]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(0, 2**32),
    st.sets(st.integers(0, 59)),
    st.booleans(),
)
def test_whatever_happens_every_text_is_answered_or_has_failed_and_only_one_to_blame_fails(
    texts: int, size: int, replicas: int, seed: int, bad: set[int], keep: bool
) -> None:
    choice = random.Random(seed)
    answered: Counter[int] = Counter()

    def answer(outcome: SliceOutcome, backend: StandIn) -> SliceOutcome:
        sent = outcome.slice.texts
        good = next((place for place, text in enumerate(sent) if text in bad), len(sent))
        ends = choice.random()
        if ends < 0.1:
            return no_connection(outcome)
        count = choice.randint(0, good) if ends < 0.4 else good
        answered.update(sent[:count])
        if ends < 0.4:
            return death(outcome, count)
        if good < len(sent):
            return bad_text(outcome, good)
        return all_answered(outcome, backend)

    world = World([StandIn(index) for index in range(replicas)], answer)
    failures = run_of(world, job(texts, keep), size).run()
    assert all(times == 1 for times in answered.values())
    assert not answered.keys() & failures.keys()
    if keep or not failures:
        assert answered.keys() | failures.keys() == set(range(texts))
    else:
        assert len(failures) == 1
    assert all(text in bad or failure.code is CODES.INTERNAL for text, failure in failures.items())
    assert len(world.convictions) == sum(failure.code is CODES.INTERNAL for failure in failures.values())


def table(*names: str, generation: int = 1, model: str = "org/one", alias_of: str = "") -> Table:
    """Instances of one model; alias_of: the one of another model whose alias is the model's id."""
    routes = [Route(name, model, "running", (), generation=generation) for name in names]
    if alias_of:
        routes.append(Route(alias_of, "org/other", "running", (), aliases=(model,)))
    return Table(tuple(sorted(routes, key=lambda route: route.name)))


@pytest.mark.parametrize(
    ("target", "after"),
    [
        (Target(instance_index=1), table("a", "b", "c")),  # a new one shifts the others
        (Target(model_id="org/one"), table("b", "d", alias_of="z")),  # an alias goes before the id
        (Target(instance_name="b"), table("b", "d", generation=2)),
    ],
    ids=["shifted", "alias", "replaced"],
)
def test_a_batch_whose_target_names_another_instance_is_computed_anew(target: Target, after: Table) -> None:
    """Its rows were of two instances: only another generation of the same one was noticed."""
    asked = replace(job(4), target=target, generations=generations_of(table("b", "d"), target))
    asked.refuse_replaced(generations_of(table("b", "d"), target))
    with pytest.raises(Replaced):
        asked.refuse_replaced(generations_of(after, target))


@pytest.mark.parametrize("after", [table("b"), table("d"), table()])
def test_a_batch_goes_on_where_one_of_its_instances_merely_vanishes(after: Table) -> None:
    target = Target(model_id="org/one")
    asked = replace(job(4), target=target, generations=generations_of(table("b", "d"), target))
    asked.refuse_replaced(generations_of(after, target))


def test_a_batch_whose_generations_do_not_matter_is_not_computed_anew() -> None:
    job(4).refuse_replaced(generations_of(table("one"), Target(instance_name="one")))
