"""Texts that go together: who waits for whom, and that each gets its own answer, whatever becomes of the others."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.gateway import combining
from appliance.gateway.channel import Metadata
from appliance.gateway.combining import (
    FEWEST_TOGETHER,
    MOST_ALONE,
    MOST_REMEMBERED,
    MOST_TOGETHER,
    Combiner,
    TextGroup,
)
from appliance.gateway.multiplexer_calls import MultiplexerCalls
from appliance.gateway.refusals import Reason, Refusal
from testing.running import eventually


class Upstream:
    """Calls that end when the test says so."""

    def __init__(self) -> None:
        self.combiner = Combiner[str]()
        self.calls: list[list[str]] = []
        self.ends: list[threading.Event] = []
        self.refusal: Exception | None = None  # of calls for several texts
        self.threads = ThreadPoolExecutor(100)

    def call(self, texts: Sequence[str]) -> list[str | None]:
        end = threading.Event()
        self.ends.append(end)
        self.calls.append(list(texts))
        assert end.wait(10)
        if "bad" in texts or (self.refusal and len(texts) > 1):
            raise self.refusal or Refusal(Reason.VALIDATION, f"{len(texts)} texts were refused")
        return [None if text == "alone" and len(texts) > 1 else text.upper() for text in texts]

    def ask(self, text: str, kind: str = "a") -> "Future[str]":
        return self.threads.submit(self.combiner.ask, kind, text, lambda: self.one(text), self.call)

    def one(self, text: str) -> str:
        (found,) = self.call([text])
        assert found
        return found

    def in_order(self, texts: Sequence[str], kind: str = "a") -> "list[Future[str]]":
        """Each is there before the next one comes."""
        asked = []
        for number, text in enumerate(texts, 1):
            before = self.present(kind)
            asked.append(self.ask(text, kind))
            eventually(lambda before=before: self.present(kind) == before + 1, 5)
            assert len(asked) == number
        return asked

    def present(self, kind: str) -> int:
        groups = self.combiner.groups
        return groups[kind].in_flight + len(groups[kind].waiters) if kind in groups else 0

    def end(self, call: int) -> None:
        eventually(lambda: len(self.ends) > call, 5)
        self.ends[call].set()

    def end_all(self) -> Callable[[], None]:
        """From now on no call takes time."""
        over = threading.Event()

        def release() -> None:
            while not over.wait(0.001):
                for end in list(self.ends):
                    end.set()

        self.threads.submit(release)
        return over.set


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Upstream:
    """Where nobody waits for too long."""
    monkeypatch.setattr(combining, "SHORT_WAIT_SECS", 10.0)
    monkeypatch.setattr(combining, "LONG_WAIT_SECS", 10.0)
    return Upstream()


def test_few_texts_go_alone_and_at_once(upstream: Upstream) -> None:
    texts = [f"t{number}" for number in range(MOST_ALONE)]
    asked = upstream.in_order(texts)
    eventually(lambda: sorted(upstream.calls) == [[text] for text in texts], 5)
    for call in range(MOST_ALONE):
        upstream.end(call)
    assert [each.result(5) for each in asked] == [text.upper() for text in texts]
    eventually(lambda: upstream.combiner.groups == {}, 5)


def test_those_that_come_meanwhile_go_together_when_the_first_return(upstream: Upstream) -> None:
    first = upstream.in_order([f"f{number}" for number in range(MOST_ALONE)])
    later = upstream.in_order(["x", "y", "z"])
    assert len(upstream.calls) == MOST_ALONE
    upstream.end(0)
    eventually(lambda: upstream.calls[MOST_ALONE:] == [["x", "y", "z"]], 5)
    for call in range(1, MOST_ALONE + 1):
        upstream.end(call)
    assert [each.result(5) for each in first + later] == [f"F{n}" for n in range(MOST_ALONE)] + ["X", "Y", "Z"]
    eventually(lambda: upstream.combiner.groups == {}, 5)


def test_so_few_that_a_common_call_would_cost_more_go_alone(upstream: Upstream) -> None:
    upstream.in_order(["f"] * MOST_ALONE)
    later = upstream.in_order([f"t{number}" for number in range(FEWEST_TOGETHER - 1)])
    upstream.end(0)
    eventually(lambda: len(upstream.calls) == MOST_ALONE + len(later), 5)
    stop = upstream.end_all()
    assert [each.result(5) for each in later] == [f"T{number}" for number in range(FEWEST_TOGETHER - 1)]
    stop()
    assert {len(call) for call in upstream.calls} == {1}


def test_texts_of_another_kind_wait_for_nobody(upstream: Upstream) -> None:
    texts = [str(number) for number in range(MOST_ALONE + 1)]
    asked = upstream.in_order(texts, "a")
    other = upstream.in_order(["b"], "b")
    eventually(lambda: ["b"] in upstream.calls, 5)
    stop = upstream.end_all()
    assert [each.result(5) for each in asked + other] == [*texts, "B"]
    stop()


def test_a_text_that_is_refused_costs_no_other_one_its_answer(upstream: Upstream) -> None:
    upstream.in_order(["f"] * MOST_ALONE)
    later = upstream.in_order(["x", "bad", "z"])
    stop = upstream.end_all()
    assert (later[0].result(5), later[2].result(5)) == ("X", "Z")
    with pytest.raises(Refusal, match=r"^1 texts were refused"):
        later[1].result(5)
    stop()
    assert upstream.calls[MOST_ALONE] == ["x", "bad", "z"]
    assert sorted(upstream.calls[MOST_ALONE + 1 :]) == [["bad"], ["x"], ["z"]]


def test_a_text_without_an_answer_of_the_common_call_is_asked_for_alone(upstream: Upstream) -> None:
    upstream.in_order(["f"] * MOST_ALONE)
    later = upstream.in_order(["x", "alone", "z"])
    stop = upstream.end_all()
    assert [each.result(5) for each in later] == ["X", "ALONE", "Z"]
    stop()
    assert upstream.calls[MOST_ALONE:] == [["x", "alone", "z"], ["alone"]]


def test_those_that_do_not_return_hold_up_nobody_for_long(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may wait for a replica that hangs, and another one is free."""
    monkeypatch.setattr(combining, "SHORT_WAIT_SECS", 0.02)
    hanging = upstream.in_order(["f"] * MOST_ALONE)
    for number in range(3):
        free = upstream.ask(f"t{number}")
        upstream.end(MOST_ALONE + number)
        assert free.result(5) == f"T{number}"
    assert not any(each.done() for each in hanging)
    stop = upstream.end_all()
    assert [each.result(5) for each in hanging] == ["F"] * MOST_ALONE
    stop()
    eventually(lambda: upstream.combiner.groups == {}, 5)


@pytest.mark.parametrize("reason", [Reason.TIMEOUT, Reason.UNAVAILABLE, Reason.NOT_FOUND])
def test_what_all_would_be_told_is_asked_once(upstream: Upstream, reason: Reason) -> None:
    upstream.refusal = Refusal(reason, "the instance")
    upstream.in_order(["f"] * MOST_ALONE)
    later = upstream.in_order(["x", "y", "z"])
    stop = upstream.end_all()
    for each in later:
        with pytest.raises(Refusal, match="the instance"):
            each.result(5)
    stop()
    assert len(upstream.calls) == MOST_ALONE + 1


def test_a_fault_of_ours_in_the_common_call_leaves_nobody_waiting(upstream: Upstream) -> None:
    upstream.refusal = KeyError("ours")
    upstream.in_order(["f"] * MOST_ALONE)
    later = upstream.in_order(["x", "y", "z"])
    stop = upstream.end_all()
    with pytest.raises(KeyError):
        later[0].result(5)
    assert [later[1].result(5), later[2].result(5)] == ["Y", "Z"]
    stop()
    eventually(lambda: upstream.combiner.groups == {}, 5)


def test_no_call_has_too_many_and_none_is_forgotten(upstream: Upstream) -> None:
    upstream.in_order(["f"] * MOST_ALONE)
    later = upstream.in_order([f"t{number}" for number in range(MOST_TOGETHER + 5)])
    stop = upstream.end_all()
    assert [each.result(5) for each in later] == [f"T{number}" for number in range(MOST_TOGETHER + 5)]
    stop()
    assert max(map(len, upstream.calls)) == MOST_TOGETHER
    eventually(lambda: upstream.combiner.groups == {}, 5)


def many(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As many as are known to ask at once, and are away at the moment."""
    texts = [f"m{number}" for number in range(MOST_ALONE + 4)]
    asked = upstream.in_order(texts)
    stop = upstream.end_all()
    assert [each.result(5) for each in asked] == [text.upper() for text in texts]
    stop()
    eventually(lambda: upstream.combiner.groups == {}, 5)
    upstream.calls.clear()
    upstream.ends.clear()
    monkeypatch.setattr(combining, "GAP_SECS", 10.0)
    return texts


def test_where_there_are_many_the_first_waits_for_all(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = many(upstream, monkeypatch)
    for _ in range(2):
        asked = upstream.in_order(texts[:-1])
        assert upstream.calls == []
        asked.append(upstream.ask(texts[-1]))
        upstream.end(0)
        assert [each.result(5) for each in asked] == [text.upper() for text in texts]
        eventually(lambda: upstream.combiner.groups == {}, 5)
        assert upstream.calls == [texts]
        upstream.calls.clear()
        upstream.ends.clear()


def test_where_there_were_many_who_do_not_come_the_others_go(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    many(upstream, monkeypatch)
    monkeypatch.setattr(combining, "GAP_SECS", 0.2)
    asked = upstream.in_order(["x", "y", "z"])
    eventually(lambda: upstream.calls == [["x", "y", "z"]], 5)
    late = upstream.ask("late")  # they are few now
    eventually(lambda: len(upstream.calls) == 2, 5)
    stop = upstream.end_all()
    assert [each.result(5) for each in [*asked, late]] == ["X", "Y", "Z", "LATE"]
    stop()
    assert upstream.calls[1] == ["late"]
    assert upstream.combiner.remembered == {}


def test_behind_texts_that_hang_many_go_together(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows whether they return: whoever comes then waits for a moment, and all go at once."""
    monkeypatch.setattr(combining, "SHORT_WAIT_SECS", 0.2)
    hanging = upstream.in_order(["f"] * MOST_ALONE)
    upstream.combiner.groups["a"].before = 20
    asked = upstream.in_order(["x", "y", "z"])
    eventually(lambda: upstream.calls[MOST_ALONE:] == [["x", "y", "z"]], 5)
    upstream.end(MOST_ALONE)
    assert [each.result(5) for each in asked] == ["X", "Y", "Z"]
    assert not any(each.done() for each in hanging)
    stop = upstream.end_all()
    assert [each.result(5) for each in hanging] == ["F"] * MOST_ALONE
    stop()


def test_few_that_hang_keep_many_from_nothing(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combining, "GAP_SECS", 0.2)
    hanging = upstream.in_order(["f"] * (MOST_ALONE - 1))
    upstream.combiner.groups["a"].before = 20
    asked = upstream.in_order(["x", "y", "z"])
    eventually(lambda: upstream.calls[MOST_ALONE - 1 :] == [["x", "y", "z"]], 5)
    assert not any(each.done() for each in hanging)
    stop = upstream.end_all()
    assert [each.result(5) for each in asked] == ["X", "Y", "Z"]
    stop()


def test_those_who_keep_coming_hold_up_the_first_of_many_no_longer_than_a_call_takes(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = many(upstream, monkeypatch)  # 10 s without anybody would be a gap
    monkeypatch.setattr(combining.TextGroup, "gather_secs", 0.2)
    monkeypatch.setattr(combining, "GAP_SECS", 0.15)
    asked = []
    for number in range(len(texts) - 1):
        asked.append(upstream.ask(texts[number]))
        time.sleep(0.1)  # never a gap
        if upstream.calls:
            break
    assert upstream.calls
    stop = upstream.end_all()
    assert [each.result(5) for each in asked] == [text.upper() for text in texts[: len(asked)]]
    stop()


def test_what_is_remembered_of_kinds_is_bounded(upstream: Upstream) -> None:
    for number in range(MOST_REMEMBERED + 3):
        upstream.combiner.remember(f"few {number}", TextGroup(before=MOST_ALONE))
        upstream.combiner.remember(f"many {number}", TextGroup(before=MOST_ALONE + 1))
    assert list(upstream.combiner.remembered) == [f"many {number}" for number in range(3, MOST_REMEMBERED + 3)]


@pytest.mark.parametrize(
    ("text", "metadata", "express", "several", "may"),
    [
        ("short", [], False, False, True),
        ("short", [("x-tei-wait", "no"), ("x-tei-scope", "a key")], True, False, True),  # by the multiplexer anyway
        ("long" * 300, [], False, False, False),
        ("short", [], True, False, False),
        ("short", [], False, True, False),
        ("short", [("x-tei-cache", "bypass")], False, False, False),
        ("short", [("x-tei-expect-fingerprint", "f")], False, False, False),
    ],
)
def test_a_text_travels_with_others_only_where_it_gets_the_same(
    text: str, metadata: Metadata, express: bool, several: bool, may: bool
) -> None:
    selection: Any = SimpleNamespace(names="a", express=express, is_of_several=several)
    channels: Any = None
    calls = MultiplexerCalls(channels, selection, nullcontext, lambda size: None, metadata)
    assert calls.may_combine(text) is may


def test_many_callers_at_once_each_get_their_own(upstream: Upstream) -> None:
    stop = upstream.end_all()

    def caller(number: int) -> list[str]:
        alone = [f"{number}-{turn}" for turn in range(50)]
        return [upstream.combiner.ask("a", text, lambda text=text: upstream.one(text), upstream.call) for text in alone]

    for number, answers in enumerate(upstream.threads.map(caller, range(16))):
        assert answers == [f"{number}-{turn}" for turn in range(50)]
    stop()
    assert sum(map(len, upstream.calls)) == 16 * 50
    assert upstream.combiner.groups == {}
