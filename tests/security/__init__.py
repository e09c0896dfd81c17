"""An appliance that asks who one is, the way to it, and the routes and RPCs that its own code says it has."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import falcon
import grpc
import requests
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from appliance.cli.multiplexer_client import ApiKeyInterceptor
from appliance.control.app import rest_app as control_app
from appliance.gateway.app import create_app as gateway_app
from appliance.wire.tei.v1 import tei_pb2
from appliance.wire.tei_appliance.v1 import directory_pb2, engine_pb2
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub
from testing.certificates import Authority, Issued
from testing.running import SEED, RunningAppliance

VERBS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


@dataclass(frozen=True)
class Caller:
    """Who calls: an API key, and for TLS whom he trusts and what he shows."""

    key: str = ""
    trusts: Authority | None = None
    shows: Issued | None = None

    @property
    def environ(self) -> dict[str, str]:
        """As the command line takes it."""
        found = {"TEI_APPLIANCE_KEY": self.key} if self.key else {}
        if self.trusts:
            found["TEI_APPLIANCE_CA"] = str(self.trusts.pem)
        if self.shows:
            found |= {"TEI_APPLIANCE_CERT": str(self.shows.chain), "TEI_APPLIANCE_CERT_KEY": str(self.shows.key_path)}
        return found


class Secured(RunningAppliance):
    """Called by ``caller``, who is known to nothing but the requests: the appliance is started without him."""

    def __init__(
        self,
        folder: Path,
        settings: str,
        caller: Caller,
        seeds: str = SEED,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder, seeds, settings, dict(environ or {}))
        self.caller = caller
        self.sessions: dict[Caller, requests.Session] = {}
        self.url = f"{'https' if caller.trusts else 'http'}://127.0.0.1:{self.api_port}"
        self.gateway_url = self.url.replace(str(self.api_port), str(self.http_port))

    def __enter__(self) -> Secured:
        super().__enter__()
        return self

    def call(self, verb: str, url: str, caller: Caller | None = None, **options: Any) -> requests.Response:
        """Over the connections that this caller has already."""
        caller = caller or self.caller
        if caller not in self.sessions:
            self.sessions[caller] = session = requests.Session()
            session.trust_env = False
            if caller.key:
                session.headers["Authorization"] = f"Bearer {caller.key}"
            if caller.trusts:
                session.verify = str(caller.trusts.pem)
            if caller.shows:
                session.cert = (str(caller.shows.chain), str(caller.shows.key_path))
        return self.sessions[caller].request(verb, url, timeout=60, **options)

    def stop(self, number: int = signal.SIGINT) -> int:
        for session in self.sessions.values():
            session.close()
        self.sessions.clear()
        return super().stop(number)

    def get(self, path: str, **query: Any) -> requests.Response:
        return self.call("GET", self.url + path, params=query)

    def post(self, path: str, body: Any = None, **options: Any) -> requests.Response:
        return self.call("POST", self.url + path, json=body, **options)

    def delete(self, path: str) -> requests.Response:
        return self.call("DELETE", self.url + path)

    def channel(self, caller: Caller | None = None) -> grpc.Channel:
        caller = caller or self.caller
        where, options = f"127.0.0.1:{self.grpc_port}", [("grpc.use_local_subchannel_pool", 1)]
        if caller.trusts is None:
            channel = grpc.insecure_channel(where, options)
        else:
            own = (caller.shows.key_path.read_bytes(), caller.shows.chain.read_bytes()) if caller.shows else (None,) * 2
            credentials = grpc.ssl_channel_credentials(caller.trusts.pem.read_bytes(), *own)
            channel = grpc.secure_channel(where, credentials, options)
        return grpc.intercept_channel(channel, ApiKeyInterceptor(caller.key)) if caller.key else channel

    def stub(self) -> Any:
        return TeiMultiplexerStub(self.channel())

    def cli(
        self, *arguments: str, timeout: float = 60, caller: Caller | None = None
    ) -> subprocess.CompletedProcess[str]:
        environ = {**self.environ, **(caller or self.caller).environ}
        return subprocess.run(self.command(*arguments), env=environ, capture_output=True, text=True, timeout=timeout)

    def key(self, name: str, role: str) -> str:
        """A new key, made as a user makes it."""
        made = self.cli("keys", "create", name, role)
        assert made.returncode == 0, made.stderr
        return made.stdout.strip()


def nobody(caller: Caller) -> Caller:
    """Who trusts whom ``caller`` trusts, and says nothing of himself."""
    return replace(caller, key="", shows=None)


@dataclass(frozen=True)
class Route:
    """One template and verb of a Falcon router. ``served``: whether the resource has a responder for it."""

    listener: str
    verb: str
    template: str
    served: bool

    @property
    def path(self) -> str:
        """One that matches, of things that do not exist."""
        return self.template.replace("{model:path}", "none").replace("{model_id}", "none").replace("{name}", "none")

    def __str__(self) -> str:
        return f"{self.listener} {self.verb} {self.template}"


def routes() -> list[Route]:
    """Of the management API and of the gateway: every template with every verb."""
    nothing: Any = _Anything()
    apps = {"rest": control_app(nothing, nothing), "gateway": gateway_app(nothing)}
    return [route for listener, app in apps.items() for route in routes_of(listener, router_of(app))]


def router_of(app: Any) -> Any:
    """Of the app, also when it is wrapped in functions."""
    while not isinstance(app, falcon.App):
        app = next(cell.cell_contents for cell in app.__closure__ if callable(cell.cell_contents))
    return cast(Any, app)._router


def routes_of(listener: str, router: Any) -> Iterator[Route]:
    waiting = list(router._roots)
    while waiting:
        node = waiting.pop()
        waiting += node.children
        if node.resource is None:
            continue
        for verb in VERBS:
            served = hasattr(node.resource, f"on_{verb.lower()}") or verb == "OPTIONS"  # falcon's own
            yield Route(listener, verb, node.uri_template, served)


class _Anything:
    """Stands for what a resource keeps and does not look at before it is asked."""

    def __getattr__(self, name: str) -> Any:
        return self


@dataclass(frozen=True)
class Rpc:
    service: str
    name: str
    asks_many: bool
    answers_many: bool

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"

    def __str__(self) -> str:
        return self.path


def rpcs() -> list[Rpc]:
    """Of every service that the port 9001 has, from the descriptors of the messages that it speaks."""
    files: list[FileDescriptor] = [
        tei_pb2.DESCRIPTOR,
        multiplexer_pb2.DESCRIPTOR,
        directory_pb2.DESCRIPTOR,
        engine_pb2.DESCRIPTOR,
        health_pb2.DESCRIPTOR,
        reflection_pb2.DESCRIPTOR,
    ]
    found = [
        Rpc(service.full_name, method.name, method.client_streaming, method.server_streaming)
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    ]
    reflection = next(rpc for rpc in found if "reflection.v1alpha" in rpc.service)
    return [*found, replace(reflection, service=reflection.service.replace("v1alpha", "v1"))]
