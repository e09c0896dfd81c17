"""TLS from files: contexts for HTTP, credentials for gRPC, the names in certificates. Changed files are read again.

This module does two things that the libraries do not (gunicorn 27, grpcio 1.85, measured). Both let a client resume its
session for two hours without another look at the dates of its certificate (OpenSSL by session ids of TLS 1.2 even
without tickets): here the dates are checked. grpc cuts a name in a certificate at a NUL, so that "admin\\0.evil" would
pass for "admin": here names are read from the certificate itself.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from cryptography import x509
from cryptography.x509.oid import NameOID

from appliance.core.access import CertificateNames
from appliance.core.problems import Kind, Problem, invalid
from appliance.core.settings import TlsSettings
from appliance.files.signature import Signature, signature

log = logging.getLogger(__name__)
HANDSHAKE_SECS = 5.0
VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
PLAIN = b"This port speaks TLS: use https://\n"
PLAIN_REPLY = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(PLAIN), PLAIN)
)
# grpc's BoringSSL has no setting for the lowest version. This suite exists in TLS 1.2 only and needs a shared secret
# that no client has: so a handshake of 1.2 fails, while one of 1.3, whose suites are fixed, works.
ONLY_TLS_1_3 = {"GRPC_SSL_CIPHER_SUITES": "ECDHE-PSK-CHACHA20-POLY1305"}

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


def signature_or_none(file: str) -> Signature | None:
    try:
        return signature(file)
    except OSError:
        return None


def why(error: OSError) -> str:
    return f"{error.strerror or error}" if not isinstance(error, ssl.SSLError) else f"{error.reason or error}"


def checked_socket(check: Check) -> type[ssl.SSLSocket]:
    """A class of sockets with a time limit for the handshake, and a check of the certificate before the first read."""

    class CheckedSocket(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            before = self.gettimeout()
            self.settimeout(HANDSHAKE_SECS)
            try:
                super().do_handshake(block)
            except TimeoutError:
                raise ssl.SSLEOFError(ssl.SSL_ERROR_EOF, "The handshake took too long") from None
            except ssl.SSLError as error:
                if error.reason == "HTTP_REQUEST":
                    socket.socket.sendall(self, PLAIN_REPLY)  # deliberately not encrypted
                log.info("A TLS handshake failed: %s", error.reason or error)
                raise ssl.SSLEOFError(ssl.SSL_ERROR_EOF, "No TLS") from None
            finally:
                try:
                    self.settimeout(before)
                except OSError:
                    pass  # the client has disconnected
            if der := self.getpeercert(binary_form=True):
                try:
                    refuse_expired(der)
                    check(names(der))
                except Problem as problem:
                    log.info("A client certificate is refused: %s", problem.message)
                    raise CertificateRefused(problem.message) from None

    return CheckedSocket


class CertificateRefused(ssl.SSLError):
    """A certificate that was verified, and has expired or is not allowed."""


class ClientCertificate(NamedTuple):
    names: CertificateNames
    expires_at: datetime


UNREADABLE = (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError)


@lru_cache(1024)
def read(certificate: bytes) -> ClientCertificate:
    """certificate: DER or PEM. Raises: Problem. Of several common names none counts: the meant one cannot be known."""
    pem = b"-----BEGIN CERTIFICATE-----" in certificate  # openssl may have written a description above it
    try:
        parsed = x509.load_pem_x509_certificate(certificate) if pem else x509.load_der_x509_certificate(certificate)
        common = parsed.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        subject, expires_at = parsed.subject.rfc4514_string(), parsed.not_valid_after_utc
    except ValueError:
        raise Problem(Kind.UNAUTHENTICATED, "UNAUTHENTICATED", "The certificate cannot be read") from None
    try:
        alternative = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except UNREADABLE:
        alternative = x509.SubjectAlternativeName([])
    sans = tuple(text for each in alternative if kind(text := str(each.value)) is type(each))
    return ClientCertificate(
        CertificateNames(str(common[0].value) if len(common) == 1 else "", subject, sans), expires_at
    )


def names(certificate: bytes) -> CertificateNames:
    """Raises: Problem."""
    return read(certificate).names


def refuse_expired(certificate: bytes) -> None:
    """Raises: Problem. For resumed sessions: the libraries do not check the dates of their certificates again."""
    if read(certificate).expires_at < datetime.now(UTC):
        raise Problem(Kind.UNAUTHENTICATED, "UNAUTHENTICATED", "The client certificate has expired")


def kind(text: str) -> type[x509.GeneralName]:
    """The kind of alternative name that a text looks like. A name of another kind than it looks like does not count: an
    authority that checks DNS names need not check URIs, which may contain any text."""
    try:
        ip_address(text)
    except ValueError:
        return x509.UniformResourceIdentifier if ":" in text else x509.RFC822Name if "@" in text else x509.DNSName
    return x509.IPAddress


def expiry(certificates: bytes) -> datetime:
    """When the first of these PEM certificates expires."""
    return min(each.not_valid_after_utc for each in x509.load_pem_x509_certificates(certificates))
