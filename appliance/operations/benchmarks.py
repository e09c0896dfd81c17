"""Measuring an instance with more and more requests in flight: `appliance bench --sweep` as a process beside us.

It calls as the gateway does, through all multiplexers, by the sockets that need no key. One measures at a time: two
would measure each other, and so would one beside calls of others, unless it is told to measure all the same.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from appliance.core.benchmark import LEVELS, LoadStep
from appliance.core.problems import Kind, Problem, invalid, quoted
from appliance.core.series import FINE
from appliance.node import benchmarks, overview, series
from appliance.node.benchmarks import ARGUMENT, DONE, FAILED, Benchmark
from appliance.node.context import Node, now
from appliance.operations import supervision

log = logging.getLogger(__name__)
STEP_SECS, SHORTEST_SECS, LONGEST_SECS = 2.0, 0.5, 10.0
LOCK_SECS = 5
SEEN_SECS = 3.0 * FINE.secs  # so long a measurement that has ended is in the newest rows
BUSY_TEXTS = 1.0  # a second, of all instances: more than that is somebody else's work


def start(node: Node, name: str, secs: float = STEP_SECS, force: bool = False) -> Benchmark:
    """Begin to measure, and return at once. Raises: Problem."""
    if not SHORTEST_SECS <= secs <= LONGEST_SECS:
        raise invalid(f"secs must be {SHORTEST_SECS:g} to {LONGEST_SECS:g} for each of {len(LEVELS)} steps")
    instance = node.state.read().get(name)
    refuse_what_does_not_answer(node, name)
    if not force:
        refuse_beside_others(node)
    with starting(node):
        process = subprocess.Popen(
            command(node, name, secs),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun = Benchmark(name, instance.created_at, now(), secs, process.pid)
        try:
            benchmarks.write(node, begun)
        except OSError as error:
            end(process)
            raise Problem(Kind.EXHAUSTED, "NOT_WRITTEN", f"What is measured cannot be written down: {error}") from error
    threading.Thread(target=follow, args=(node, begun, process), name="benchmark", daemon=True).start()
    return begun


@contextmanager
def starting(node: Node) -> Iterator[None]:
    """Raises: Problem while another one measures."""
    taken = Problem(Kind.CONFLICT, "ALREADY_MEASURING", "Another measurement begins at this moment")
    with supervision.file_lock(f"{node.layout.benchmarks}.lock", LOCK_SECS, taken):
        if other := benchmarks.running(node):
            words = f"{quoted(other.instance)} is measured now; two at once would measure each other"
            raise Problem(Kind.CONFLICT, "ALREADY_MEASURING", words)
        yield


def refuse_what_does_not_answer(node: Node, name: str) -> None:
    view = overview.show(node, name)
    if not view.replicas_ready:
        words = f"{quoted(name)} is {view.status}: only what answers can be measured"
        raise Problem(Kind.CONFLICT, "NOT_RUNNING", words)


def refuse_beside_others(node: Node) -> None:
    """What was measured here a moment ago is nobody's work."""
    rates = {
        name: series.newest(node, name)["texts"] or 0.0
        for name in node.state.read().instances
        if benchmarks.age(node, name) > SEEN_SECS
    }
    if sum(rates.values()) > BUSY_TEXTS:
        most = max(rates, key=lambda name: rates[name])
        words = (
            f"{quoted(most)} answered {rates[most]:.0f} texts a second a moment ago: a measurement would disturb that, "
            "and be disturbed; force=true measures all the same"
        )
        raise Problem(Kind.CONFLICT, "BUSY", words)


def command(node: Node, name: str, secs: float) -> list[str]:
    sockets = node.settings.multiplexer_sockets(os.cpu_count() or 1)
    endpoints = ",".join(f"unix:{path}" for path in sockets)
    options = ["--instance", name, ARGUMENT, "--secs", f"{secs:g}", "--json"]
    return [sys.executable, "-m", "appliance", "bench", "--endpoint", endpoints, *options]


def follow(node: Node, benchmark: Benchmark, process: subprocess.Popen[str]) -> None:
    """Write each step down as it ends; stop when the instance is gone."""
    assert process.stdout is not None
    try:
        for line in process.stdout:
            instance = node.state.read().instances.get(benchmark.instance)
            if instance is None or instance.created_at != benchmark.created_at:
                return
            benchmark = replace(benchmark, steps=(*benchmark.steps, LoadStep(**json.loads(line))))
            benchmarks.write(node, benchmark)
        error = None if len(benchmark.steps) == len(LEVELS) else last_words(process)
        benchmarks.write(node, replace(benchmark, status=FAILED if error else DONE, error=error))
    except (OSError, ValueError, TypeError, Problem) as error:
        log.error("Cannot write what was measured of %s: %s", benchmark.instance, error)
    finally:
        end(process)


def last_words(process: subprocess.Popen[str]) -> str:
    """Of one that ends. It stays a zombie, as which it counts as running until they are written down."""
    assert process.stderr is not None
    said = process.stderr.read().strip()[-500:]
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return said or f"It ended with {ended.si_status}"


def end(process: subprocess.Popen[str]) -> None:
    with process:  # which waits for it, and closes its pipes
        process.kill()
