"""A caller that expects a fingerprint gets nothing of another one, whatever it asks: also where nothing is cached."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import pytest

from appliance.core.cachekey import Fingerprint
from appliance.core.problems import Problem
from appliance.core.routing import Replica, Route, Table, Target
from appliance.drivers.memory import Reserve
from appliance.drivers.purgefile import PurgeFile
from appliance.multiplexer.addressing import Wrapped
from appliance.multiplexer.attempts import UnaryReply
from appliance.multiplexer.batch_run import BatchJob
from appliance.multiplexer.cached_batches import CacheCounts, CachedBatch, CachedRunner
from appliance.multiplexer.cached_calls import CachedCalls
from appliance.multiplexer.cached_streams import CachedStreams, Unwrapped
from appliance.multiplexer.embedding_cache import EmbeddingCache
from appliance.multiplexer.hybrid import HybridHandler
from appliance.multiplexer.metering import CallRecord
from appliance.multiplexer.rerank import handler
from appliance.node.fingerprints import Known
from appliance.wire.envelope import EXPECT_KEY
from appliance.wire.methods import METHODS
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux

BY_NAME = {method.name: method for method in METHODS}
TARGET = Target(instance_name="one")
REPLICA = Replica("one", 0, "127.0.0.1:1", "m", 1, 64)
BEFORE, AFTER = (Known(Fingerprint((("files", files),))) for files in ("1", "2"))


class Ended(Exception):
    """How a call was ended."""


class Caller:
    """Expects the fingerprint of before."""

    def invocation_metadata(self) -> Any:
        return ((EXPECT_KEY, BEFORE.digest),)

    def add_callback(self, _: Any) -> bool:
        return True

    def is_active(self) -> bool:
        return True

    def time_remaining(self) -> float:
        return 20.0

    def set_trailing_metadata(self, _: Any) -> None:
        pass

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise Ended(f"{code.name}: {details}")


class Box:
    """One instance, whose files change under its processes while they compute, where ``changes`` is set. As `Relay`,
    `Attempts`, `Streams` and `BatchRunner`."""

    def __init__(self, folder: Path) -> None:
        self.known, self.changes = BEFORE, True
        self.table = Table((Route("one", "m", "running", (REPLICA,)),))
        self.directory = self.pool = self.attempts = self.runner = self
        self.metering = SimpleNamespace(counting=lambda *_: nullcontext(CallRecord()))
        self.reserve, self.stream_permit = Reserve(2**30), nullcontext
        watch: Any = self
        meters: Any = SimpleNamespace(lookups=SimpleNamespace(labels=lambda *_: None))
        self.cache = EmbeddingCache(watch, None, PurgeFile(folder / "p"), meters, lambda *_: None, 60, lambda _: "")
        attempts: Any = self
        self.cached = CachedCalls(attempts, self.cache)

    def current(self, route: Route) -> Known:
        return self.known

    def of_replica(self, replica: Replica) -> str | None:
        return self.known.digest

    def generations(self, target: Target) -> tuple[tuple[str, int], ...]:
        return (("one", 1),)

    def change(self) -> None:
        if self.changes:
            self.known = AFTER

    def unary(self, method: Any, target: Target, inner: bytes, context: Any, call: CallRecord) -> UnaryReply:
        call.instance = "one"
        if method.name != "Info":
            self.change()
        return UnaryReply(b"", [], (), REPLICA)

    def replies(self, method: Any, buffer: Any, context: Any) -> Iterator[bytes]:
        buffer.backend = SimpleNamespace(replica=REPLICA)
        self.change()
        yield b"a vector"

    def run(self, job: BatchJob) -> dict[int, Any]:
        self.change()
        return {}


def embed_all(box: Any, caller: Any) -> None:
    box.cached.unary(BY_NAME["EmbedAll"], TARGET, b"", caller, CallRecord())


def stream(box: Any, caller: Any) -> None:
    streams = CachedStreams(box, box.cache)
    with box.reserve.reservation() as reservation:
        method = BY_NAME["EmbedAllStream"]
        replies = streams.replies(method, Unwrapped(TARGET), iter([b""]), caller, reservation, CallRecord())
        assert list(replies) == [b"a vector"]


def hybrid(box: Any, caller: Any) -> None:
    legs = [
        mux.HybridLeg(target=mux.Target(instance_name="one"), output=output)
        for output in (mux.HYBRID_OUTPUT_DENSE, mux.HYBRID_OUTPUT_SPARSE)
    ]
    request = mux.HybridRequest(inputs="x", legs=legs)
    reply = HybridHandler(box, 2**20).handle(request.SerializeToString(), caller)
    assert mux.HybridResponse.FromString(reply).passes == 1


def rerank(box: Any, caller: Any) -> None:
    request = tei.RerankStreamRequest(query="q", text="x")
    message = mux.RerankStreamRequest(target=mux.Target(instance_name="one"), request=request).SerializeToString()
    handler(box, BY_NAME["RerankStream"], Wrapped()).stream_unary(iter([message]), caller)


def batch(box: Any, caller: Any) -> None:
    job = BatchJob(TARGET, "EmbedAll", "/", (), (), lambda *_: None, None, lambda: False, keep_failures=False)
    collector = SimpleNamespace(cost=1)
    CachedRunner(box, box.cache).run(CachedBatch(job, [b"x"], b"", collector), caller, CallRecord(), CacheCounts())


@pytest.mark.parametrize("call", [embed_all, stream, hybrid, rerank, batch])
def test_what_is_not_cached_is_not_answered_with_another_fingerprint_than_expected(
    tmp_path: Path, call: Callable[[Any, Any], None]
) -> None:
    """It was compared before the computation alone; the files may change, or a replacement take over, meanwhile."""
    box = Box(tmp_path)
    with pytest.raises((Problem, Ended), match="has another fingerprint than"):
        call(box, Caller())
    box.known, box.changes = BEFORE, False
    call(box, Caller())
