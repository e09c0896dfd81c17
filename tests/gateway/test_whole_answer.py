"""An answer is of one generation: its tries, and what a stream asks for where the process that answered it dies."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from appliance.gateway.multiplexer_calls import ResponseUsage
from appliance.gateway.multiplexer_channels import MultiplexerChannels
from appliance.gateway.ranking import rank_for_each
from appliance.gateway.refusals import Reason, Refusal
from appliance.gateway.whole_answer import WholeAnswer
from appliance.wire.envelope import CODE_KEY
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.fake_multiplexer import Faked

LIMIT_SECS = 20.0


def replaced() -> Refusal:
    return Refusal(Reason.UNAVAILABLE, "was replaced", code="REPLACED")


class Memory:
    def __init__(self) -> None:
        self.booked = 0

    def reserve(self, size: int, bounded: bool = True) -> None:
        self.booked += size


@pytest.mark.parametrize("replacements", [0, 1, 2])
def test_an_answer_is_tried_three_times(replacements: int) -> None:
    memory, tries = Memory(), list[str]()
    whole = WholeAnswer(memory.reserve)

    def ask() -> str:
        tries.append(dict(whole.metadata)["x-tei-whole"])
        whole.generations = "a=1"
        whole.book(100)
        if len(tries) <= replacements:
            raise replaced()
        whole.book(20)
        return "answer"

    assert whole.tried(ask) == "answer"
    assert tries == ["yes"] * (replacements + 1)
    assert memory.booked == 120


def test_the_last_refusal_is_told() -> None:
    tries = []

    def ask() -> None:
        tries.append(1)
        raise replaced()

    with pytest.raises(Refusal, match="was replaced"):
        WholeAnswer(Memory().reserve).tried(ask)
    assert len(tries) == 3


def test_another_refusal_is_told_at_once() -> None:
    tries = []

    def ask() -> None:
        tries.append(1)
        raise Refusal(Reason.VALIDATION, "wrong")

    with pytest.raises(Refusal, match="wrong"):
        WholeAnswer(Memory().reserve).tried(ask)
    assert len(tries) == 1


class Process(grpc.GenericRpcHandler):
    """A multiplexer that is at a generation, and dies after so many replies of a stream."""

    def __init__(self, generations: str) -> None:
        self.generations = generations
        self.lives = 100
        self.next_number = 0
        self.asked: list[str] = []

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        if details.method.endswith("/RerankStream"):
            return grpc.stream_unary_rpc_method_handler(self.rank)
        return grpc.stream_stream_rpc_method_handler(self.answer)

    def rank(self, requests: Iterator[bytes], context: Any) -> bytes:
        """Each text has the number of the generation as its score. What comes later is of the next one."""
        number = int(self.generations.removeprefix("a="))
        texts = len(list(self.answer(requests, context)))
        self.generations = f"a={self.next_number or number}"
        ranks = [tei.Rank(index=at, score=number) for at in range(texts)]
        return tei.RerankResponse(ranks=ranks, metadata=tei.Metadata(compute_tokens=texts)).SerializeToString()

    def answer(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        asked = dict(context.invocation_metadata()).get("x-tei-whole", "")
        self.asked.append(asked)
        if asked not in ("", "yes", self.generations):
            context.set_trailing_metadata(((CODE_KEY, "REPLACED"),))
            context.abort(grpc.StatusCode.ALREADY_EXISTS, "was replaced")
        if asked:
            context.send_initial_metadata((("x-tei-generations", self.generations),))
        for answered, request in enumerate(requests):
            if answered == self.lives:
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            yield f"{self.generations} {request.decode()}".encode()


@pytest.fixture
def processes() -> Iterator[tuple[Process, Process, MultiplexerChannels]]:
    made, servers, addresses = (Process("a=1,b=7"), Process("a=1,b=7")), [], []
    for each in made:
        server = grpc.server(ThreadPoolExecutor(4), handlers=[each])
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        server.start()
        servers.append(server)
    with closing(MultiplexerChannels(addresses, 10**6, LIMIT_SECS)) as channels:
        yield *made, channels
    for server in servers:
        server.stop(None).wait()


def ask(channels: MultiplexerChannels, whole: WholeAnswer | None) -> list[bytes]:
    return list(channels.stream("PredictPairStream", [b"x", b"y", b"z"], [1] * 3, nullcontext, whole=whole))


def test_the_rest_of_a_stream_is_of_the_generation_of_its_beginning(
    processes: tuple[Process, Process, MultiplexerChannels],
) -> None:
    one, other, channels = processes
    one.lives = other.lives = 2
    whole = WholeAnswer(Memory().reserve)
    assert ask(channels, whole) == [b"a=1,b=7 x", b"a=1,b=7 y", b"a=1,b=7 z"]
    assert sorted(one.asked + other.asked) == ["a=1,b=7", "yes"]
    assert whole.generations == "a=1,b=7"


def test_the_rest_of_a_stream_is_refused_by_another_generation(
    processes: tuple[Process, Process, MultiplexerChannels],
) -> None:
    """It was answered, and the list had labels of two models."""
    one, other, channels = processes
    one.lives, other.generations = 2, "a=2,b=7"
    seen = []
    for _ in range(2):  # the processes take calls in turn
        try:
            seen.append({reply.split()[0] for reply in ask(channels, WholeAnswer(Memory().reserve))})
        except Refusal as refusal:
            seen.append({refusal.code.encode()})
    assert sorted(seen, key=str) == [{b"REPLACED"}, {b"a=2,b=7"}]


def test_a_stream_of_what_need_not_go_together_says_nothing(
    processes: tuple[Process, Process, MultiplexerChannels],
) -> None:
    one, other, channels = processes
    assert len(ask(channels, None)) == 3
    assert one.asked + other.asked == [""]


def test_streams_of_one_answer_ask_for_one_generation(
    processes: tuple[Process, Process, MultiplexerChannels],
) -> None:
    """As those of the texts and of the images among the inputs of a request."""
    one, other, channels = processes
    other.generations = one.generations = "a=3"
    whole = WholeAnswer(Memory().reserve)

    def both() -> list[bytes]:
        first = ask(channels, whole)
        one.generations = other.generations = "a=4"
        return first + ask(channels, whole)

    replies = whole.tried(both)
    assert {reply.split()[0] for reply in replies} == {b"a=4"}
    assert len(replies) == 6


def ranked(channels: MultiplexerChannels, texts_of: dict[str, list[str]]) -> tuple[Any, dict[str, list[float]]]:
    """What the calls used, and the scores for each query."""
    selection: Any = SimpleNamespace(target=mux.Target(instance_name="a"), flag=lambda _: None, names="a")
    calls: Any = SimpleNamespace(
        channels=channels,
        selection=selection,
        watch=nullcontext,
        metadata=(),
        reserve=Memory().reserve,
        usage=ResponseUsage("a"),
    )
    ranks_of = rank_for_each(calls, texts_of, truncate=True)
    return calls.usage, {query: [rank.score for rank in ranks] for query, ranks in ranks_of.items()}


def test_rankings_for_many_queries_are_of_one_generation(
    processes: tuple[Process, Process, MultiplexerChannels],
) -> None:
    """The instance was replaced after the first: half of the scores were another model's."""
    one, other, channels = processes
    one.generations, one.next_number, other.generations = "a=3", 4, "a=4"
    usage, scores = ranked(channels, {"q": ["x", "y"], "p": ["z"]})
    assert scores == {"q": [4, 4], "p": [4]}
    assert usage.tokens == 3
    assert sorted(one.asked + other.asked)[-2:] == ["yes", "yes"]


def test_a_ranking_that_no_generation_lasts_for_is_refused(
    processes: tuple[Process, Process, MultiplexerChannels],
) -> None:
    one, other, channels = processes
    one.generations, one.next_number, other.generations, other.next_number = "a=3", 3, "a=4", 4
    with pytest.raises(Refusal, match="was replaced"):
        ranked(channels, {"q": ["x"], "p": ["z"]})


def token(number: int) -> bytes:
    return tei.EncodeResponse(tokens=[tei.SimpleToken(id=number, text="t")]).SerializeToString()


def decoded(number: int) -> bytes:
    return tei.DecodeResponse(text=str(number)).SerializeToString()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("path", "body", "rpc", "reply", "expected"),
    [
        ("/tokenize", {"inputs": ["a", "b"]}, "TokenizeStream", token, lambda one: one[0]["id"]),
        ("/decode", {"ids": [[1], [2]]}, "DecodeStream", decoded, int),
    ],
)
def test_lists_of_tokens_are_of_one_generation(
    faked: Faked, path: str, body: Any, rpc: str, reply: Any, expected: Any
) -> None:
    begun: list[str] = []

    def answer(requests: Iterator[bytes], call: grpc.ServicerContext) -> Iterator[bytes]:
        begun.append(str(dict(call.invocation_metadata()).get("x-tei-whole")))
        number = len(begun)
        for _ in requests:
            yield reply(number)
            if number == 1:
                call.set_trailing_metadata(((CODE_KEY, "REPLACED"),))
                call.abort(grpc.StatusCode.ALREADY_EXISTS, "it was replaced")

    faked.multiplexer.answers[rpc] = answer
    given = faked.post(path, body)
    assert given.status_code == 200, given.text
    assert [expected(each) for each in given.json()] == [2, 2]
    assert begun == ["yes", "yes"]
