"""TLS from files: contexts for HTTP, credentials for gRPC, the names in certificates. Files are read when they change.

What the two stacks do not do by themselves (gunicorn 27, grpcio 1.85, measured): both let a client resume its session
without looking at the dates of its certificate again, for two hours (OpenSSL by session ids of TLS 1.2 even without
tickets); so these are looked at here. grpc cuts names in certificates at a NUL, which would let "admin\\0.evil" pass
for "admin"; so names come from the certificate itself.
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
from typing import Any

import grpc
from cryptography import x509
from cryptography.x509.oid import NameOID

from appliance.core.access import Names
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
# BoringSSL of grpc has no setting for the least version. This suite exists in TLS 1.2 alone and needs a shared secret
# that nobody has, so that 1.2 finds nothing in common, while 1.3, whose suites are fixed, works.
ONLY_TLS_1_3 = {"GRPC_SSL_CIPHER_SUITES": "ECDHE-PSK-CHACHA20-POLY1305"}

Check = Callable[[Names], None]  # raises Problem


class Certificates:
    """The files of `[tls]`. check: what may refuse a client certificate, right after the handshake."""

    def __init__(self, settings: TlsSettings, check: Check, optional_clients: bool) -> None:
        """optional_clients: a connection without a certificate is let in, and each request decides.

        Raises: Problem that names the file which cannot be used.
        """
        self.settings = settings
        self.check = check
        self.optional_clients = optional_clients
        self.lock = threading.Lock()
        self.mark = self.signatures()
        self.known = self.load()
        self.pems = self.read()

    @property
    def files(self) -> list[str]:
        tls = self.settings
        return [file for file in (tls.cert_file, tls.key_file, tls.client_ca_file) if file]

    def signatures(self) -> list[Signature | None]:
        return [signature_or_none(file) for file in self.files]

    def refresh(self) -> None:
        """Take files that have changed into use; files that cannot be used leave the old ones in use."""
        with self.lock:
            mark = self.signatures()
            if mark == self.mark:
                return
            self.mark = mark
            try:
                self.known, self.pems = self.load(), self.read()
                log.info("Certificates were read again: %s", ", ".join(self.files))
            except Problem as problem:
                log.error("The certificates in use stay in use: %s", problem.message)

    def context(self) -> ssl.SSLContext:
        """For one connection to an HTTP server."""
        self.refresh()
        return self.known

    def load(self) -> ssl.SSLContext:
        """A new context: one that is changed in place would go on trusting what was taken away."""
        tls = self.settings
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = VERSIONS[tls.min_version]
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as grpc: client_ca_file needs no root
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

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """(key, certificate chain, clients' authority) as PEM."""
        tls = self.settings
        try:
            authority = Path(tls.client_ca_file).read_bytes() if tls.client_ca_file else None
            return Path(tls.key_file).read_bytes(), Path(tls.cert_file).read_bytes(), authority
        except OSError as error:
            raise invalid(f"[tls]: {why(error)}") from error

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """That ask at each connection whether the files have changed.

        grpc frees the old configuration while another connection may just be using it (its issue 36693, open in 1.85).
        A new one for each connection ended the process within some 100 connections at once; so it gets one only when
        there is one.
        """
        given = self.pems

        def configuration() -> Any:
            key, chain, authority = given
            return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=authority)

        def changed() -> Any:
            nonlocal given
            self.refresh()
            if self.pems is given:
                return None
            given = self.pems
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
    """Sockets whose handshake has an end, and that refuse a certificate before anything is read from its holder."""

    class Checked(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            before = self.gettimeout()
            self.settimeout(HANDSHAKE_SECS)
            try:
                super().do_handshake(block)
            except TimeoutError:
                raise ssl.SSLEOFError(ssl.SSL_ERROR_EOF, "The handshake took too long") from None
            except ssl.SSLError as error:
                if error.reason == "HTTP_REQUEST":
                    socket.socket.sendall(self, PLAIN_REPLY)  # in the clear, on purpose
                log.info("A TLS handshake failed: %s", error.reason or error)
                raise ssl.SSLEOFError(ssl.SSL_ERROR_EOF, "No TLS") from None
            finally:
                try:
                    self.settimeout(before)
                except OSError:
                    pass  # the client is gone
            if der := self.getpeercert(binary_form=True):
                try:
                    refuse_expired(der)
                    check(names(der))
                except Problem as problem:
                    log.info("A client certificate is refused: %s", problem.message)
                    raise Refused(problem.message) from None

    return Checked


class Refused(ssl.SSLError):
    """A certificate that was verified and is on no list."""


UNREADABLE = (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError)


@lru_cache(1024)
def read(certificate: bytes) -> tuple[Names, datetime]:
    """(names, end) of a certificate as DER or PEM. Raises: Problem.

    One with several common names has none that could be meant.
    """
    pem = b"-----BEGIN CERTIFICATE-----" in certificate  # openssl may have written its description above it
    try:
        found = x509.load_pem_x509_certificate(certificate) if pem else x509.load_der_x509_certificate(certificate)
        common = found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        subject, until = found.subject.rfc4514_string(), found.not_valid_after_utc
    except ValueError:
        raise Problem(Kind.UNAUTHENTICATED, "UNAUTHENTICATED", "The certificate cannot be read") from None
    try:
        alternative = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except UNREADABLE:
        alternative = x509.SubjectAlternativeName([])
    sans = tuple(text for each in alternative if kind(text := str(each.value)) is type(each))
    return Names(str(common[0].value) if len(common) == 1 else "", subject, sans), until


def names(certificate: bytes) -> Names:
    """Raises: Problem."""
    return read(certificate)[0]


def refuse_expired(certificate: bytes) -> None:
    """Raises: Problem. A session that is resumed brings its certificate along, and nobody looks at its dates again."""
    if read(certificate)[1] < datetime.now(UTC):
        raise Problem(Kind.UNAUTHENTICATED, "UNAUTHENTICATED", "The client certificate has expired")


def kind(text: str) -> type[x509.GeneralName]:
    """What kind of alternative name is written like this. One of another kind does not count: a URI may say anything,
    and an authority that looks after DNS names may not look after those."""
    try:
        ip_address(text)
    except ValueError:
        return x509.UniformResourceIdentifier if ":" in text else x509.RFC822Name if "@" in text else x509.DNSName
    return x509.IPAddress


def expiry(certificates: bytes) -> datetime:
    """When the first of these PEM certificates to do so ends."""
    return min(each.not_valid_after_utc for each in x509.load_pem_x509_certificates(certificates))
