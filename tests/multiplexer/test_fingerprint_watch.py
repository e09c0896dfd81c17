"""What is known of the fingerprints of replicas, also of those that were replaced."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.core.cachekey import Fingerprint
from appliance.core.routing import Replica, Route
from appliance.multiplexer.fingerprint_watch import MOST_LAUNCHES, FingerprintWatch
from appliance.node.fingerprints import Known


def route(launch: int) -> Route:
    return Route("one", "m", "running", (Replica("one", 0, "127.0.0.1:1", "m", launch, 64),))


def known(route: Route) -> Known:
    """Another one for each launch; none for the fifth."""
    launch = route.replicas[0].launch
    return Known(None, "why") if launch == 5 else Known(Fingerprint((("files", str(launch)),)))


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> FingerprintWatch:
    pool: Any = SimpleNamespace(backends={})
    made = FingerprintWatch(pool, pool, print)
    monkeypatch.setattr(made, "known", known)
    return made


def test_a_replica_that_was_replaced_has_the_fingerprint_that_it_had(watch: FingerprintWatch) -> None:
    (old,), (new,) = route(1).replicas, route(2).replicas
    assert watch.of_replica(old) is None
    first = watch.current(route(1)).digest
    assert watch.of_replica(old) == first
    watch.look(route(2), ())
    watch.look(route(1), ())
    assert watch.of_replica(old) == first
    assert watch.of_replica(new) not in (first, None)
    watch.look(route(5), ())
    assert watch.of_replica(route(5).replicas[0]) is None


def test_few_launches_are_remembered_and_none_of_what_is_gone(watch: FingerprintWatch) -> None:
    for launch in range(100, 100 + 2 * MOST_LAUNCHES):
        watch.look(route(launch), ())
    assert len(watch.launches["one"]) == MOST_LAUNCHES
    assert watch.of_replica(route(99 + 2 * MOST_LAUNCHES).replicas[0])
    watch.keep_only(set())
    assert not watch.launches


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ({}, True),
        ({"model_id": "other"}, False),
        ({"generation": 2}, False),
        ({"space": (("pooling", "cls"),)}, False),
    ],
    ids=["its files", "another model", "another spec", "another pooling"],
)
def test_another_model_with_newer_files_is_no_change_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch, after: dict[str, Any], told: bool
) -> None:
    """What was cached of the one before was forgotten, for all instances that had it as well."""
    changes: list[str] = []
    pool: Any = SimpleNamespace(backends={})
    watch = FingerprintWatch(pool, pool, lambda digest, since_ms: changes.append(digest))
    first, second = (Fingerprint((("files", each),)) for each in "ab")
    monkeypatch.setattr(watch, "known", lambda route: Known(first, changed_ns=10**18))
    watch.look(route(1), ())
    monkeypatch.setattr(watch, "known", lambda route: Known(second, changed_ns=2 * 10**18))
    watch.look(replace(route(2), **after), ())
    assert changes == ([first.digest] if told else [])
