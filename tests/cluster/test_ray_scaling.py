"""Replicas that come while texts wait and go afterwards, in a cluster of Ray Serve under a real load.

`make faults`; the line that it prints at its end is in docs/scaling.md: `pytest -s`.
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testing.arrows import dense_request, vectors
from testing.background import Background
from testing.every_way import DEADLINE_SECS, Callers
from testing.ray_cluster import MARKS, WORKER, Cluster, running_cluster
from testing.ray_machines import RayMachine
from testing.running import MINILM, eventually
from testing.texts import mixed_texts

pytestmark = [*MARKS, pytest.mark.faults, pytest.mark.timeout(900)]
NAME = "busy"
MOST = 3
BATCHES = 3  # at once
TEXTS = mixed_texts(500)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path) as running:
        eventually(lambda: running.head.create(NAME, model_id=MINILM, max_replicas=MOST, node_labels=[WORKER]), 60)
        eventually(lambda: len(vectors(running.front.stub().EmbedArrow(dense_request(NAME, ["river"])))), 120)
        yield running


class Batches(Background):
    """Batches without pause, of which each has to be whole."""

    def __init__(self, front: RayMachine) -> None:
        super().__init__()
        self.stub = front.stub()
        self.answered = 0
        self.failed: list[str] = []
        self.threads = [threading.Thread(target=self.ask) for _ in range(BATCHES)]

    def ask(self) -> None:
        while not self.ended.is_set():
            try:
                found = vectors(self.stub.EmbedArrow(dense_request(NAME, TEXTS), timeout=DEADLINE_SECS * 3))
                assert len(found) == len(TEXTS)
                self.answered += len(found)
            except Exception as error:
                self.failed.append(repr(error)[:300])


def test_replicas_come_while_texts_wait_and_go_afterwards_and_no_call_fails(cluster: Cluster) -> None:
    def secs_until(wanted: Callable[[int], bool]) -> float:
        """From when the load began or ended, until the multiplexer that calls knows so many replicas."""
        eventually(lambda: wanted(len(cluster.front.listed(NAME))), 240, every=0.2)
        return time.monotonic() - began

    with Callers(cluster.front, NAME) as callers:
        with Batches(cluster.front) as batches:
            began = time.monotonic()
            out = [secs_until(lambda count: count > 1), secs_until(lambda count: count == MOST)]
        began = time.monotonic()
        back = [secs_until(lambda count: count < MOST), secs_until(lambda count: count == 1)]
    print(
        f"\nmore than one and all {MOST} replicas {out[0]:.0f} and {out[1]:.0f} s after the load began, fewer and one "
        f"{back[0]:.0f} and {back[1]:.0f} s after it ended; {batches.answered} texts in batches, "
        f"{sum(callers.answered.values())} other calls, {len(batches.failed) + len(callers.failed)} failed, "
        f"longest {callers.longest:.1f} s"
    )
    assert batches.failed == callers.failed == []
    assert batches.answered
