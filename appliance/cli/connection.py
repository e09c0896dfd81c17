"""How the command line connects to an appliance: at which address, with which identity, trusting which server.

The identity comes from the environment, so that no command line shows it: TEI_APPLIANCE_KEY, an API key; and for TLS
TEI_APPLIANCE_CERT and TEI_APPLIANCE_CERT_KEY, a client certificate. TEI_APPLIANCE_CA says which server to trust; by
default it is the one with the very certificate that the configuration names, whatever its name. Our side speaks TLS 1.3
at least.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from appliance.core.problems import invalid
from appliance.core.settings import Settings

if TYPE_CHECKING:
    import grpc

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def reachable_host(bind: str) -> str:
    """Where a listener that is bound to all addresses is reached on this machine."""
    return EVERYWHERE.get(bind, bind)


class ChannelSecurity(NamedTuple):
    """Credentials of a gRPC channel, and the channel options that they need."""

    credentials: grpc.ChannelCredentials
    options: list[tuple[str, Any]]


def key_in_environment() -> str:
    """Raises: Problem for a key that no header can carry, which an error of a library would print."""
    key = os.environ.get("TEI_APPLIANCE_KEY", "")
    if not (key.isascii() and key.isprintable()):
        raise invalid("TEI_APPLIANCE_KEY has characters that no key has, such as a line break at its end")
    return key


@dataclass(frozen=True)
class Identity:
    """The caller's key and certificate, and whom the caller trusts; empty strings for what there is not.

    pinned: ``ca`` is the server's own certificate.
    """

    key: str = ""
    ca: str = ""
    certificate: str = ""
    certificate_key: str = ""
    pinned: bool = False

    @classmethod
    def from_environment(cls, settings: Settings) -> Identity:
        """Raises: Problem as `key_in_environment`."""
        ca = os.environ.get("TEI_APPLIANCE_CA", "")
        return cls(
            key=key_in_environment(),
            ca=(ca or settings.tls.cert_file) if settings.tls.on else "",
            certificate=os.environ.get("TEI_APPLIANCE_CERT", ""),
            certificate_key=os.environ.get("TEI_APPLIANCE_CERT_KEY", ""),
            pinned=not ca,
        )

    def ssl_context(self) -> ssl.SSLContext:
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

    def channel_security(self) -> ChannelSecurity:
        """Raises: Problem when a file cannot be used."""
        import grpc

        try:
            authority = Path(self.ca).read_bytes()
            certificate = Path(self.certificate).read_bytes() if self.certificate else None
            key = Path(self.certificate_key or self.certificate).read_bytes() if certificate else None
        except OSError as error:
            raise invalid(f"Cannot use the TLS files: {error}") from error
        options: list[tuple[str, Any]] = []
        if self.pinned:
            from appliance.wire.certificates import names  # only now: it takes 20 ms, and few boxes use TLS

            server = names(authority)
            options = [("grpc.ssl_target_name_override", (*server.sans, server.common_name)[0])]
        return ChannelSecurity(grpc.ssl_channel_credentials(authority, key, certificate), options)
