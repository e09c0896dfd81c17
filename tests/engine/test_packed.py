"""`PackedEmbed`: the streams of `tei.v1.Embed` with several messages in one; answers and ends are the same. What makes
one message goes without a stream, and has all of its answers, or the status of the first that fails.
"""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

from appliance.wire import packing, vectors
from appliance.wire.envelope import LANE_KEY, SINGLE_LANE
from appliance.wire.tei.v1 import tei_pb2 as tei
from testing.engines import FAMILIES, Engine
from testing.texts import mixed_texts

pytestmark = pytest.mark.processes

CODES = grpc.StatusCode
PERMITS = 8
TEXTS = mixed_texts(70, seed=5)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    flags = ("--max-concurrent-requests", str(PERMITS))
    with Engine(tmp_path_factory.mktemp("packed"), FAMILIES / "bert-cls", *flags) as running:
        yield running


def request(text: str) -> bytes:
    raw: bytes = tei.EmbedRequest(inputs=text, truncate=True).SerializeToString()
    return raw


def ask(
    engine: Engine, messages: Iterable[bytes], method: str = "EmbedStream", metadata: Any = None
) -> Iterator[list[bytes]]:
    """The replies to each message, as they come."""
    call = engine.channel.stream_stream(f"/{packing.SERVICE}/{method}")(iter(messages), timeout=60, metadata=metadata)
    for raw in call:
        yield list(packing.unpack(raw))


def ask_once(engine: Engine, messages: Iterable[bytes], method: str = "Embed") -> list[bytes]:
    call = engine.channel.unary_unary(f"/{packing.SERVICE}/{method}")
    return list(packing.unpack(call(packing.pack(messages), timeout=60)))


def plain(engine: Engine, texts: Iterable[str]) -> list[np.ndarray]:
    requests = (tei.EmbedRequest.FromString(request(text)) for text in texts)
    replies = engine.stub("Embed").EmbedStream(requests, timeout=60)
    return [np.array(reply.embeddings, np.float32) for reply in replies]


def embeddings(parts: Iterable[list[bytes]]) -> list[np.ndarray]:
    return [vectors.unpack(raw)[0] for part in parts for raw in part]


@pytest.mark.parametrize("together", [1, 3, 32, len(TEXTS)])
def test_answers_are_those_of_the_plain_stream_also_with_fewer_permits_than_texts(
    engine: Engine, together: int
) -> None:
    parts = [TEXTS[at : at + together] for at in range(0, len(TEXTS), together)]
    found = list(ask(engine, [packing.pack(map(request, part)) for part in parts]))
    assert [len(part) for part in found] == [len(part) for part in parts]
    for vector, expected in zip(embeddings(found), plain(engine, TEXTS), strict=True):
        np.testing.assert_allclose(vector, expected, atol=1e-5)


def test_one_message_has_the_answers_of_the_plain_stream_also_with_fewer_permits_than_texts(engine: Engine) -> None:
    for vector, expected in zip(embeddings([ask_once(engine, map(request, TEXTS))]), plain(engine, TEXTS), strict=True):
        np.testing.assert_allclose(vector, expected, atol=1e-5)
    assert ask_once(engine, []) == []


@pytest.mark.parametrize("at", [0, 1, 4, 2 * PERMITS])
def test_a_text_that_is_refused_ends_the_whole_call_and_keeps_no_permit(engine: Engine, at: int) -> None:
    texts = [f"text {number}" for number in range(3 * PERMITS)]
    texts[at] = ""
    for _ in range(2 * PERMITS):
        with pytest.raises(grpc.RpcError) as caught:
            ask_once(engine, map(request, texts))
        assert (caught.value.code(), "cannot be empty" in caught.value.details()) == (CODES.INVALID_ARGUMENT, True)
    assert len(ask_once(engine, map(request, TEXTS))) == len(TEXTS)


def test_single_texts_that_come_together_do_not_wait_behind_a_batch(engine: Engine) -> None:
    """With their metadata they go to the threads of single texts."""
    single = ((LANE_KEY, SINGLE_LANE),)
    expected = plain(engine, TEXTS[:5])
    stop = threading.Event()

    def batch() -> None:
        while not stop.is_set():
            assert len(embeddings(ask(engine, [packing.pack(map(request, TEXTS))]))) == len(TEXTS)

    with ThreadPoolExecutor() as threads:
        running = threads.submit(batch)
        for _ in range(10):
            (part,) = ask(engine, [packing.pack(map(request, TEXTS[:5]))], metadata=single)
            for vector, wanted in zip(embeddings([part]), expected, strict=True):
                np.testing.assert_allclose(vector, wanted, atol=1e-5)
        stop.set()
        running.result()


def test_each_reply_tells_the_cost_of_its_text(engine: Engine) -> None:
    ((one, other),) = ask(engine, [packing.pack([request("a"), request("a longer text")])])
    counts = [tei.EmbedResponse.FromString(raw).metadata for raw in (one, other)]
    alone = [engine.stub("Embed").Embed(tei.EmbedRequest(inputs=text)).metadata for text in ("a", "a longer text")]
    assert [(each.compute_chars, each.compute_tokens) for each in counts] == [
        (each.compute_chars, each.compute_tokens) for each in alone
    ]


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_text_that_is_refused_ends_the_stream_behind_the_answers_before_it(engine: Engine, at: int) -> None:
    texts = ["a", "b", "c", "d", "e", "f"]
    texts[at] = ""
    answered: list[np.ndarray] = []

    def read_all() -> None:
        for part in ask(engine, [packing.pack(map(request, texts[:3])), packing.pack(map(request, texts[3:]))]):
            answered.extend(embeddings([part]))

    with pytest.raises(grpc.RpcError) as caught:
        read_all()
    assert (caught.value.code(), "cannot be empty" in caught.value.details()) == (CODES.INVALID_ARGUMENT, True)
    assert len(answered) == at
    for vector, expected in zip(answered, plain(engine, texts[:at]), strict=True):
        np.testing.assert_allclose(vector, expected, atol=1e-5)


@pytest.mark.parametrize("message", [b"\x0a\x7f", packing.pack([b"\x0a\x7f"])], ids=["outside", "inside"])
def test_what_is_no_message_is_refused(engine: Engine, message: bytes) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(ask(engine, [message]))
    assert caught.value.code() is CODES.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as caught:
        engine.channel.unary_unary(f"/{packing.SERVICE}/Embed")(message, timeout=60)
    assert caught.value.code() is CODES.INVALID_ARGUMENT


def test_an_empty_message_has_an_empty_answer(engine: Engine) -> None:
    assert [len(part) for part in ask(engine, [b"", packing.pack([request("a")]), b""])] == [0, 1, 0]


def test_callers_that_leave_give_all_permits_back(engine: Engine) -> None:
    for _ in range(3 * PERMITS):
        open_call: Any = engine.channel.stream_stream(f"/{packing.SERVICE}/EmbedStream")(
            iter([packing.pack(map(request, TEXTS))] * 3), timeout=60
        )
        next(open_call)
        open_call.cancel()
    for _ in range(3 * PERMITS):
        call = engine.channel.unary_unary(f"/{packing.SERVICE}/Embed").future(packing.pack(map(request, TEXTS)))
        call.cancel()
    found = embeddings(ask(engine, [packing.pack(map(request, TEXTS))]))
    assert len(found) == len(TEXTS)


def test_sparse_vectors_come_packed_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("sparse")
    with Engine(folder, FAMILIES / "bert-splade", "--pooling", "splade") as engine:
        texts = TEXTS[:5]
        messages = [tei.EmbedSparseRequest(inputs=text, truncate=True).SerializeToString() for text in texts]
        (part,) = ask(engine, [packing.pack(messages)], "EmbedSparseStream")
        packed, once = (
            [tei.EmbedSparseResponse.FromString(raw).sparse_embeddings for raw in replies]
            for replies in (part, ask_once(engine, messages, "EmbedSparse"))
        )
        for one, other in zip(packed, once, strict=True):  # computed beside other texts
            assert [each.index for each in one] == [each.index for each in other]
            np.testing.assert_allclose([each.value for each in one], [each.value for each in other], atol=1e-5)
        for raw, text in zip(part, texts, strict=True):
            expected = engine.stub("Embed").EmbedSparse(tei.EmbedSparseRequest(inputs=text, truncate=True))
            found = tei.EmbedSparseResponse.FromString(raw)
            assert [entry.index for entry in found.sparse_embeddings] == [
                entry.index for entry in expected.sparse_embeddings
            ]
