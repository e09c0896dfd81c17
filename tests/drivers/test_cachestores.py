"""One contract for every store of cached embeddings, asked of the real ones.

Qdrant's own library stands for it in a folder; a server is asked where QDRANT_URL names one (of tests alone: all of the
appliance's collections in it are deleted).
"""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.core.cachekey import HEADER, unpacked
from appliance.core.cachestore import Store
from appliance.drivers.redisstore import RedisStore
from appliance.drivers.sqlitestore import SqliteStore
from testing.cachestores import FINGERPRINT, MIB, begin, entry, key_of, qdrant, row, rows
from testing.redisserver import RedisServer
from testing.running import eventually

pytestmark = pytest.mark.processes

OTHER = "0123456789abcdef" * 2
EVER = 2**53
SECS = 20.0  # a deadline that no busy machine reaches: these tests are about values
KINDS = ["sqlite", "redis", "redis socket", "qdrant", *(["qdrant server"] if "QDRANT_URL" in os.environ else [])]
Opener = Callable[[], Store]


def no_damage(words: str) -> None:
    raise AssertionError(words)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture(params=KINDS)
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """What opens the store once more, at the same place, which is empty at first."""
    opened: list[Store] = []
    openers: dict[str, Opener] = {
        "sqlite": lambda: SqliteStore(tmp_path / "cache", 256 * MIB, no_damage),
        "redis": lambda: RedisStore(request.getfixturevalue("server").url(), SECS),
        "redis socket": lambda: RedisStore(request.getfixturevalue("server").socket_url, SECS),
        "qdrant": lambda: qdrant(str(tmp_path / "qdrant"), SECS),
        "qdrant server": lambda: qdrant(os.environ["QDRANT_URL"], SECS),
    }

    def opens() -> Store:
        opened.append(openers[request.param]())
        return opened[-1]

    yield opens
    for store in opened:
        store.close()
    if "server" in request.param or "redis" in request.param:
        last = openers[request.param]()
        last.purge("", 0, EVER)
        last.close()


@pytest.fixture
def store(opener: Opener) -> Store:
    return opener()


@pytest.fixture
def is_qdrant(request: pytest.FixtureRequest) -> bool:
    return "qdrant" in request.node.callspec.params["opener"]


@pytest.mark.parametrize("width", [1, 2, 3, 384, 1024, 4096])
def test_what_was_put_comes_back_bit_for_bit(store: Store, width: int) -> None:
    put = rows(f"bits-{width}", 20, width)
    numbers = np.resize(np.array([-0.0, 1.2e-38, 3.4e38, -3.4e38, 0.1, 1 / 3, 16777217, 0.0], "<f4"), width)
    put[key_of("edges")] = entry(key_of("edges"), numbers.tobytes())
    store.put_many(FINGERPRINT, put)
    got = store.get_many(FINGERPRINT, list(put))
    assert got == put
    assert all(unpacked(key, value).vector == put[key][HEADER.size :] for key, value in got.items())


@pytest.mark.parametrize("count", [1, 63, 64, 65, 3000])
def test_any_number_of_values_goes_in_one_call(store: Store, count: int, is_qdrant: bool) -> None:
    if is_qdrant and "QDRANT_URL" not in os.environ:  # the library takes milliseconds for each, a server does not
        count = min(count, 100)
    put = rows(f"count-{count}", count, 8)
    store.put_many(FINGERPRINT, put)
    assert store.get_many(FINGERPRINT, list(put)) == put


def test_large_values_go_in_one_call(store: Store, is_qdrant: bool) -> None:
    put = rows("large", 130 if is_qdrant else 600, 4096)  # more than one request takes
    store.put_many(FINGERPRINT, put)
    assert store.get_many(FINGERPRINT, list(put)) == put


def test_values_that_no_number_survives_are_kept_or_left_out_whole(store: Store, is_qdrant: bool) -> None:
    """Sparse answers begin with whole numbers, which are denormal as float32; there is no telling what others put."""
    words = np.array([1, 30521, 0x7F800001, 0xFFC12345, 0x7F800000, 0x00000001], "<u4")
    vectors = [words[:each].tobytes() for each in (1, 2, 3, 4, 5, 6)] + [b"abc", os.urandom(4096)]
    put = {key_of(f"odd-{n}"): entry(key_of(f"odd-{n}"), vector) for n, vector in enumerate(vectors)}
    store.put_many(FINGERPRINT, put)
    got = store.get_many(FINGERPRINT, list(put))
    assert got == ({} if is_qdrant else put)


def test_nothing_is_nothing(store: Store) -> None:
    assert store.get_many(FINGERPRINT, []) == {}
    assert store.get_many(FINGERPRINT, [key_of("nowhere")]) == {}
    store.put_many(FINGERPRINT, {})
    assert store.purge(FINGERPRINT, 0, EVER) == 0
    assert store.purge("", 0, EVER) == 0
    assert store.stats().entries in (0, None)


def test_missing_keys_are_absent_and_a_key_asked_twice_is_answered_once(store: Store) -> None:
    put = rows("there", 3)
    store.put_many(FINGERPRINT, put)
    asked = [key_of("not there"), *put, *put, key_of("nor this")]
    assert store.get_many(FINGERPRINT, asked) == put


def test_a_value_is_replaced(store: Store) -> None:
    (key, before), (_, after) = row("one", at_ms=1), row("one", at_ms=2)
    store.put_many(FINGERPRINT, {key: before})
    store.put_many(FINGERPRINT, {key: after})
    assert store.get_many(FINGERPRINT, [key]) == {key: after}


def test_fingerprints_are_apart(store: Store) -> None:
    (key, one), (_, two) = row("same key", at_ms=1), row("same key", at_ms=2)
    store.put_many(FINGERPRINT, {key: one})
    assert store.get_many(OTHER, [key]) == {}
    store.put_many(OTHER, {key: two})
    assert store.get_many(FINGERPRINT, [key]) == {key: one}
    assert store.purge(OTHER, 0, EVER) == 1
    assert store.get_many(FINGERPRINT, [key]) == {key: one}
    assert store.get_many(OTHER, [key]) == {}


def test_two_widths_live_in_one_fingerprint(store: Store) -> None:
    put = rows("narrow", 5, 3) | rows("wide", 5, 16)
    store.put_many(FINGERPRINT, put)
    assert store.get_many(FINGERPRINT, list(put)) == put


def test_a_purge_deletes_what_was_computed_in_that_time_and_counts_it(store: Store) -> None:
    put = {
        name: row(name, 8, at_ms) for name, at_ms in [("a", 999), ("b", 1000), ("c", 1500), ("d", 2000), ("e", 2001)]
    }
    for fingerprint in (FINGERPRINT, OTHER):
        store.put_many(fingerprint, dict(put.values()))
    keys = [key for key, _ in put.values()]
    assert store.purge(FINGERPRINT, 1000, 2000) == 3
    assert set(store.get_many(FINGERPRINT, keys)) == {put["a"][0], put["e"][0]}
    assert len(store.get_many(OTHER, keys)) == 5
    assert store.purge("", 0, 2000) == 1 + 4
    assert set(store.get_many(FINGERPRINT, keys)) == {put["e"][0]} == set(store.get_many(OTHER, keys))


def test_a_purge_of_all_leaves_nothing_and_what_comes_after_stays(store: Store, is_qdrant: bool) -> None:
    put = rows("all", 40 if is_qdrant else 1500, 8)
    for fingerprint in (FINGERPRINT, OTHER):
        store.put_many(fingerprint, put)
    assert store.purge("", 0, EVER) == 2 * len(put)
    assert store.get_many(FINGERPRINT, list(put)) == {} == store.get_many(OTHER, list(put))
    assert store.purge("", 0, EVER) == 0
    store.put_many(FINGERPRINT, put)
    assert store.get_many(FINGERPRINT, list(put)) == put


def test_a_purge_of_many_goes_on_to_the_end(store: Store, is_qdrant: bool) -> None:
    count = 100 if is_qdrant else 12_000
    put, kept = rows("old", count, 1, 5), rows("new", 10, 1, 6)
    store.put_many(FINGERPRINT, put | kept)
    assert store.purge(FINGERPRINT, 0, 5) == count
    assert store.get_many(FINGERPRINT, [*put, *kept]) == kept


def test_what_it_tells_of_itself(store: Store) -> None:
    store.put_many(FINGERPRINT, rows("told", 50, 64))
    told = store.stats()
    assert told.entries in (50, None)
    assert told.size is None or told.size > 50 * 64 * 4
    assert (told.refusal, store.evicted) == ("", 0)


@pytest.mark.parametrize("opener", [each for each in KINDS if each != "qdrant"], indirect=True)
def test_two_stores_at_one_place_see_each_others_values(opener: Opener, is_qdrant: bool) -> None:
    """Qdrant's library locks its folder."""
    one, two = opener(), opener()
    put = rows("seen", 5)
    assert two.get_many(FINGERPRINT, list(put)) == {}
    one.put_many(FINGERPRINT, put)
    eventually(lambda: two.get_many(FINGERPRINT, list(put)) == put)
    assert two.purge(FINGERPRINT, 0, EVER) == 5
    eventually(lambda: one.get_many(FINGERPRINT, list(put)) == {})


def test_what_was_put_outlives_the_store(opener: Opener) -> None:
    put = rows("kept", 5)
    first = opener()
    first.put_many(FINGERPRINT, put)
    first.close()
    assert opener().get_many(FINGERPRINT, list(put)) == put


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    writers = [begin("put", tmp_path / "cache", who, 10, 40) for who in ("one", "two")]
    assert [writer.communicate(timeout=100)[0].count("\n") for writer in writers] == [11, 11]
    put: dict[bytes, bytes] = {}
    for who, call in itertools.product(("one", "two"), range(10)):
        put |= rows(f"{who}-{call}", 40)
    assert SqliteStore(tmp_path / "cache", 256 * MIB, no_damage).get_many(FINGERPRINT, list(put)) == put


# -- a law: a store is a dictionary -----------------------------------------------------------------------------------

NAMES = st.sampled_from("abcdefgh")
PUT = st.tuples(st.just("put"), st.sets(NAMES), st.integers(0, 9))
PURGE = st.tuples(st.just("purge"), st.integers(0, 9), st.integers(0, 9))
FINGERPRINTS = (key_of(number).hex()[:32] for number in itertools.count())


@given(steps=st.lists(PUT | PURGE, max_size=8))
@settings(derandomize=True, deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_store_does_what_a_dictionary_does(store: Store, steps: list[tuple]) -> None:
    fingerprint = next(FINGERPRINTS)  # of each example: what one leaves is not in the way of the next
    model: dict[bytes, tuple[bytes, int]] = {}
    keys = [key_of(name) for name in "abcdefgh"]
    for what, first, second in steps:
        if what == "put":
            put = dict(row(name, 4, second) for name in first)
            store.put_many(fingerprint, put)
            model |= {key: (value, second) for key, value in put.items()}
        else:
            gone = {key for key, (_, at_ms) in model.items() if first <= at_ms <= second}
            assert store.purge(fingerprint, first, second) == len(gone)
            model = {key: value for key, value in model.items() if key not in gone}
        assert store.get_many(fingerprint, keys) == {key: value for key, (value, _) in model.items()}
