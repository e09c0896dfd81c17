"""What is known of the fingerprints of replicas, also of those that were replaced."""

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
