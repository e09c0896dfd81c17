"""RerankStream over a relay that is held in memory: which instances get the pieces, and when they are sent again."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import pytest

from appliance.core.routing import Replica, Target
from appliance.drivers.memory import Reserve
from appliance.multiplexer.addressing import Wrapped
from appliance.multiplexer.attempts import UnaryReply
from appliance.multiplexer.metering import CallRecord
from appliance.multiplexer.rerank import handler
from appliance.multiplexer.whole_stream import digest_of
from appliance.wire.envelope import CODE_KEY, GENERATIONS_KEY, WHOLE_KEY
from appliance.wire.methods import METHODS
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux

METHOD = next(method for method in METHODS if method.name == "RerankStream")
TAKES = {"narrow": 2, "wide": 8}  # texts of one Rerank call


class Aborted(Exception):
    """The call has ended with these words."""


class CallContext:
    """A caller's. whole: what he asks for with WHOLE_KEY."""

    def __init__(self, whole: str | None) -> None:
        self.whole = whole
        self.told = dict[str, str]()

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [(WHOLE_KEY, self.whole)] if self.whole else []

    def send_initial_metadata(self, metadata: list[tuple[str, str]]) -> None:
        self.told.update(metadata)

    def set_trailing_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        assert (CODE_KEY, "REPLACED") in metadata

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        assert code is grpc.StatusCode.ALREADY_EXISTS
        raise Aborted(details)


class InTurns:
    """A relay to two instances of one model, of which a target by model gets each in turn; also its attempts."""

    def __init__(self) -> None:
        self.metering = SimpleNamespace(counting=lambda *_: nullcontext(CallRecord()))
        self.reserve = Reserve(2**30)
        self.attempts = self.pool = self
        self.stream_permit = nullcontext
        cache = SimpleNamespace(refuse_unexpected=lambda *_: None, refuse_changed=lambda *_: None)
        self.cached = SimpleNamespace(cache=cache)
        self.turns: Iterator[str] = iter(["wide", "narrow"] * 20)
        self.numbers = dict.fromkeys(TAKES, 1)
        self.takes = dict(TAKES)
        self.asked: list[tuple[str, str, int]] = []
        self.replaced_after: int | None = None  # so many pieces

    def generations(self, target: Target) -> tuple[tuple[str, int], ...]:
        names = [target.instance_name] if target.instance_name else list(TAKES)
        return tuple((name, self.numbers[name]) for name in names)

    def unary(self, method: Any, target: Target, inner: bytes, context: Any, call: CallRecord) -> UnaryReply:
        name = call.instance = target.instance_name or next(self.turns)
        replica = Replica(name, 0, "127.0.0.1:1", "m", 1, 64)
        texts = tei.RerankRequest.FromString(inner).texts if method.name == "Rerank" else []
        self.asked.append((method.name, name, len(texts)))
        assert len(texts) <= self.takes[name], "TEI refuses so many"
        if method.name == "Info":
            answer: Any = tei.InfoResponse(max_client_batch_size=self.takes[name])
        else:
            generation = self.numbers[name]
            answer = tei.RerankResponse(ranks=[tei.Rank(index=at, score=generation) for at in range(len(texts))])
            if self.replaced_after == sum(method == "Rerank" for method, _, _ in self.asked):
                self.numbers[name], self.takes[name] = generation + 1, 2
        return UnaryReply(answer.SerializeToString(), [], (), replica)


def rank(relay: Any, texts: int, whole: str | None = None) -> tuple[tei.RerankResponse, dict[str, str]]:
    """The ranking, and the metadata before it. whole: what the caller asks for with WHOLE_KEY."""
    target = mux.Target(model_id="m")
    messages = [
        mux.RerankStreamRequest(target=target, request=tei.RerankStreamRequest(query="q", text=f"text {number}"))
        for number in range(texts)
    ]
    context: Any = CallContext(whole)
    ranked = handler(relay, METHOD, Wrapped()).stream_unary(
        iter([each.SerializeToString() for each in messages]), context
    )
    return tei.RerankResponse.FromString(ranked), context.told


def test_the_pieces_go_to_the_instance_that_said_how_many_texts_it_takes() -> None:
    """Another instance of the model takes fewer, and refused them: every second call failed."""
    relay = InTurns()
    ranks = rank(relay, 10)[0].ranks
    assert sorted(each.index for each in ranks) == list(range(10))
    assert relay.asked == [("Info", "wide", 0), ("Rerank", "wide", 8), ("Rerank", "wide", 2)]


def test_one_ranking_is_of_one_generation_which_says_anew_how_many_texts_it_takes() -> None:
    """What took the place of the instance was sent as many texts as the one before took."""
    relay = InTurns()
    relay.replaced_after = 2
    ranks = rank(relay, 10)[0].ranks
    assert {each.score for each in ranks} == {2.0}
    assert sorted(each.index for each in ranks) == list(range(10))


def test_a_ranking_that_belongs_to_others_is_of_their_generation() -> None:
    relay = InTurns()
    _, told = rank(relay, 10, "yes")
    assert told == {GENERATIONS_KEY: digest_of((("narrow", 1), ("wide", 1)))}
    assert rank(relay, 3, told[GENERATIONS_KEY])[1] == told
    relay.numbers["narrow"] = 2
    with pytest.raises(Aborted, match="was replaced"):
        rank(relay, 3, told[GENERATIONS_KEY])
    assert rank(relay, 3)[1] == {}


def test_what_an_alias_does_not_name_any_more_is_no_part_of_a_whole() -> None:
    relay = InTurns()
    relay.turns = iter(["gone"] * 2)
    relay.takes["gone"] = relay.numbers["gone"] = 1
    with pytest.raises(Aborted, match="was replaced"):
        rank(relay, 1, "yes")
    assert len(rank(relay, 1)[0].ranks) == 1


def test_a_ranking_by_model_is_not_made_anew_where_another_instance_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    relay = InTurns()
    unary = relay.unary

    def replacing(method: Any, *arguments: Any) -> UnaryReply:
        relay.numbers["narrow"] += method.name == "Rerank"
        return unary(method, *arguments)

    monkeypatch.setattr(relay, "unary", replacing)
    assert len(rank(relay, 10)[0].ranks) == 10
    assert [name for method, name, _ in relay.asked if method == "Rerank"] == ["wide", "wide"]
