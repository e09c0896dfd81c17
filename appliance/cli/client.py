"""The appliance from outside, over its public REST and gRPC interfaces only.

Who one is comes from the environment, so that it is in no command line: TEI_APPLIANCE_KEY, an API key; and for TLS
TEI_APPLIANCE_CA, whom to trust (by default the very certificate that the configuration names, under whatever name),
TEI_APPLIANCE_CERT and TEI_APPLIANCE_CERT_KEY, a client certificate. Our side speaks TLS 1.3 at least.
"""

from __future__ import annotations

import argparse
import os
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import grpc
import requests
from requests.adapters import HTTPAdapter

from appliance.core.problems import Kind, Problem, invalid
from appliance.core.settings import Settings, address
from appliance.drivers import unixhttp
from appliance.drivers.tls import names
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub

TIMEOUT_SECS = 120
PART_BYTES = 1024 * 1024
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def reachable(bind: str) -> str:
    """Where a listener that is bound to all addresses is reached on this machine."""
    return EVERYWHERE.get(bind, bind)


@dataclass(frozen=True)
class Identity:
    """Who we are and whom we trust; empty strings for what there is not. pinned: ``ca`` is the server's own."""

    key: str = ""
    ca: str = ""
    certificate: str = ""
    certificate_key: str = ""
    pinned: bool = False

    @classmethod
    def of(cls, settings: Settings) -> Identity:
        named = os.environ.get("TEI_APPLIANCE_CA", "")
        return cls(
            key=os.environ.get("TEI_APPLIANCE_KEY", ""),
            ca=(named or settings.tls.cert_file) if settings.tls.on else "",
            certificate=os.environ.get("TEI_APPLIANCE_CERT", ""),
            certificate_key=os.environ.get("TEI_APPLIANCE_CERT_KEY", ""),
            pinned=not named,
        )

    def context(self) -> ssl.SSLContext:
        """Raises: Problem when a file cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            if self.pinned:
                context.check_hostname = False
                context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            if self.certificate:
                context.load_cert_chain(self.certificate, self.certificate_key or None)
        except (OSError, ssl.SSLError) as error:
            raise invalid(f"Cannot use the TLS files {self.ca} {self.certificate}: {error}") from error
        return context

    def credentials(self) -> tuple[grpc.ChannelCredentials, list[tuple[str, Any]]]:
        """With the channel options that they need. Raises: Problem when a file cannot be used."""
        try:
            authority = Path(self.ca).read_bytes()
            own = Path(self.certificate).read_bytes() if self.certificate else None
            own_key = Path(self.certificate_key or self.certificate).read_bytes() if own else None
        except OSError as error:
            raise invalid(f"Cannot use the TLS files: {error}") from error
        options: list[tuple[str, Any]] = []
        if self.pinned:
            found = names(authority)
            options = [("grpc.ssl_target_name_override", (*found.sans, found.common_name)[0])]
        return grpc.ssl_channel_credentials(authority, own_key, own), options


class WithKey(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):  # type: ignore[misc]
    """Adds the key to the metadata of each call."""

    def __init__(self, key: str) -> None:
        self.key = key

    def keyed(self, proceed: Any, details: Any, request: Any) -> Any:
        metadata = [*(details.metadata or ()), ("authorization", f"Bearer {self.key}")]
        return proceed(details._replace(metadata=metadata), request)

    intercept_unary_unary = intercept_stream_stream = keyed


class Control:
    """The REST API at ``url``, or through control's socket. A refusal becomes a Problem with the server's own words."""

    def __init__(self, url: str, identity: Identity) -> None:
        self.url = self.where = url
        self.session = requests.Session()
        self.session.trust_env = False  # a proxy of the environment has no business with a loopback port
        if identity.key:
            self.session.headers["Authorization"] = f"Bearer {identity.key}"
        if identity.ca:
            self.session.mount("https://", Tls(identity.context()))
            self.session.verify = identity.ca  # else requests adds the public authorities to our context

    @classmethod
    def of(cls, settings: Settings) -> Control:
        return cls.on_port(settings, settings.api_port, Identity.of(settings))

    @classmethod
    def on_port(cls, settings: Settings, port: int, identity: Identity) -> Control:
        return cls(f"{'https' if settings.tls.on else 'http'}://{address(reachable(settings.bind), port)}", identity)

    @classmethod
    def nearest(cls, settings: Settings) -> Control:
        """Through its socket in the data folder for who may open that, and needs no key there; else on its port."""
        path = Path(settings.layout.control_socket)
        try:
            return cls.through(path) if unixhttp.answers(path) else cls.of(settings)
        except PermissionError:
            return cls.of(settings)

    @classmethod
    def through(cls, path: Path) -> Control:
        made = cls("http://localhost", Identity())
        made.session.mount("http://", unixhttp.Through(path))
        made.where = str(path)
        return made

    def call(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        return self.answer(method, path, json=body, params=query).json()

    def answer(self, method: str, path: str, **options: Any) -> requests.Response:
        try:
            response = self.session.request(method, self.url + path, timeout=TIMEOUT_SECS, **options)
        except requests.RequestException as error:
            raise Problem(
                Kind.UNAVAILABLE, "UNREACHABLE", f"No answer from {self.where}: is the appliance up? ({error})"
            ) from error
        if response.ok:
            return response
        try:
            answer = response.json()
            raise Problem(Kind.INVALID, answer["code"], answer["error"])
        except (ValueError, KeyError):
            raise Problem(
                Kind.INTERNAL, "UNEXPECTED", f"{self.where} answered {response.status_code}: {response.text[:200]}"
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

    @contextmanager
    def archive(self, model_id: str) -> Iterator[tuple[int, Iterator[bytes]]]:
        """The length and the parts of a model's archive. Raises: Problem, the parts too when not all of it comes."""
        with self.answer("GET", f"/models/{quote(model_id, safe='')}/archive", stream=True) as answer:
            yield int(answer.headers["Content-Length"]), parts_of(answer)

    def take_in(self, archive: IO[bytes], as_id: str | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/octet-stream"}
        query = {"as": as_id} if as_id else {}
        found: dict[str, Any] = self.answer("POST", "/archives", data=archive, params=query, headers=headers).json()
        return found

    def logs(self, name: str, replica: int, start: int) -> list[str]:
        path = f"/instances/{quote(name, safe='')}/logs"
        found: list[str] = self.call("GET", path, replica=replica, start=start)["lines"]
        return found


def parts_of(answer: requests.Response) -> Iterator[bytes]:
    try:
        yield from answer.iter_content(PART_BYTES)
    except requests.RequestException as error:
        words = (
            "The archive broke off: a file has changed since it was verified, or the appliance ended. Verify the model"
        )
        raise Problem(Kind.INTERNAL, "EXPORT_FAILED", words) from error


class Tls(HTTPAdapter):
    def __init__(self, context: ssl.SSLContext) -> None:
        self.context = context
        super().__init__()

    def init_poolmanager(self, *positional: Any, **named: Any) -> None:
        by_name = None if self.context.check_hostname else False  # None: the one that was asked for
        super().init_poolmanager(*positional, ssl_context=self.context, assert_hostname=by_name, **named)


class Multiplexer:
    """The gRPC endpoint at ``address``; ``unix:PATH`` is a socket in the data folder, which takes no identity."""

    def __init__(self, address: str, identity: Identity | None = None) -> None:
        # No subchannel of another of ours: it would wait in the back-off of that one.
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        if identity and identity.ca:
            credentials, more = identity.credentials()
            channel = grpc.secure_channel(address, credentials, options=[*options, *more])
        else:
            channel = grpc.insecure_channel(address, options=options)
        if identity and identity.key:
            channel = grpc.intercept_channel(channel, WithKey(identity.key))
        self.channel = channel
        self.stub: Any = TeiMultiplexerStub(channel)

    @classmethod
    def of(cls, settings: Settings, identity: Identity | None = None) -> Multiplexer:
        where = address(reachable(settings.bind), settings.grpc_port)
        return cls(where, identity or Identity.of(settings))

    def __enter__(self) -> Multiplexer:
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
