"""TLS to other machines, as `[remote_tls]` has it. Changed files are read again."""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import threading

from appliance.core.problems import Problem, invalid, quoted
from appliance.core.tls_settings import RemoteTlsSettings
from appliance.files.securesocket import SecureSocket
from appliance.files.signature import Signature, signature_or_none

log = logging.getLogger(__name__)


class RemoteCertificates:
    """Whom we trust, and what we show. Thread-safe."""

    def __init__(self, settings: RemoteTlsSettings) -> None:
        """Raises: Problem that names the file which cannot be used."""
        self.settings = settings
        self.lock = threading.Lock()
        self.marks = self.signatures()
        self.context = self.load()

    def signatures(self) -> list[Signature | None]:
        tls = self.settings
        return [signature_or_none(file) for file in (tls.ca_file, tls.cert_file, tls.key_file) if file]

    def secure(self, server_name: str, plain: socket.socket) -> SecureSocket:
        """TLS for a connected socket, whose peer has to show a certificate of ``server_name``.

        Raises: ssl.SSLError for a name that no certificate can have, such as one with two dots in a row.
        """
        try:
            return SecureSocket(plain, self.current(), server_name)
        except (ValueError, TypeError) as error:
            words = f"{quoted(server_name)} is no name that a certificate can have: {error}"
            raise ssl.SSLError(errno.EINVAL, words) from error

    def current(self) -> ssl.SSLContext:
        with self.lock:
            marks = self.signatures()
            if marks != self.marks:
                self.marks = marks
                try:
                    self.context = self.load()
                    log.info("The certificates of [remote_tls] were read again")
                except Problem as problem:
                    log.error("The certificates in use stay in use: %s", problem.message)
            return self.context

    def load(self) -> ssl.SSLContext:
        tls = self.settings
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])  # grpcio's servers accept no connection without
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as grpc does: ca_file need not hold a root
        try:
            context.load_verify_locations(tls.ca_file)
        except OSError as error:
            raise invalid(f"remote_tls.ca_file {tls.ca_file}: {why(error)}") from error
        if tls.cert_file:
            try:
                context.load_cert_chain(tls.cert_file, tls.key_file, password="")  # else OpenSSL asks at the terminal
            except OSError as error:
                raise invalid(
                    f"remote_tls.cert_file {tls.cert_file} with remote_tls.key_file {tls.key_file}: {why(error)}"
                ) from error
        return context


def why(error: OSError) -> str:
    return f"{(error.reason if isinstance(error, ssl.SSLError) else error.strerror) or error}"
