"""The simulation keeps its books: every text that arrives is answered or has failed; a seed tells the same twice."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.simulate import Arrival, Plan, Result, Simulation, plot, recorded, table

ROOT = Path(__file__).parent.parent
SMALL = Plan(replicas=12, multiplexers=3, secs=6.0, away_secs=1.0, deadline_secs=3.0)


def simulated(**fields: float) -> Result:
    return Simulation(replace(SMALL, **fields)).run()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [{}, {"load": 1.5}, {"lost": 0.25}, {"lost": 1.0}, {"bulk": 0.5}, {"burst": 3.0}, {"load": 2.0, "max_waiting": 1}],
    ids=str,
)
def test_every_text_ends(fields: dict[str, float]) -> None:
    result = simulated(**fields)
    assert result.arrived > 500
    assert result.arrived == len(result.latencies) + result.bulk_answered + result.failed
    assert sum(result.by_caller) == len(result.latencies)
    assert (result.sent_again > 0) == ("lost" in fields)


def test_nothing_is_left_of_permits_and_of_what_was_sent() -> None:
    simulation = Simulation(replace(SMALL, load=1.5, bulk=0.3, lost=0.5))
    simulation.run()
    for multiplexer in simulation.multiplexers:
        lanes = multiplexer.lanes
        assert (lanes.interactive, lanes.bulk, lanes.waiting) == (0, 0, 0)
        assert set(multiplexer.outstanding.values()) == {0}
        assert not multiplexer.waiting
        assert not multiplexer.bulk_waiting


def test_too_much_is_refused_and_what_is_taken_is_answered_in_time() -> None:
    calm, busy = simulated(load=0.5), simulated(load=2.0)
    assert not calm.refusals
    assert len(busy.refusals) > 100
    assert busy.failed > 0
    assert len(busy.latencies) > 1.5 * len(calm.latencies)
    assert max(secs for _, secs in busy.latencies) <= SMALL.deadline_secs


def test_who_sends_as_much_gets_as_much() -> None:
    assert simulated(load=1.5).fairness > 0.95
    assert simulated().busiest < 1.3


def test_the_same_seed_tells_the_same() -> None:
    assert simulated(lost=0.25).latencies == simulated(lost=0.25).latencies
    assert simulated(lost=0.25).latencies != simulated(lost=0.25, seed=2).latencies


def test_a_lone_text_takes_what_its_batch_takes(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0.5,100\n3,200\n")
    result = Simulation(SMALL, recorded(trace)).run()
    assert recorded(trace) == [Arrival(0.5, 100), Arrival(3.0, 200)]
    expected = [0.002 + SMALL.batch_secs + tokens * SMALL.token_secs for tokens in (100, 200)]
    assert [secs for _, secs in result.latencies] == pytest.approx(expected)


def test_it_is_told_and_drawn(tmp_path: Path) -> None:
    result = simulated(lost=0.25, bulk=0.2)
    told = dict(table(result))
    assert told["texts that arrived"] == f"{result.arrived:,}"
    assert all("nan" not in value for value in told.values())
    plot(result, tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()


@pytest.mark.processes
def test_the_command_of_the_page_runs(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0.1,50\n0.2,60\n")
    command = [sys.executable, "scripts/simulate.py", "--replicas=3", "--multiplexers=2", f"--trace={trace}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^texts that arrived +2$", done.stdout, re.MULTILINE)
