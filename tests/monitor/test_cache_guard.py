"""Since when a replica's vectors may be wrong, and whom that is asked of."""

from dataclasses import replace
from pathlib import Path

import pytest

from appliance.core.health import ProbeResult
from appliance.core.status import Process
from appliance.drivers.supervisord import Supervisor
from appliance.monitor.cache_guard import CacheGuard
from appliance.node.context import Node, now_ms
from testing.engines import FAMILIES
from testing.running import eventually
from testing.specs import configured, instance, spec

RIGHT = (ProbeResult.ANSWERED, "")


class Counting(Supervisor):
    """A supervisord without processes that counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__("no socket")
        self.asked = 0

    def process(self, group: str, name: str) -> Process | None:
        self.asked += 1
        return None

    def members(self, group: str, names: object) -> list[Process]:
        self.asked += 1
        return []


@pytest.fixture
def supervisor() -> Counting:
    return Counting()


@pytest.fixture
def guard(tmp_path: Path, supervisor: Counting) -> CacheGuard:
    return CacheGuard(replace(Node.at(configured(data_dir=str(tmp_path))), supervisor=supervisor))


def test_the_fingerprint_of_a_process_is_asked_for_until_it_is_known(guard: CacheGuard, supervisor: Counting) -> None:
    one = instance(spec("a", model_id=str(FAMILIES / "bert-cls")))
    guard.noting(one, 0, 7, now_ms(), lambda: RIGHT)
    eventually(lambda: (guard.note_fingerprint(one, 0, 7), guard.good["a-0"].fingerprint)[1])
    known, asked = guard.good["a-0"], supervisor.asked
    for _ in range(3):
        guard.noting(one, 0, 7, now_ms(), lambda: RIGHT)
        guard.note_fingerprint(one, 0, 7)
    assert supervisor.asked == asked
    assert guard.good["a-0"].fingerprint == known.fingerprint
    assert guard.good["a-0"].at_ms >= known.at_ms
    guard.noting(one, 0, 8, now_ms(), lambda: RIGHT)  # another process may have loaded another model
    assert supervisor.asked == asked + 1
    guard.noting(replace(one, launch=2), 0, 8, now_ms(), lambda: RIGHT)
    assert supervisor.asked == asked + 2
    guard.forget_others(())
    assert not guard.known


def test_what_nobody_can_know_is_asked_again_only_with_the_next_comparison(
    guard: CacheGuard, supervisor: Counting
) -> None:
    one = instance(spec("a", model_id="nobody/has-it"))
    guard.noting(one, 0, 7, now_ms(), lambda: RIGHT)
    for _ in range(3):
        guard.note_fingerprint(one, 0, 7)
    assert supervisor.asked == 1
    guard.noting(one, 0, 7, now_ms(), lambda: RIGHT)
    assert supervisor.asked == 2
    assert guard.good["a-0"].fingerprint == ""
