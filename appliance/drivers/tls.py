"""TLS from files: contexts for HTTP, credentials for gRPC. Changed files are read again.

The libraries (gunicorn 27, grpcio 1.85, measured) let a client resume its session for two hours without another look at
the dates of its certificate (OpenSSL by session ids of TLS 1.2 even without tickets): here the dates are checked.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from appliance.core.access import CertificateNames
from appliance.core.problems import Kind, Problem, invalid
from appliance.core.tls_settings import TlsSettings
from appliance.files.signature import Signature, signature_or_none
from appliance.wire import certificates

log = logging.getLogger(__name__)
VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
PLAIN = b"This port speaks TLS: use https://\n"
PLAIN_REPLY = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(PLAIN), PLAIN)
)

Check = Callable[[CertificateNames], None]  # raises Problem


class Pems(NamedTuple):
    """The files of `[tls]` as PEM. authority: the clients'."""

    key: bytes
    chain: bytes
    authority: bytes | None


class Certificates:
    """The files of `[tls]`. check: may refuse a client certificate, right after the handshake."""

    def __init__(self, settings: TlsSettings, check: Check, optional_clients: bool) -> None:
        """optional_clients: a connection without a certificate is accepted, and each request is checked instead.

        Raises: Problem that names the file which cannot be used.
        """
        self.settings = settings
        self.check = check
        self.optional_clients = optional_clients
        self.lock = threading.Lock()
        self.mark = self.signatures()
        self.ssl_context = self.load()
        self.pems = self.read()

    @property
    def files(self) -> list[str]:
        tls = self.settings
        return [file for file in (tls.cert_file, tls.key_file, tls.client_ca_file) if file]

    def signatures(self) -> list[Signature | None]:
        return [signature_or_none(file) for file in self.files]

    def refresh(self) -> None:
        """Use changed files from now on. If they cannot be used, those in use stay in use."""
        with self.lock:
            mark = self.signatures()
            if mark == self.mark:
                return
            self.mark = mark
            try:
                self.ssl_context, self.pems = self.load(), self.read()
                log.info("Certificates were read again: %s", ", ".join(self.files))
            except Problem as problem:
                log.error("The certificates in use stay in use: %s", problem.message)

    def context(self) -> ssl.SSLContext:
        """The context for a new connection to an HTTP server."""
        self.refresh()
        return self.ssl_context

    def load(self) -> ssl.SSLContext:
        """A new context: an old one that is changed still trusts the authorities that were removed."""
        tls = self.settings
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = VERSIONS[tls.min_version]
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as grpc does: client_ca_file need not hold a root
        try:
            context.load_cert_chain(tls.cert_file, tls.key_file, password="")  # else OpenSSL asks at the terminal
        except (OSError, ssl.SSLError) as error:
            raise invalid(f"tls.cert_file {tls.cert_file} with tls.key_file {tls.key_file}: {why(error)}") from error
        if tls.require_client_cert:
            context.verify_mode = ssl.CERT_OPTIONAL if self.optional_clients else ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(tls.client_ca_file)
            except (OSError, ssl.SSLError) as error:
                raise invalid(f"tls.client_ca_file {tls.client_ca_file}: {why(error)}") from error
        context.sslsocket_class = checked_socket(self.check)
        return context

    def read(self) -> Pems:
        tls = self.settings
        try:
            authority = Path(tls.client_ca_file).read_bytes() if tls.client_ca_file else None
            return Pems(Path(tls.key_file).read_bytes(), Path(tls.cert_file).read_bytes(), authority)
        except OSError as error:
            raise invalid(f"[tls]: {why(error)}") from error

    def names(self, certificate: bytes) -> CertificateNames:
        """The names of a client, from its certificate. Raises: Problem."""
        return certificates.names(certificate)

    def current_names(self, certificate: bytes) -> CertificateNames:
        """The names of a client whose certificate has not expired. Raises: Problem."""
        refuse_expired(certificate)
        return certificates.names(certificate)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials that check at each connection whether the files have changed.

        grpc frees the old configuration while another connection may be using it (its issue 36693, open in 1.85). With
        a new configuration for each connection the process died within some 100 simultaneous connections; so grpc gets
        a new one only when the files have changed.
        """
        in_use = self.pems

        def configuration() -> Any:
            return grpc.ssl_server_certificate_configuration(
                [(in_use.key, in_use.chain)], root_certificates=in_use.authority
            )

        def changed() -> Any:
            nonlocal in_use
            self.refresh()
            if self.pems is in_use:
                return None
            in_use = self.pems
            return configuration()

        required = self.settings.require_client_cert
        return grpc.dynamic_ssl_server_credentials(configuration(), changed, required)


def refuse_expired(certificate: bytes) -> None:
    """Raises: Problem. For resumed sessions: the libraries do not check the dates of their certificates again."""
    if certificates.read(certificate).expires_at < datetime.now(UTC):
        raise Problem(Kind.UNAUTHENTICATED, "UNAUTHENTICATED", "The client certificate has expired")


def why(error: OSError) -> str:
    return f"{error.strerror or error}" if not isinstance(error, ssl.SSLError) else f"{error.reason or error}"


def checked_socket(check: Check) -> type[ssl.SSLSocket]:
    """A class of sockets with a check of the certificate before the first read. They do not block in a handshake: it
    goes on when more of it has come."""

    class CheckedSocket(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            try:
                super().do_handshake(block)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                if error.reason == "HTTP_REQUEST":
                    socket.socket.sendall(self, PLAIN_REPLY)  # deliberately not encrypted
                log.info("A TLS handshake failed: %s", error.reason or error)
                raise ssl.SSLEOFError(ssl.SSL_ERROR_EOF, "No TLS") from None
            if der := self.getpeercert(binary_form=True):
                try:
                    refuse_expired(der)
                    check(certificates.names(der))
                except Problem as problem:
                    log.info("A client certificate is refused: %s", problem.message)
                    raise CertificateRefused(problem.message) from None

    return CheckedSocket


class CertificateRefused(ssl.SSLError):
    """A certificate that was verified, and has expired or is not allowed."""
