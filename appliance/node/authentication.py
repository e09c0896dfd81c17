"""Who is let in, for HTTP and gRPC alike: keys and certificates of one configuration, as `core.access` decides."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.core import access
from appliance.core.access import Names, Need
from appliance.core.problems import Kind, Problem
from appliance.core.settings import Settings
from appliance.drivers import tls, unixhttp
from appliance.drivers.configfile import CONFIG_VARIABLE
from appliance.drivers.keysfile import Keys
from appliance.drivers.tls import Certificates

ANONYMOUS = "anonymous"
HEADERS = {name: f"HTTP_{name.upper().replace('-', '_')}" for name in access.CREDENTIALS}  # as WSGI has them
INTERNAL = "unix:"  # how grpc names a peer that came through a socket in the data folder


def keys_path(settings: Settings) -> Path:
    return Path(settings.layout.keys)


def config_path() -> Path | None:
    """The configuration file of this process and of those that it starts."""
    config = os.environ.get(CONFIG_VARIABLE)
    return Path(config) if config else None


@dataclass
class Authenticator:
    settings: Settings
    keys: Keys
    certificates: Certificates | None

    @classmethod
    def of(cls, settings: Settings) -> Authenticator:
        """Raises: Problem that names what of `[tls]` cannot be used."""
        authenticator = cls(settings, Keys(keys_path(settings), config_path()), None)
        if settings.tls.on:
            authenticator.certificates = Certificates(
                settings.tls, authenticator.check_names, optional_clients=settings.open_health
            )
        return authenticator

    @property
    def http_tls(self) -> tuple[str, str, Callable[[], ssl.SSLContext]] | None:
        """What `drivers.httpserver` takes."""
        tls = self.settings.tls
        return (tls.cert_file, tls.key_file, self.certificates.context) if self.certificates else None

    @property
    def on(self) -> bool:
        """Whether anybody has to say who he is."""
        return self.keys.current()[0] or self.settings.tls.require_client_cert

    def check_names(self, names: Names | None) -> None:
        """Raises: Problem for a certificate that is on no list, and for none where one is needed."""
        limits = self.settings.tls
        if limits.require_client_cert and names is None:
            raise access.no_certificate()
        access.refuse_names(names, limits.allowed_subjects, limits.allowed_sans)

    def check(self, need: Need, sent: Sequence[tuple[str, str]], names: Names | None) -> str:
        """Who it is, for the audit. sent: see `access.presented`. Raises: Problem."""
        if need is not Need.OPEN:
            self.check_names(names)
        on, known = self.keys.current()
        key = access.refuse(known, sent, need) if on else None
        return key.name if key else (names.common_name or names.subject) if names else ANONYMOUS

    def http(self, need: Need, environ: dict[str, Any]) -> str:
        """Who sends this request. Raises: Problem."""
        connection = environ.get("gunicorn.socket")
        if user := unixhttp.peer(connection):
            return user
        der = connection.getpeercert(binary_form=True) if isinstance(connection, ssl.SSLSocket) else None
        sent = [(name, environ[key]) for name, key in HEADERS.items() if key in environ]
        return self.check(need, sent, tls.names(der) if der else None)

    def knows(self, environ: dict[str, Any]) -> bool:
        """Whether this request may be told what only somebody who is let in may know: so all, where nobody is asked."""
        try:
            self.http(Need.ANY, environ)
        except Problem:
            return False
        return True

    def refuse_strangers(self, environ: dict[str, Any]) -> None:
        """Raises: Problem for who is on another machine, while nobody is asked who he is: he could lock all out."""
        local = unixhttp.peer(environ.get("gunicorn.socket")) or access.loopback(environ.get("REMOTE_ADDR", ""))
        if not (local or self.on):
            raise Problem(
                Kind.FORBIDDEN,
                "FORBIDDEN",
                "The first key is made on the appliance's own machine, or in its container: appliance keys create "
                "NAME admin",
            )

    def grpc(self, method: str, context: Any) -> None:
        """Raises: Problem unless this call may be made. What comes through our own socket was let in by the gateway."""
        if context.peer().startswith(INTERNAL):
            return
        need = access.grpc_need(method, self.settings.open_health)
        metadata = context.invocation_metadata() or ()
        sent = [(key, value) for key, value in metadata if key in access.CREDENTIALS and isinstance(value, str)]
        pem = context.auth_context().get("x509_pem_cert", [b""])[0] if self.settings.tls.on else b""
        if pem:
            tls.refuse_expired(pem)
        self.check(need, sent, tls.names(pem) if pem else None)
