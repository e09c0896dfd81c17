"""What the demonstration asks of the gateway, what it makes of each refusal, and what it says of the cache."""

import socket

import numpy as np
import pytest

from examples.code_search.embedding import Gateway
from examples.code_search.problems import Busy, Problem
from examples.code_search.savings import Savings, Told, told
from testing.fake_gateway import WIDTH, FakeGateway


def test_vectors_come_in_the_order_of_the_texts(gateway: FakeGateway) -> None:
    client = Gateway(gateway.url + "/", "minilm", "reranker")
    one = [client.embed([text]).vectors[0] for text in ("a b", "c", "d e f")]
    reply = client.embed(["a b", "c", "d e f", "new"])
    assert reply.vectors.shape == (4, WIDTH)
    np.testing.assert_array_equal(reply.vectors[:3], one)
    assert reply.cache == "hits=3, misses=1"
    assert client.rerank("q", ["a", "bbb", "cc"]) == [1.0, 3.0, 2.0]


def test_a_busy_gateway_says_when_to_come_back(gateway: FakeGateway) -> None:
    gateway.plan = ["busy"]
    with pytest.raises(Busy, match="All replicas are full") as told:
        Gateway(gateway.url, "minilm").embed(["a"])
    assert told.value.seconds == 1.0


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("broken", r"refused \(500\): The model failed"),
        ("<html>", "is no gateway: '<html>'"),
        ('{"data": []}', "not as OpenAI's embeddings do"),
        ('{"data": [{"index": 0, "embedding": "AAAA"}]}', "not as OpenAI's embeddings do"),
        ('{"data": [{"index": 0, "embedding": "AADAfw=="}]}', "or some that are none"),  # one number, not a number
        ('{"data": [{"index": 0, "embedding": "AAAA8A=="}, {"index": 1, "embedding": ""}]}', "gave 2 vectors for 1"),
    ],
)
def test_what_is_no_answer_is_told_and_not_indexed(gateway: FakeGateway, reply: str, said: str) -> None:
    gateway.plan = [reply]
    with pytest.raises(Problem, match=said):
        Gateway(gateway.url, "minilm").embed(["a"])


def test_an_unknown_model_and_an_absent_gateway_are_told(gateway: FakeGateway) -> None:
    with pytest.raises(Problem, match="no such model: There is no other; there are minilm"):
        Gateway(gateway.url, "other").embed(["a"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(Problem, match="No gateway answers at"):
            Gateway(f"http://127.0.0.1:{free.getsockname()[1]}", "minilm").embed(["a"])


@pytest.mark.parametrize(
    ("header", "texts", "found"),
    [
        ("hit", 1, Told(1, 0)),
        ("miss", 1, Told(0, 1)),
        ("hits=12, misses=20", 32, Told(12, 20)),
        ("misses=3", 3, Told(0, 3)),
        ("bypass", 1, None),
        ("", 4, None),
        (None, 4, None),
    ],
)
def test_the_header_of_the_cache(header: str | None, texts: int, found: Told | None) -> None:
    assert told(header, texts) == found


def test_what_the_cache_saved() -> None:
    """hits x seconds of a computed text - what the hits took."""
    savings = Savings()
    assert savings.saved(savings.seconds_per_text) == 0.0
    savings.add(10, "hits=0, misses=10", 2.0)  # 0.2 s each
    assert savings.seconds_per_text == pytest.approx(0.2)
    savings.add(20, "hits=20, misses=0", 0.5)
    savings.add(8, "hits=4, misses=4", 0.9)  # the four misses took 0.8 of it
    assert (savings.hits, savings.misses) == (24, 14)
    assert savings.saved(savings.seconds_per_text) == pytest.approx(24 * 0.2 - 0.5 - 0.1)
    savings.add(5, None, 9.0)
    savings.add(5, "bypass", 9.0)
    assert (savings.hits, savings.misses, savings.asked) == (24, 14, 48)
    assert savings.saved(0.2) == pytest.approx(24 * 0.2 - 0.5 - 0.1)


def test_without_a_measure_nothing_is_claimed() -> None:
    savings = Savings()
    savings.add(20, "hits=20, misses=0", 0.5)
    assert savings.seconds_per_text is None
    assert savings.saved(None) is None
