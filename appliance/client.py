"""The appliance from outside, over its public REST and gRPC interfaces only."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import grpc
import requests

from appliance.core.problems import Kind, Problem
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

    def create(self, fields: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self.call("POST", "/instances", fields)
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
        request = mux.EmbedRequest(target=target, request=tei.EmbedRequest(inputs=text, truncate=True, normalize=True))
        try:
            return list(self.stub.Embed(request, timeout=TIMEOUT_SECS).embeddings)
        except grpc.RpcError as error:
            raise Problem(Kind.UNAVAILABLE, error.code().name, f"{error.code().name}: {error.details()}") from error
