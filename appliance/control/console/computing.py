"""Calls of the playground, to the multiplexer's socket in the data folder: the console has authorized who asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import grpc

from appliance.core.problems import Kind, Problem
from appliance.node.context import Node
from appliance.wire.envelope import CACHE_KEY, FINGERPRINT_KEY, SCOPE_KEY
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub

TIMEOUT_SECS = 30.0
MOST_WORDS = 40  # of a sparse vector: those that weigh most


class TokenSeen(NamedTuple):
    id: int
    text: str
    is_special: bool


class Computing:
    """Of one request, with one deadline. cached, fingerprint: what the replies said of these. tokens: computed for it.

    who: asks, for whom the cache may have entries of their own.
    """

    def __init__(self, node: Node, who: str) -> None:
        self.until = time.monotonic() + TIMEOUT_SECS
        self.metadata = ((SCOPE_KEY, quote(who)),) if node.settings.cache.scope == "key" else ()
        self.channel = grpc.insecure_channel(f"unix:{node.layout.multiplexer_socket(0)}")
        self.stub = TeiMultiplexerStub(self.channel)
        self.cached = self.fingerprint = ""
        self.tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.channel.close()

    def embed(self, name: str, texts: Sequence[str]) -> Any:
        """[texts, numbers], float32."""
        import numpy as np  # only now, as grpc

        requests = (
            mux.EmbedRequest(target=target(name), request=tei.EmbedRequest(inputs=text, truncate=True, normalize=True))
            for text in texts
        )

        def replies() -> list[Any]:
            call = self.stub.EmbedStream(requests, **self.options)
            self.note(call.initial_metadata())
            return list(call)

        found = asked(replies)
        self.tokens = sum(each.metadata.compute_tokens for each in found)
        return np.array([np.asarray(each.embeddings, np.float32) for each in found])

    def rerank(self, name: str, query: str, texts: Sequence[str]) -> list[tuple[int, float]]:
        """Every text's index and score, best first, also of more than a replica takes at once."""
        requests = (
            mux.RerankStreamRequest(
                target=target(name), request=tei.RerankStreamRequest(query=query, text=text, truncate=True)
            )
            for text in texts
        )
        ranks = asked(lambda: self.stub.RerankStream(requests, **self.options)).ranks
        return sorted(((each.index, each.score) for each in ranks), key=lambda rank: -rank[1])

    def sparse(self, name: str, text: str) -> list[tuple[str, float]]:
        """The words that weigh most."""
        inner = tei.EmbedSparseRequest(inputs=text, truncate=True)
        request = mux.EmbedSparseRequest(target=target(name), request=inner)
        found = asked(lambda: self.stub.EmbedSparse(request, **self.options)).sparse_embeddings
        most = sorted(found, key=lambda each: -each.value)[:MOST_WORDS]
        return [(self.word(name, each.index), each.value) for each in most]

    def word(self, name: str, token: int) -> str:
        request = mux.DecodeRequest(target=target(name), request=tei.DecodeRequest(ids=[token]))
        return str(asked(lambda: self.stub.Decode(request, **self.options)).text)

    def tokenize(self, name: str, text: str) -> list[TokenSeen]:
        inner = tei.EncodeRequest(inputs=text, add_special_tokens=True)
        request = mux.EncodeRequest(target=target(name), request=inner)
        found = asked(lambda: self.stub.Tokenize(request, **self.options)).tokens
        return [TokenSeen(each.id, each.text, each.special) for each in found]

    def longest(self, name: str) -> int:
        """Tokens of a text that are not cut off."""
        info = asked(lambda: self.stub.Info(mux.InfoRequest(target=target(name)), **self.options))
        return int(info.max_input_length)

    @property
    def options(self) -> dict[str, Any]:
        return {"timeout": max(0.01, self.until - time.monotonic()), "metadata": self.metadata}

    def note(self, metadata: Any) -> None:
        told = dict(metadata)
        self.cached, self.fingerprint = str(told.get(CACHE_KEY, "")), str(told.get(FINGERPRINT_KEY, ""))


def target(name: str) -> mux.Target:
    return mux.Target(instance_name=name)


def asked(call: Callable[[], Any]) -> Any:
    """What the call returns. Raises: Problem with the words of whoever refused it."""
    try:
        return call()
    except grpc.RpcError as error:
        raise Problem(Kind.UNAVAILABLE, "BACKEND_UNAVAILABLE", error.details() or error.code().name) from error
