"""Many replicas, on paper: our own routing and admission (`core.routing.pick`, `core.admission.Lanes`) under a trace.

    .venv/bin/python scripts/simulate.py --replicas 1000 --multiplexers 16 --load 0.7 --lost 0.1 --plot out.svg

Theory of operation. One instance has all replicas. Callers spread over the multiplexers; each multiplexer knows only
what it has sent itself, as ours do, and has its share of the capacity. A replica computes a batch at a time, which
takes a while for itself and a while for each token. Events lie in a heap, and time is theirs: 10,000 texts take a
second or two, most of it for the choice among 1,000 replicas. What is lost with a replica is sent again at once; a
caller that is refused comes back when it was told to, until its deadline has passed. Simpler than it is: all
multiplexers learn at once that replicas are away, a queue has no time limit of its own, and no replica refuses.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from appliance.core import routing
from appliance.core.admission import Lanes, Verdict

CALLERS = 50
MEDIAN_TOKENS, SPREAD, MOST_TOKENS = 60, 0.8, 512  # of texts, log-normal
BUCKET_SECS = 1.0  # of the plots
NETWORK_SECS = 0.001  # from a multiplexer to a replica, and back


@dataclass(frozen=True)
class Plan:
    """What is simulated. load: texts that arrive, as a share of what all replicas could do. lost: the share of the
    replicas that dies in the middle, for away_secs."""

    replicas: int = 1000
    multiplexers: int = 16
    load: float = 0.7
    secs: float = 20.0
    burst: float = 1.0  # times as much arrives in every other five seconds as in those between
    bulk: float = 0.0  # the share of the texts that comes in the lane of batches, one by one
    lost: float = 0.0
    away_secs: float = 5.0
    deadline_secs: float = 10.0
    max_concurrent: int = 32  # texts that a replica takes at once
    max_waiting: int = 100  # calls in the queue of a multiplexer
    interactive_share: float = 0.25
    batch_tokens: int = 4096
    batch_secs: float = 0.02  # a small model on two cores, or a large one on a GPU
    token_secs: float = 0.0004
    seed: int = 1

    @property
    def replica_rate(self) -> float:
        """Texts a second of one replica whose batches are full."""
        tokens = MEDIAN_TOKENS * math.exp(SPREAD**2 / 2)
        texts = min(self.max_concurrent, self.batch_tokens / tokens)
        return texts / (self.batch_secs + self.token_secs * tokens * texts)


class Arrival(NamedTuple):
    at: float
    tokens: int


@dataclass
class Call:
    """A text on its way. at: when its caller first sent it."""

    at: float
    tokens: int
    caller: int
    multiplexer: Multiplexer
    bulk: bool = False
    tries: int = 0


@dataclass
class SimulatedReplica:
    alive: bool = True
    computing: bool = False
    launch: int = 0
    waiting: deque[Call] = field(default_factory=deque)
    batch: list[Call] = field(default_factory=list)
    texts: int = 0  # answered


@dataclass
class Multiplexer:
    lanes: Lanes
    outstanding: dict[int, int]  # texts by replica
    picks: Iterator[int]
    waiting: deque[Call] = field(default_factory=deque)
    bulk_waiting: deque[Call] = field(default_factory=deque)


@dataclass
class Result:
    """Latencies of single texts, in the order of their answers; counts of everything."""

    plan: Plan
    latencies: list[tuple[float, float]] = field(default_factory=list)  # (when it was answered, seconds)
    by_caller: list[int] = field(default_factory=lambda: [0] * CALLERS)
    bulk_answered: int = 0
    refusals: list[float] = field(default_factory=list)
    sent_again: int = 0
    failed: int = 0
    arrived: int = 0
    busiest: float = 0.0

    def percentile(self, share: float, since: float = 0.0, until: float = math.inf) -> float:
        """Seconds; NaN without an answer in that time."""
        some = sorted(secs for at, secs in self.latencies if since <= at < until)
        return some[min(len(some) - 1, int(share * len(some)))] if some else math.nan

    @property
    def fairness(self) -> float:
        """Jain's index of what the callers of single texts got, which all sent as many: 1 where all got the same."""
        total = sum(self.by_caller)
        return total**2 / (CALLERS * sum(each**2 for each in self.by_caller)) if total else math.nan


class Simulation:
    def __init__(self, plan: Plan, arrivals: Sequence[Arrival] | None = None) -> None:
        self.plan = plan
        self.random = random.Random(plan.seed)
        self.now = 0.0
        self.numbers = itertools.count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.replicas = [SimulatedReplica() for _ in range(plan.replicas)]
        self.ready = list(range(plan.replicas))
        self.result = Result(plan)
        self.multiplexers = [
            Multiplexer(
                Lanes(0, plan.max_waiting, plan.interactive_share),
                dict.fromkeys(range(plan.replicas), 0),
                itertools.count(routing.first_tie(number)),
            )
            for number in range(plan.multiplexers)
        ]
        self.share_capacity()
        self.arrivals = iter(arrivals if arrivals is not None else made_up(plan, self.random))

    def run(self) -> Result:
        self.arrive()
        if self.plan.lost:
            self.after(self.plan.secs / 2, self.lose)
        while self.events:
            self.now, _, event = heapq.heappop(self.events)
            event()
        texts = [each.texts for each in self.replicas]
        self.result.busiest = max(texts) / (sum(texts) / len(texts)) if sum(texts) else math.nan
        return self.result

    def after(self, secs: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + secs, next(self.numbers), event))

    # -- callers ------------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """The next text of the trace; it plans the one after it."""
        arrival = next(self.arrivals, None)
        if arrival is None:
            return

        def begin() -> None:
            number = self.result.arrived
            self.result.arrived += 1
            bulk = self.random.random() < self.plan.bulk
            multiplexer = self.multiplexers[self.random.randrange(len(self.multiplexers))]
            self.ask(Call(self.now, arrival.tokens, number % CALLERS, multiplexer, bulk))
            self.arrive()

        self.after(max(0.0, arrival.at - self.now), begin)

    def ask(self, call: Call) -> None:
        multiplexer = call.multiplexer
        if call.bulk:
            multiplexer.bulk_waiting.append(call)
            self.admit(multiplexer)
            return
        lanes = multiplexer.lanes
        verdict = lanes.verdict_on_single()
        if verdict is Verdict.REFUSE:
            self.result.refusals.append(self.now)
            secs = lanes.count_refusal(self.now) / 1000
            if self.now + secs - call.at > self.plan.deadline_secs:
                self.result.failed += 1
            else:
                self.after(secs, lambda: self.ask(call))
            return
        lanes.waiting += 1
        multiplexer.waiting.append(call)
        self.admit(multiplexer)

    # -- a multiplexer ------------------------------------------------------------------------------------------------

    def admit(self, multiplexer: Multiplexer) -> None:
        """Give permits to those who wait: single texts first, as far as the lanes admit them."""
        lanes = multiplexer.lanes
        while multiplexer.waiting and lanes.admits_single:
            lanes.waiting -= 1
            self.begin_work(lanes)
            lanes.interactive += 1
            self.send(multiplexer.waiting.popleft())
        while multiplexer.bulk_waiting and lanes.admits_bulk(1):
            self.begin_work(lanes)
            lanes.bulk += 1
            self.send(multiplexer.bulk_waiting.popleft())

    def begin_work(self, lanes: Lanes) -> None:
        if lanes.idle:
            lanes.begin_work(self.now)

    def send(self, call: Call) -> None:
        """To the least busy replica, as far as this multiplexer knows."""
        outstanding = call.multiplexer.outstanding
        number = routing.pick(self.ready, outstanding.__getitem__, next(call.multiplexer.picks))
        if number is None:  # all are away
            self.after(BUCKET_SECS, lambda: self.send(call))
            return
        outstanding[number] += 1
        self.after(NETWORK_SECS, lambda: self.reach(number, call))

    def finish(self, number: int, call: Call) -> None:
        multiplexer, lanes = call.multiplexer, call.multiplexer.lanes
        multiplexer.outstanding[number] -= 1
        if call.bulk:
            lanes.bulk -= 1
            self.result.bulk_answered += 1
        else:
            lanes.interactive -= 1
            if self.now - call.at > self.plan.deadline_secs:  # nobody waits for it any more
                self.result.failed += 1
            else:
                self.result.latencies.append((self.now, self.now - call.at))
                self.result.by_caller[call.caller] += 1
        lanes.count_answers(1, self.now)
        self.admit(multiplexer)

    def share_capacity(self) -> None:
        for multiplexer in self.multiplexers:
            share = max(1, self.plan.max_concurrent // self.plan.multiplexers)
            multiplexer.lanes.capacity = len(self.ready) * share

    # -- a replica ----------------------------------------------------------------------------------------------------

    def reach(self, number: int, call: Call) -> None:
        replica = self.replicas[number]
        if not replica.alive:
            self.lost(number, call)
            return
        replica.waiting.append(call)
        if not replica.computing:
            self.compute(number)

    def compute(self, number: int) -> None:
        """The next batch: what waits, up to its tokens, and at least one text."""
        replica, tokens = self.replicas[number], 0
        while replica.waiting and (not replica.batch or tokens + replica.waiting[0].tokens <= self.plan.batch_tokens):
            tokens += replica.waiting[0].tokens
            replica.batch.append(replica.waiting.popleft())
        replica.computing = bool(replica.batch)
        if replica.computing:
            launch = replica.launch
            self.after(self.plan.batch_secs + tokens * self.plan.token_secs, lambda: self.computed(number, launch))

    def computed(self, number: int, launch: int) -> None:
        replica = self.replicas[number]
        if replica.launch != launch:
            return
        batch, replica.batch = replica.batch, []
        replica.texts += len(batch)
        for call in batch:
            self.after(NETWORK_SECS, lambda call=call: self.finish(number, call))
        self.compute(number)

    def lose(self) -> None:
        """Some replicas die, with what they have, and come back."""
        dead = self.random.sample(range(self.plan.replicas), round(self.plan.lost * self.plan.replicas))
        for number in dead:
            replica = self.replicas[number]
            replica.alive, replica.computing, replica.launch = False, False, replica.launch + 1
            on_it, replica.batch, replica.waiting = [*replica.batch, *replica.waiting], [], deque()
            for call in on_it:
                self.after(NETWORK_SECS, lambda number=number, call=call: self.lost(number, call))
        self.ready = [number for number in self.ready if self.replicas[number].alive]
        self.share_capacity()
        self.after(self.plan.away_secs, lambda: self.come_back(dead))

    def lost(self, number: int, call: Call) -> None:
        """It keeps its permit, and goes to another replica."""
        call.multiplexer.outstanding[number] -= 1
        call.tries += 1
        self.result.sent_again += 1
        self.send(call)

    def come_back(self, dead: Sequence[int]) -> None:
        for number in dead:
            self.replicas[number].alive = True
        self.ready = sorted([*self.ready, *dead])
        self.share_capacity()
        for multiplexer in self.multiplexers:
            self.admit(multiplexer)


def made_up(plan: Plan, source: random.Random) -> Iterator[Arrival]:
    """Texts at random moments, of random lengths; bursts of five seconds take turns with calm."""
    rate, at = plan.load * plan.replicas * plan.replica_rate, 0.0
    while at < plan.secs:
        bursting = int(at / 5) % 2
        at += source.expovariate(rate * 2 / (1 + plan.burst) * (plan.burst if bursting else 1))
        yield Arrival(at, min(MOST_TOKENS, max(1, round(source.lognormvariate(math.log(MEDIAN_TOKENS), SPREAD)))))


def recorded(path: Path) -> list[Arrival]:
    """A trace: a CSV file of seconds and tokens, in the order of time."""
    with path.open(newline="") as file:
        return [Arrival(float(at), int(tokens)) for at, tokens in csv.reader(file)]


def table(result: Result) -> Iterator[tuple[str, str]]:
    plan, middle = result.plan, result.plan.secs / 2
    yield "texts a second that all replicas could compute", f"{plan.replicas * plan.replica_rate:,.0f}"
    yield "texts that arrived", f"{result.arrived:,}"
    yield (
        "single texts answered, p50 / p99 / p99.9 ms",
        " / ".join(f"{result.percentile(share) * 1000:.0f}" for share in (0.5, 0.99, 0.999)),
    )
    if plan.lost:
        away = result.percentile(0.99, middle, middle + plan.away_secs)
        after = result.percentile(0.99, middle + 2 * plan.away_secs)
        yield (
            f"p99 ms before, while {plan.lost:.0%} are away, and after",
            " / ".join(f"{secs * 1000:.0f}" for secs in (result.percentile(0.99, 0, middle), away, after)),
        )
    yield "texts of batches answered", f"{result.bulk_answered:,}"
    yield "sent again after their replica died", f"{result.sent_again:,}"
    yield "refusals, and texts that failed in the end", f"{len(result.refusals):,} / {result.failed:,}"
    yield "the busiest replica, to the mean", f"{result.busiest:.2f}"
    yield "fairness among callers (Jain)", f"{result.fairness:.4f}"


def plot(result: Result, path: Path) -> None:
    """Percentiles and refusals over time, as matplotlib knows the file's format."""
    from matplotlib.figure import Figure  # only here: nothing else needs it

    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    seconds = [second * BUCKET_SECS for second in range(int(result.plan.secs / BUCKET_SECS))]
    for share in (0.5, 0.99):
        values = [result.percentile(share, at, at + BUCKET_SECS) * 1000 for at in seconds]
        above.plot(seconds, values, label=f"p{share * 100:g}")
    above.set(ylabel="ms", title=f"{result.plan.replicas} replicas, {result.plan.multiplexers} multiplexers")
    above.legend()
    edges = [*seconds, result.plan.secs]
    below.hist([at for at, _ in result.latencies], bins=edges, histtype="step", label="single texts answered")
    below.hist(result.refusals, bins=edges, histtype="step", label="refusals")
    below.set(ylabel="a second", xlabel="s")
    below.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Many replicas under a trace, with our own routing and admission.")
    for name, value in vars(Plan()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--trace", type=Path, help="a CSV file of seconds and tokens; without it texts are made up")
    parser.add_argument("--plot", type=Path, help="write p50, p99, answers and refusals over time to this file")
    options = vars(parser.parse_args())
    trace, picture = options.pop("trace"), options.pop("plot")
    result = Simulation(Plan(**options), recorded(trace) if trace else None).run()
    for name, value in table(result):
        print(f"{name:<55} {value}")
    if picture:
        plot(result, picture)


if __name__ == "__main__":
    main()
