"""Unary calls before which the cache stands: who waits with whom."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.core.cachekey import Fingerprint
from appliance.core.problems import Kind, Problem
from appliance.core.routing import Route, Table, Target
from appliance.drivers.purgefile import PurgeFile
from appliance.multiplexer.attempts import UnaryReply
from appliance.multiplexer.cached_calls import CachedCalls
from appliance.multiplexer.embedding_cache import EmbeddingCache
from appliance.multiplexer.metering import CallRecord
from appliance.node.fingerprints import Known
from appliance.wire.envelope import DO_NOT_WAIT, WAIT_KEY
from appliance.wire.methods import METHODS
from appliance.wire.tei.v1 import tei_pb2 as tei
from testing.stand_ins import EmptyStore

EMBED = next(method for method in METHODS if method.name == "Embed")
REQUEST = tei.EmbedRequest(inputs="x").SerializeToString()
NO_WAIT = ((WAIT_KEY, DO_NOT_WAIT),)


class Starting:
    """`Attempts` of an instance that starts until ``goes_on`` is set, and then does not come."""

    def __init__(self) -> None:
        self.waits, self.goes_on = Event(), Event()

    def unary(self, method: Any, target: Target, inner: bytes, context: Any, call: CallRecord) -> UnaryReply:
        if NO_WAIT[0] in context.invocation_metadata():
            raise Problem(Kind.UNAVAILABLE, "BACKEND_UNAVAILABLE", "it is starting")
        self.waits.set()
        assert self.goes_on.wait(20)
        raise Problem(Kind.UNAVAILABLE, "BACKEND_UNAVAILABLE", "it came too late")


class Caller:
    def __init__(self, *metadata: tuple[str, str]) -> None:
        self.metadata = metadata

    def invocation_metadata(self) -> Any:
        return self.metadata

    def is_active(self) -> bool:
        return True

    def add_callback(self, _: Any) -> bool:
        return True

    def time_remaining(self) -> float:
        return 20.0


@pytest.fixture
def starting() -> Starting:
    return Starting()


@pytest.fixture
def calls(tmp_path: Path, starting: Starting) -> Any:
    counter = SimpleNamespace(labels=lambda *_: SimpleNamespace(inc=lambda *_: None))
    meters: Any = SimpleNamespace(
        lookups=counter, joins=counter, reads=SimpleNamespace(observe=lambda _: None), saved=counter
    )
    directory = SimpleNamespace(table=Table((Route("one", "m", "running", ()),)), refresh=lambda: None)
    known = Known(Fingerprint((("files", "1"),)))
    watch: Any = SimpleNamespace(pool=SimpleNamespace(directory=directory), current=lambda _: known)
    store: Any = EmptyStore()
    cache = EmbeddingCache(watch, store, PurgeFile(tmp_path / "purges"), meters, lambda *_: None, 60, lambda _: "")
    attempts: Any = starting
    yield CachedCalls(attempts, cache)
    cache.stop()


def refusal(calls: CachedCalls, *metadata: tuple[str, str]) -> str:
    caller: Any = Caller(*metadata)
    with pytest.raises(Problem) as caught:
        calls.unary(EMBED, Target(instance_name="one"), REQUEST, caller, CallRecord())
    return caught.value.message


def test_who_does_not_want_to_wait_does_not_wait_with_another(calls: CachedCalls, starting: Starting) -> None:
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(refusal, calls)
        assert starting.waits.wait(20)
        began = time.monotonic()
        assert refusal(calls, *NO_WAIT) == "it is starting"
        assert time.monotonic() - began < 5
        starting.goes_on.set()
        assert patient.result() == "it came too late"
