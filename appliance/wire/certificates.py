"""The names and the dates in certificates, DER or PEM.

grpc cuts a name in a certificate at a NUL, so that "admin\\0.evil" would pass for "admin" (1.85, measured): here names
are read from the certificate itself.
"""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from ipaddress import ip_address
from typing import NamedTuple

from cryptography import x509
from cryptography.x509.oid import NameOID

from appliance.core.access import CertificateNames
from appliance.core.problems import Kind, Problem


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
