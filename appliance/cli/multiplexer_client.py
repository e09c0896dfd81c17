"""A client of the multiplexer's public gRPC interface."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import grpc

from appliance.cli.connection import Identity, reachable_host
from appliance.core.addresses import address
from appliance.core.problems import Kind, Problem, quoted
from appliance.core.settings import Settings
from appliance.wire.envelope import CACHE_KEY
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub

TIMEOUT_SECS = 120
COUNTS = re.compile(r"hits=(\d+), misses=(\d+)")  # metadata of a stream whose texts are cached


class RankedText(NamedTuple):
    """place: of the text among those that were ranked."""

    place: int
    score: float


class Label(NamedTuple):
    label: str
    score: float


class WarmCounts(NamedTuple):
    """Of the texts of a stream."""

    hits: int
    misses: int


class ApiKeyInterceptor(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]
    grpc.StreamUnaryClientInterceptor,  # type: ignore[misc]
    grpc.StreamStreamClientInterceptor,  # type: ignore[misc]
):
    """Adds the key to the metadata of each call."""

    def __init__(self, key: str) -> None:
        self.key = key

    def add_key(self, proceed: Any, details: Any, request: Any) -> Any:
        metadata = [*(details.metadata or ()), ("authorization", f"Bearer {self.key}")]
        return proceed(details._replace(metadata=metadata), request)

    intercept_unary_unary = intercept_stream_unary = intercept_stream_stream = add_key


class MultiplexerClient:
    """The gRPC endpoint at ``address``; ``unix:PATH`` is a socket in the data folder, which takes no identity."""

    def __init__(self, address: str, identity: Identity | None = None) -> None:
        # Each channel has subchannels of its own: a shared one would make it wait in another channel's back-off.
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        if identity and identity.ca:
            security = identity.channel_security()
            channel = grpc.secure_channel(address, security.credentials, options=[*options, *security.options])
        else:
            channel = grpc.insecure_channel(address, options=options)
        if identity and identity.key:
            channel = grpc.intercept_channel(channel, ApiKeyInterceptor(identity.key))
        self.channel = channel
        self.stub: Any = TeiMultiplexerStub(channel)

    @classmethod
    def from_settings(cls, settings: Settings, identity: Identity | None = None) -> MultiplexerClient:
        endpoint = address(reachable_host(settings.bind), settings.grpc_port)
        return cls(endpoint, identity or Identity.from_environment(settings))

    def __enter__(self) -> MultiplexerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def answers(self, instance: str) -> bool:
        """Whether a call for the instance reaches a replica right now."""
        try:
            self.stub.Info(mux.InfoRequest(target=mux.Target(instance_name=instance)), timeout=1)
        except grpc.RpcError:
            return False
        return True

    def call(self, method: str, request: Any) -> Any:
        """The one reply of an RPC to its request, or its requests. Raises: Problem with code and words of a refusal."""
        try:
            return getattr(self.stub, method)(request, timeout=TIMEOUT_SECS)
        except grpc.RpcError as error:
            raise problem_from_rpc(error) from error

    def info(self, target: mux.Target) -> tei.InfoResponse:
        """Raises: Problem."""
        return self.call("Info", mux.InfoRequest(target=target))

    def predict(self, text: str, target: mux.Target) -> list[Label]:
        """The labels of a text, best first. Raises: Problem."""
        inner = tei.PredictRequest(inputs=text, truncate=True)
        reply = self.call("Predict", mux.PredictRequest(target=target, request=inner))
        labels = [Label(each.label, each.score) for each in reply.predictions]
        return sorted(labels, key=lambda each: -each.score)

    def count_sparse(self, text: str, target: mux.Target) -> int:
        """How many tokens of the vocabulary a text has a weight for. Raises: Problem."""
        inner = tei.EmbedSparseRequest(inputs=text, truncate=True)
        return len(self.call("EmbedSparse", mux.EmbedSparseRequest(target=target, request=inner)).sparse_embeddings)

    def count_tokens(self, text: str, target: mux.Target) -> int:
        """How many token vectors a text has. Raises: Problem."""
        inner = tei.EmbedAllRequest(inputs=text, truncate=True)
        return len(self.call("EmbedAll", mux.EmbedAllRequest(target=target, request=inner)).token_embeddings)

    def embed(self, text: str, target: mux.Target) -> list[float]:
        """The vector of one text. Raises: Problem."""
        return list(self.call("Embed", embed_request(text, target)).embeddings)

    def embed_all(self, texts: Sequence[str], target: mux.Target) -> Iterator[list[float]]:
        """The vectors of all texts, in order, as they come. Raises: Problem."""
        requests = (embed_request(text, target) for text in texts)
        try:
            for reply in self.stub.EmbedStream(requests):
                yield list(reply.embeddings)
        except grpc.RpcError as error:
            raise problem_from_rpc(error) from error

    def warm(self, texts: Sequence[str], target: mux.Target) -> WarmCounts:
        """Embed texts for the cache alone. Raises: Problem, NOT_CACHED where nothing of the target is kept."""
        call = self.stub.EmbedStream(embed_request(text, target) for text in texts)
        try:
            for _ in call:
                pass
        except grpc.RpcError as error:
            raise problem_from_rpc(error) from error
        counts = COUNTS.fullmatch(dict(call.trailing_metadata() or ()).get(CACHE_KEY, ""))
        if counts is None:
            words = f"Nothing of {quoted(target.instance_name)} is cached: `appliance cache status` says why"
            raise Problem(Kind.PRECONDITION, "NOT_CACHED", words)
        return WarmCounts(int(counts[1]), int(counts[2]))

    def rerank(self, query: str, texts: Sequence[str], target: mux.Target) -> list[RankedText]:
        """All texts, best first. Raises: Problem."""
        reply = self.call("RerankStream", rerank_requests(query, texts, target))
        return sorted((RankedText(rank.index, rank.score) for rank in reply.ranks), key=lambda rank: -rank.score)


def embed_request(text: str, target: mux.Target) -> mux.EmbedRequest:
    return mux.EmbedRequest(target=target, request=tei.EmbedRequest(inputs=text, truncate=True, normalize=True))


def rerank_requests(query: str, texts: Sequence[str], target: mux.Target) -> Iterator[mux.RerankStreamRequest]:
    """Of one ranking, one for each text: in one message they could be more than a replica takes at once."""
    for text in texts:
        inner = tei.RerankStreamRequest(query=query, text=text, truncate=True)
        yield mux.RerankStreamRequest(target=target, request=inner)


def problem_from_rpc(error: Any) -> Problem:
    return Problem(Kind.UNAVAILABLE, error.code().name, f"{error.code().name}: {error.details()}")
