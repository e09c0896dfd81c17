"""The appliance from outside, over its public REST and gRPC interfaces only."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any
from urllib.parse import quote

import grpc
import requests

from appliance.core.problems import Kind, Problem
from appliance.core.settings import Settings, address
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub

TIMEOUT_SECS = 120


class Control:
    """The REST API at ``url``. Every refusal becomes a Problem with the server's own words."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.session = requests.Session()
        self.session.trust_env = False  # a proxy of the environment has no business with a loopback port

    @classmethod
    def of(cls, settings: Settings) -> Control:
        return cls(f"http://{address(settings.bind, settings.api_port)}")

    def call(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        try:
            response = self.session.request(method, self.url + path, json=body, params=query, timeout=TIMEOUT_SECS)
        except requests.RequestException as error:
            raise Problem(
                Kind.UNAVAILABLE, "UNREACHABLE", f"No answer from {self.url}: is the appliance up? ({error})"
            ) from error
        if response.ok:
            return response.json()
        try:
            answer = response.json()
            raise Problem(Kind.INVALID, answer["code"], answer["error"])
        except (ValueError, KeyError):
            raise Problem(
                Kind.INTERNAL, "UNEXPECTED", f"{self.url} answered {response.status_code}: {response.text[:200]}"
            ) from None

    def instances(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call("GET", "/instances")
        return found

    def instance(self, name: str, verb: str = "", method: str = "GET") -> dict[str, Any]:
        found: dict[str, Any] = self.call(method, f"/instances/{quote(name, safe='')}{verb and '/' + verb}")
        return found

    def create(self, fields: dict[str, Any], dry_run: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = self.call("POST", "/instances", fields, **({"dry_run": "true"} if dry_run else {}))
        return found

    def models(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call("GET", "/models")
        return found

    def model(
        self, model_id: str, verb: str = "", method: str = "GET", body: Any = None, **query: str
    ) -> dict[str, Any]:
        path = f"/models/{quote(model_id, safe='')}{verb and '/' + verb}"
        found: dict[str, Any] = self.call(method, path, body, **query)
        return found

    def add_model(self, model_id: str, revision: str | None) -> dict[str, Any]:
        fields = {"model_id": model_id} | ({"revision": revision} if revision else {})
        found: dict[str, Any] = self.call("POST", "/models", fields)
        return found

    def logs(self, name: str, replica: int, start: int) -> list[str]:
        path = f"/instances/{quote(name, safe='')}/logs"
        found: list[str] = self.call("GET", path, replica=replica, start=start)["lines"]
        return found


class Multiplexer:
    """The gRPC endpoint at ``address``."""

    def __init__(self, address: str) -> None:
        self.stub: Any = TeiMultiplexerStub(grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)))

    def answers(self, instance: str) -> bool:
        """Whether a call for the instance reaches a replica right now."""
        try:
            self.stub.Info(mux.InfoRequest(target=mux.Target(instance_name=instance)), timeout=1)
        except grpc.RpcError:
            return False
        return True

    def embed(self, text: str, target: mux.Target) -> list[float]:
        """The vector of one text. Raises: Problem with the code and words of the refusal."""
        try:
            return list(self.stub.Embed(embed_request(text, target), timeout=TIMEOUT_SECS).embeddings)
        except grpc.RpcError as error:
            raise refused(error) from error

    def embed_all(self, texts: Sequence[str], target: mux.Target) -> Iterator[list[float]]:
        """The vectors of all texts, in order, as they come. Raises: Problem."""
        requests = (embed_request(text, target) for text in texts)
        try:
            for reply in self.stub.EmbedStream(requests):
                yield list(reply.embeddings)
        except grpc.RpcError as error:
            raise refused(error) from error

    def rerank(self, query: str, texts: Sequence[str], target: mux.Target) -> list[tuple[int, float]]:
        """(place in ``texts``, score), best first. Raises: Problem."""
        inner = tei.RerankRequest(query=query, texts=texts, truncate=True)
        try:
            found = self.stub.Rerank(mux.RerankRequest(target=target, request=inner), timeout=TIMEOUT_SECS)
        except grpc.RpcError as error:
            raise refused(error) from error
        return sorted(((rank.index, rank.score) for rank in found.ranks), key=lambda rank: -rank[1])


def embed_request(text: str, target: mux.Target) -> mux.EmbedRequest:
    return mux.EmbedRequest(target=target, request=tei.EmbedRequest(inputs=text, truncate=True, normalize=True))


def refused(error: Any) -> Problem:
    return Problem(Kind.UNAVAILABLE, error.code().name, f"{error.code().name}: {error.details()}")


def remote(run: Callable[[argparse.Namespace, Control], int]) -> Callable[[argparse.Namespace, Settings], int]:
    """A verb of the command line that asks the REST API, as one that takes the settings."""

    @wraps(run)
    def called(given: argparse.Namespace, settings: Settings) -> int:
        return run(given, Control.of(settings))

    return called
