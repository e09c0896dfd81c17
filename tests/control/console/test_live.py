"""When a page is told to look again, and how often a part is made for many who look."""

from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

from appliance.control.console import live
from appliance.control.console.live import PageSource, SharedPart
from appliance.control.streaming import ADMITTED_SECS, Admission
from appliance.core.events import Event
from appliance.core.problems import Problem, invalid
from appliance.core.settings import Settings
from appliance.node.context import Node

TICK, LOG = 'event: tick\ndata: "tick"\n\n', 'event: log\ndata: "log"\n\n'


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node.at(Settings(data_dir=str(tmp_path), state_file=f"{tmp_path}/state.toml"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Clock:
        now = 1000.0

        def monotonic(self) -> float:
            return self.now

    made = Clock()
    monkeypatch.setattr(live, "time", made)
    return made


def source(node: Node, log: Path | None = None) -> PageSource:
    return PageSource(node, lambda: log, Admission(lambda: None))


def ticks(page: PageSource, clock: Any, secs: float) -> list[float]:
    """When it told to look again, from now on, in half seconds."""
    begun, found = clock.now, []
    while clock.now < begun + secs:
        if page() == TICK:
            found.append(clock.now - begun)
        clock.now += 0.5
    return found


def test_a_change_is_told_at_once_and_what_follows_from_it_a_moment_later(node: Node, clock: Any) -> None:
    page = source(node)
    assert ticks(page, clock, 8) == [0, 1, 3]
    assert ticks(page, clock, 26) == [5, 15, 25], "what is measured every ten seconds"
    node.journal.record(Event.CREATED, "a", "made")
    assert ticks(page, clock, 6) == [0, 1, 3]


def test_changes_without_end_are_told_once_a_second(node: Node, clock: Any) -> None:
    page, begun, told = source(node), clock.now, 0
    while clock.now < begun + 10:
        node.journal.record(Event.CREATED, "a", "made")
        told += page() == TICK
        clock.now += 0.25
    assert told == 10


def test_a_log_that_grows_has_a_word_of_its_own(node: Node, clock: Any, tmp_path: Path) -> None:
    log = tmp_path / "a-0.log"
    page = source(node, log)
    ticks(page, clock, 5)
    log.write_text("one\n")
    assert page() == LOG
    assert page() == ""
    log.write_text("one\ntwo\n")
    assert page() == "", "once a second"
    clock.now += 1
    assert page() == LOG


def test_the_log_is_that_of_the_generation_that_is_called(node: Node, clock: Any, tmp_path: Path) -> None:
    logs = [tmp_path / "a-0.log", tmp_path / "a@2-0.log"]
    page = PageSource(node, lambda: logs[0], Admission(lambda: None))
    ticks(page, clock, 5)
    logs.reverse()
    node.journal.record(Event.REPLACED, "a", "another generation")
    ticks(page, clock, 5)
    (tmp_path / "a@2-0.log").write_text("new\n")
    assert page() == LOG


def test_who_may_not_any_more_is_told_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def judge() -> None:
        raise invalid("revoked")

    admission = Admission(judge)
    page = PageSource(node, lambda: None, admission)
    assert page() == TICK
    admission.judged_at -= ADMITTED_SECS
    with pytest.raises(Problem, match="revoked"):
        page()


def test_a_part_is_made_once_for_all_who_see_the_same(node: Node, clock: Any) -> None:
    shared, made = SharedPart(), list[str]()

    def make() -> Markup:
        made.append("")
        return Markup(len(made))

    assert [shared.get(node, "all", make) for _ in range(5)] == ["1"] * 5
    assert shared.get(node, "some", make) == "2", "who sees something else has his own"
    assert shared.get(node, "all", make) == "1"
    node.journal.record(Event.CREATED, "a", "made")
    assert shared.get(node, "all", make) == "3", "what has changed is seen at once"
    clock.now += 1
    assert shared.get(node, "all", make) == "4"


def test_a_part_knows_whether_it_is_the_one_that_a_page_has() -> None:
    one, other = (
        live.part("bench_result.html", name=name, found=None, curve=None, best=None, levels=7) for name in ("a", "b")
    )
    assert live.TAG_PLACE not in one
    tag = one.partition("tag=")[2][:16]
    assert f"tag={tag}&amp;" in one
    assert f"tag={tag}&amp;" not in other
