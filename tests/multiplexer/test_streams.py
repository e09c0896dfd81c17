"""A stream whose target comes to name another instance ends: its vectors are of the instances of its first message."""

import queue
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from appliance.core.cachekey import Fingerprint, Task
from appliance.core.problems import Kind, Problem
from appliance.core.routing import Replica, Route, Table, Target, candidates, generations_of
from appliance.drivers.memory import Reserve
from appliance.drivers.purgefile import PurgeFile
from appliance.multiplexer.cached_streams import CachedStream, StreamReader, Unwrapped
from appliance.multiplexer.caller import metadata_for_replica
from appliance.multiplexer.embedding_cache import EmbeddingCache, Mode
from appliance.multiplexer.metering import CallRecord
from appliance.multiplexer.resend_buffer import ResendBuffer
from appliance.multiplexer.streams import Streams
from appliance.multiplexer.whole_stream import WholeStream, digest_of
from appliance.node.fingerprints import Known
from appliance.wire.calls import CallFailed, Code, Status
from appliance.wire.methods import METHODS
from appliance.wire.tei.v1 import tei_pb2 as tei
from testing.running import eventually
from testing.stand_ins import EmptyStore

EMBED_STREAM = next(method for method in METHODS if method.name == "EmbedStream")
CODES = {"a": 1.0, "b": 2.0}  # what each instance answers


def route(name: str, model: str = "m", aliases: tuple[str, ...] = ()) -> Route:
    return Route(name, model, "running", (Replica(name, 0, f"{name}:1", model, 1, 64),), aliases=aliases)


# A target, the instances of before, and those of afterwards.
CHANGES = {
    "index": (Target(instance_index=0), [route("b")], [route("a"), route("b")]),
    "alias": (Target(model_id="x"), [route("a", aliases=("x",)), route("b")], [route("a"), route("b", aliases=("x",))]),
    "model": (Target(model_id="m"), [route("b")], [route("a", "other", aliases=("m",)), route("b")]),
}


class Caller:
    """metadata: of its request; headers: what it got before the first reply."""

    def __init__(self, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self.metadata = metadata
        self.headers: Any = None

    def invocation_metadata(self) -> Any:
        return self.metadata

    def is_active(self) -> bool:
        return True

    def add_callback(self, _: Any) -> bool:
        return True

    def time_remaining(self) -> None:
        return None

    def send_initial_metadata(self, headers: Any) -> None:
        assert self.headers is None, "once"
        self.headers = headers

    def set_trailing_metadata(self, _: Any) -> None:
        pass

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise AssertionError(details)


class Replicas(Streams):
    """Streams to replicas that are held in memory. Each answers with a number of its own, and goes away after one
    answer once ``dies`` is set."""

    def __init__(self, routes: list[Route]) -> None:
        self.table = Table(tuple(routes))
        self.dies = False
        self.connections = SimpleNamespace(drop_idle=lambda replica: None)
        pool: Any = self
        attempts: Any = SimpleNamespace(
            pool=pool,
            pick_waiting=lambda target, _: self.pick(target),
            pick_other_waiting=lambda target, *_, **__: self.pick(target),
            waits_until=lambda _: float("inf"),
            is_innocent=lambda *_: True,
        )
        super().__init__(attempts, 0)

    def pick(self, target: Target) -> Any:
        replica = candidates(self.table, target)[0]
        return SimpleNamespace(replica=replica, is_cut=False, is_proved=lambda: True)

    def generations(self, target: Target) -> tuple[tuple[str, int], ...]:
        return generations_of(self.table, target)

    def one_call(self, method: Any, backend: Any, buffer: ResendBuffer, context: Any) -> Iterator[bytes]:
        while buffer.unread or buffer.read_one():
            buffer.unread.popleft()
            buffer.backend = backend
            yield tei.EmbedResponse(embeddings=[CODES[backend.replica.instance]]).SerializeToString()
            buffer.answered += 1
            if self.dies:
                raise CallFailed(Status(Code.UNAVAILABLE, "Socket closed"), answered=False, begun=False)


def vector(reply: bytes) -> list[float]:
    return list(tei.EmbedResponse.FromString(reply).embeddings)


@pytest.mark.parametrize(("target", "before", "after"), CHANGES.values(), ids=CHANGES.keys())
def test_a_stream_is_not_answered_by_another_instance_when_a_replica_goes(
    target: Target, before: list[Route], after: list[Route]
) -> None:
    """The rest of it had vectors of another model."""
    streams, caller = Replicas(before), Caller()
    first, second = sorted(CODES, key=lambda name: name != candidates(streams.table, target)[0].instance)
    requests = iter([tei.EmbedRequest(inputs=text).SerializeToString() for text in "xyz"])
    context: Any = caller
    with Reserve(2**30).reservation() as reservation:
        buffer = ResendBuffer(EMBED_STREAM, Unwrapped(target), requests, context, reservation, WholeStream(context))
        replies = streams.replies(EMBED_STREAM, buffer, context)
        assert vector(next(replies)) == [CODES[first]]
        streams.table, streams.dies = Table(tuple(after)), True
        with pytest.raises(Problem, match=f'names "{second}" now, another one answered so far') as refused:
            next(replies)
        assert refused.value.code == "REPLACED"


def test_a_stream_goes_on_at_the_other_instance_of_its_model() -> None:
    streams, context = Replicas([route("a"), route("b")]), Caller()
    requests = iter([tei.EmbedRequest(inputs=text).SerializeToString() for text in "xy"])
    caller: Any = context
    with Reserve(2**30).reservation() as reservation:
        whole, target = WholeStream(caller), Target(model_id="m")
        buffer = ResendBuffer(EMBED_STREAM, Unwrapped(target), requests, caller, reservation, whole)
        replies = streams.replies(EMBED_STREAM, buffer, caller)
        assert vector(next(replies)) == [1.0]
        streams.table, streams.dies = Table((route("b"),)), True
        assert vector(next(replies)) == [2.0]


WHOLE = {"any": "yes", "of the beginning": digest_of((("a", 1),))}


@pytest.mark.parametrize("said", WHOLE.values(), ids=WHOLE.keys())
def test_a_stream_whose_replies_belong_together_ends_where_the_instance_is_another_generation(said: str) -> None:
    """Another replica of the next generation gave the rest."""
    one, two = route("a"), replace(route("a"), generation=2)
    streams, context = Replicas([one]), Caller((("x-tei-whole", said),))
    caller: Any = context
    requests = iter([tei.EmbedRequest(inputs=text).SerializeToString() for text in "xyz"])
    with Reserve(2**30).reservation() as reservation:
        whole, target = WholeStream(caller, [("x-tei-cache", "bypass")]), Target(instance_name="a")
        buffer = ResendBuffer(EMBED_STREAM, Unwrapped(target), requests, caller, reservation, whole)
        replies = streams.replies(EMBED_STREAM, buffer, caller)
        streams.dies = True
        assert [vector(next(replies)) for _ in range(2)] == [[1.0]] * 2  # of two replicas
        assert context.headers == [("x-tei-cache", "bypass"), ("x-tei-generations", digest_of((("a", 1),)))]
        streams.table = Table((two,))
        with pytest.raises(Problem, match="was replaced") as refused:
            next(replies)
        assert refused.value.code == "REPLACED"


def test_the_rest_of_a_stream_is_not_answered_by_another_generation() -> None:
    streams, context = Replicas([replace(route("a"), generation=2)]), Caller((("x-tei-whole", digest_of((("a", 1),))),))
    caller: Any = context
    with Reserve(2**30).reservation() as reservation:
        whole, target = WholeStream(caller), Target(instance_name="a")
        buffer = ResendBuffer(EMBED_STREAM, Unwrapped(target), iter([b""]), caller, reservation, whole)
        with pytest.raises(Problem, match="was replaced"):
            next(streams.replies(EMBED_STREAM, buffer, caller))
    assert context.headers is None


def test_of_an_instance_elsewhere_no_generation_is_told() -> None:
    """Its number is not known here, and another one at the peer."""
    caller = Caller((("x-tei-whole", "yes"),))
    context: Any = caller
    whole = WholeStream(context, [("x-tei-cache", "bypass")])
    for _ in range(2):
        whole.begin(Target(instance_name="far"), (("far", 0),))
    assert caller.headers == [("x-tei-cache", "bypass")]
    assert metadata_for_replica(context, None, is_peer=True) == [("x-tei-whole", "yes")]
    assert metadata_for_replica(context, None, is_peer=False) == []
    context = Caller((("x-tei-whole", digest_of((("a", 1),))),))
    assert metadata_for_replica(context, None, is_peer=True) == [("x-tei-whole", "yes")]


@pytest.mark.parametrize("said", ["no", "", "YES", "a=1", "0" * 31])
def test_what_a_stream_cannot_ask_for_is_refused(said: str) -> None:
    context: Any = Caller((("x-tei-whole", said),))
    with pytest.raises(Problem, match="x-tei-whole is yes, or what x-tei-generations was"):
        WholeStream(context)


@pytest.fixture
def cache(tmp_path: Any) -> Iterator[EmbeddingCache]:
    counter = SimpleNamespace(labels=lambda *_: SimpleNamespace(inc=lambda *_: None))
    meters: Any = SimpleNamespace(lookups=counter, reads=SimpleNamespace(observe=lambda _: None), saved=counter)
    watch: Any = SimpleNamespace(
        pool=SimpleNamespace(directory=None),
        current=lambda route: Known(Fingerprint((("files", route.name),))),
        of_replica=lambda replica: Fingerprint((("files", replica.instance),)).digest,
    )
    store: Any = EmptyStore()
    made = EmbeddingCache(watch, store, PurgeFile(tmp_path / "purges"), meters, lambda *_: None, 60, lambda _: "")
    yield made
    made.stop()


@pytest.mark.parametrize(("target", "before", "after"), CHANGES.values(), ids=CHANGES.keys())
def test_a_stream_is_not_answered_by_another_instance_after_a_pause(
    cache: EmbeddingCache, target: Target, before: list[Route], after: list[Route]
) -> None:
    """The stream to the replicas ends while nothing is asked, and the next one began at whom the target named then."""
    streams, context = Replicas(before), Caller()
    watch: Any = cache.watch
    watch.pool.directory = streams  # its table
    caller: Any = context
    asked = queue.SimpleQueue[bytes | None]()
    request = tei.EmbedRequest(inputs="x").SerializeToString()
    with Reserve(2**30).reservation() as reservation:
        plan = cache.plan_for((before[0],), Mode.USE, "")._replace(target=target)
        addressing = Unwrapped(target)
        reader = StreamReader(Task.DENSE, cache, plan, addressing, target, iter(asked.get, None), reservation)
        stream = CachedStream(
            streams, EMBED_STREAM, reader, caller, reservation, CallRecord(), generations_of(streams.table, target)
        )
        reader.begin(request)
        assert len(vector(stream.miss(reader.slots.get(timeout=10).key))) == 1  # type: ignore[union-attr]
        eventually(reader.slots.empty)
        assert reader.end_uncached()
        stream.end_computed()
        stream.computed = None
        streams.table = Table(tuple(after))
        asked.put(request)
        slot = reader.slots.get(timeout=10)
        assert slot
        with pytest.raises(Problem, match="another one answered so far"):
            stream.miss(slot.key)
        asked.put(None)
        stream.close()


@pytest.mark.parametrize("kind", [Kind.TIMEOUT, Kind.UNAVAILABLE])
def test_a_stream_goes_on_though_its_replica_hangs_or_goes_after_its_last_answer(
    cache: EmbeddingCache, kind: Kind
) -> None:
    streams, context = Replicas([route("a")]), Caller()
    caller: Any = context
    plan = cache.plan_for((route("a"),), Mode.USE, "")
    with Reserve(2**30).reservation() as reservation:
        target = Target(instance_name="a")
        reader = StreamReader(Task.DENSE, cache, plan, Unwrapped(target), target, iter(()), reservation)
        stream = CachedStream(streams, EMBED_STREAM, reader, caller, reservation, CallRecord(), ())
        stream.computed = (raised(problem) for problem in [Problem(kind, "CODE", "words")])
        stream.end_computed()
        stream.computed = (raised(problem) for problem in [Problem(Kind.INTERNAL, "CODE", "words")])
        with pytest.raises(Problem):
            stream.end_computed()


def raised(problem: Problem) -> bytes:
    raise problem
