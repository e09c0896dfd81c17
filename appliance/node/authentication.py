"""Who is let in, for HTTP and gRPC alike: keys and certificates of one configuration, as `core.access` decides.

Each request is judged in two steps, each made once: `identify` says who makes it, `authorize` whether they may.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, unquote_to_bytes

from appliance.core import access
from appliance.core.access import ANONYMOUS, CertificateNames, Need, Principal
from appliance.core.problems import Kind, Problem
from appliance.core.settings import Settings
from appliance.drivers.configfile import CONFIG_VARIABLE
from appliance.drivers.keysfile import Keyring
from appliance.files.sockets import peer
from appliance.wire.envelope import (
    CERTIFICATE_KEY,
    EXPRESS_ADMITTED,
    EXPRESS_JUDGE,
    EXPRESS_KEY,
    EXPRESS_OUTSIDE,
    SCOPE_KEY,
)
from appliance.wire.methods import METHODS, MULTIPLEXER

if TYPE_CHECKING:
    from appliance.drivers.tls import Certificates

HEADERS = {name: f"HTTP_{name.upper().replace('-', '_')}" for name in access.CREDENTIALS}  # as WSGI has them
INTERNAL = "unix:"  # how grpc names a peer that came through a socket in the data folder
# The whole of what Envoy forwards: the URIs of our own certificate, if it has any, a digest, and what it is asked for.
CERTIFICATE = re.compile(r'(?:[^"]*;)?Cert="([^";]*)"')

# Request metadata of a call that came through one of our sockets, and whose caller nobody has judged yet.
UNJUDGED = {(EXPRESS_KEY, EXPRESS_JUDGE), (EXPRESS_KEY, EXPRESS_OUTSIDE)}

LOOPBACK_BINDS = ("127.0.0.1", "::1", "localhost")

# What RPCs need, by full name, and else by service; others need inference. Info tells, and computes nothing.
SERVICE_NEEDS = {
    "tei_appliance.v1.Directory": Need.ANY,
    "grpc.health.v1.Health": Need.OPEN,
    "grpc.reflection.v1.ServerReflection": Need.ANY,
    "grpc.reflection.v1alpha.ServerReflection": Need.ANY,
}
RPC_NEEDS = {
    path: Need.INFERENCE if method.needs_request else Need.ANY
    for method in METHODS
    for path in (method.path, f"/{MULTIPLEXER}/{method.name}")
}


def is_internal(context: Any) -> bool:
    """Whether a gRPC call came through a socket in the data folder."""
    return bool(context.peer().startswith(INTERNAL))


def forwarded_certificate(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """The client's certificate as Envoy passes it on, PEM in the percent encoding of URLs; empty for none."""
    forwarded = next((value for key, value in metadata if key == CERTIFICATE_KEY), "")
    match = CERTIFICATE.fullmatch(forwarded) if isinstance(forwarded, str) else None
    return unquote_to_bytes(match[1]) if match else b""


def rpc_need(method: str) -> Need:
    """method: the full name, "/package.Service/Method"."""
    return RPC_NEEDS.get(method) or SERVICE_NEEDS.get(method[1:].partition("/")[0], Need.INFERENCE)


def keys_path(settings: Settings) -> Path:
    return Path(settings.layout.keys)


def config_path() -> Path | None:
    """The configuration file of this process and of those that it starts."""
    config = os.environ.get(CONFIG_VARIABLE)
    return Path(config) if config else None


@dataclass
class Authenticator:
    settings: Settings
    keys: Keyring
    certificates: Certificates | None

    @classmethod
    def of(cls, settings: Settings) -> Authenticator:
        """Raises: Problem that names what of `[tls]` cannot be used."""
        authenticator = cls(settings, Keyring(keys_path(settings), config_path()), None)
        if settings.tls.on:
            from appliance.drivers.tls import Certificates  # only now: it takes 60 ms and 6 MB, and few boxes use it

            authenticator.certificates = Certificates(
                settings.tls, authenticator.check_names, optional_clients=settings.open_health
            )
        return authenticator

    @property
    def on(self) -> bool:
        """Whether authentication is required."""
        return self.keys.current().required or self.settings.tls.require_client_cert

    def check_names(self, names: CertificateNames | None) -> None:
        """Raises: Problem for a certificate that is on no list, and for none where one is needed."""
        limits = self.settings.tls
        if limits.require_client_cert and names is None:
            raise access.no_certificate()
        access.refuse_names(names, limits.allowed_subjects, limits.allowed_sans)

    def principal(self, sent: Sequence[tuple[str, str]], names: CertificateNames | None) -> Principal:
        """sent: see `access.presented`. names: of their certificate."""
        on, keys = self.keys.current()
        try:
            self.check_names(names)
        except Problem as problem:
            return Principal(ANONYMOUS, refusal=problem)
        return access.identify(keys if on else None, sent, names)

    def identify(self, environ: dict[str, Any]) -> Principal:
        """Who sends this HTTP request."""
        connection = environ.get("gunicorn.socket")
        if user := peer(connection):
            return Principal(user)
        sent = [(name, environ[key]) for name, key in HEADERS.items() if key in environ]
        return self.principal(sent, self.names_of(environ))

    def names_of(self, environ: dict[str, Any]) -> CertificateNames | None:
        """Of the certificate with which this HTTP request came, if it came with one."""
        connection = environ.get("gunicorn.socket")
        der = connection.getpeercert(binary_form=True) if isinstance(connection, ssl.SSLSocket) else None
        return self.certificates.names(der) if self.certificates and der else None

    def refuse_certificate(self, environ: dict[str, Any]) -> None:
        """Raises: Problem for an HTTP request without a certificate where one is needed, or with one on no list,
        whatever key it has."""
        if not peer(environ.get("gunicorn.socket")):
            self.check_names(self.names_of(environ))

    def identify_call(self, context: Any) -> Principal:
        """Who makes this gRPC call. Raises: Problem for a certificate that has expired."""
        metadata = context.invocation_metadata() or ()
        sent = [(key, value) for key, value in metadata if key in access.CREDENTIALS and isinstance(value, str)]
        if not self.certificates:
            return self.principal(sent, None)
        if is_internal(context):
            pem = forwarded_certificate(metadata)
        else:
            pem = context.auth_context().get("x509_pem_cert", [b""])[0]
        return self.principal(sent, self.certificates.current_names(pem) if pem else None)

    def authorize(self, principal: Principal, need: Need) -> None:
        """Raises: Problem UNAUTHENTICATED or FORBIDDEN unless they may do what has this need."""
        access.authorize(principal, access.effective(need, self.settings.open_health))

    def admit_call(self, method: str, context: Any) -> None:
        """Raises: Problem unless this call may be made.

        What comes through our own socket was let in by the gateway, or by Envoy, unless that asks for a judgement. So
        does the multiplexer, of what came through its port and is forwarded to grpcio.
        """
        if not self.on and not self.certificates:
            return  # nobody is asked; and to ask grpc for the peer gives the interpreter away twice
        if not is_internal(context) or any(pair in UNJUDGED for pair in context.invocation_metadata()):
            self.authorize(self.identify_call(context), rpc_need(method))

    def caller_name(self, context: Any) -> str | None:
        """Who makes this gRPC call; of one that came through the gateway, who asked that. None where nobody knows: what
        Envoy had admitted to the lane in vain bears no key any more. Raises: Problem."""
        metadata = context.invocation_metadata() or ()
        if not is_internal(context) or any(pair in UNJUDGED for pair in metadata):
            return self.identify_call(context).name
        if (EXPRESS_KEY, EXPRESS_ADMITTED) in metadata:
            return None
        return next((unquote(str(value)) for key, value in metadata if key == SCOPE_KEY), ANONYMOUS)

    def refuse_remote(self, environ: dict[str, Any]) -> None:
        """Raises: Problem for a caller on another machine while no key is asked for, whatever its certificate: it could
        lock all others out."""
        local = peer(environ.get("gunicorn.socket")) or access.loopback(environ.get("REMOTE_ADDR", ""))
        if not (local or self.keys.current().required):
            raise Problem(
                Kind.FORBIDDEN,
                "FORBIDDEN",
                "The first key is made on the appliance's own machine, or in its container: appliance keys create "
                "NAME admin",
            )


def is_open_to_the_network(settings: Settings) -> bool:
    """Whether other machines reach it, and nobody is asked who he is. Raises: Problem, as `Authenticator.of`."""
    return settings.bind not in LOOPBACK_BINDS and not Authenticator.of(settings).on
