"""Certificates of every kind, and who of those that show them is let in."""

from __future__ import annotations

import itertools
import ssl
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from testing.certificates import Authority, Issued
from tests.security.peer import REFUSED, Outcome

NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)
HOSTS = ["DNS:localhost", "IP:127.0.0.1"]
SAN = ObjectIdentifier("2.5.29.17")


class Pki:
    """The authorities of this module. ``server`` is shown by the appliance, ``good`` by whoever may come in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = Authority(folder, "Clients")
        self.twin = Authority(folder, "Clients")
        self.other = Authority(folder, "Somebody")
        self.server = self.ca.issue("node", HOSTS)
        self.good = self.ca.issue("search")
        self.numbers = itertools.count()

    def crafted(
        self,
        subject: list[tuple[ObjectIdentifier, str]],
        extensions: list[x509.ExtensionType] = (),  # type: ignore[assignment]
        by: Issued | None = None,
        patch: tuple[bytes, bytes] | None = None,
    ) -> Issued:
        """What the factory does not make. by: a certificate that acts as authority; patch: bytes of the signed part."""
        key = ec.generate_private_key(ec.SECP256R1())
        issuer, signer = self.ca.certificate.subject, self.ca.key
        above = b""
        if by:
            above = by.chain.read_bytes()
            issuer = x509.load_pem_x509_certificate(above).subject
            signer = load_pem_private_key(by.key_path.read_bytes(), None)  # type: ignore[assignment]
        builder = x509.CertificateBuilder(
            issuer_name=issuer,
            subject_name=x509.Name([x509.NameAttribute(kind, text) for kind, text in subject]),
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=NOW - HOUR,
            not_valid_after=NOW + HOUR,
        ).add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        certificate = builder.sign(signer, hashes.SHA256())
        der = certificate.public_bytes(Encoding.DER)
        if patch:
            assert isinstance(signer, ec.EllipticCurvePrivateKey)
            der = signed_anew(certificate, signer, *patch)
        pem = ssl.DER_cert_to_PEM_cert(der).encode()
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return self.files(pem, private, above)

    def files(self, pem: bytes, private: bytes, above: bytes = b"") -> Issued:
        number = next(self.numbers)
        paths = [self.folder / f"crafted-{number}.{ending}" for ending in ("pem", "key", "chain")]
        for path, content in zip(paths, (pem, private, pem + above), strict=True):
            path.write_bytes(content)
        return Issued(cert_path=paths[0], key_path=paths[1], chain=paths[2])

    def self_signed(self) -> Issued:
        """Its own authority, under a name that may come in."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "search")])
        builder = x509.CertificateBuilder(
            name, name, key.public_key(), x509.random_serial_number(), NOW - HOUR, NOW + HOUR
        )
        pem = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
        return self.files(pem, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def signed_anew(certificate: x509.Certificate, signer: ec.EllipticCurvePrivateKey, old: bytes, new: bytes) -> bytes:
    """The certificate with some bytes of its signed part changed in place, as DER."""
    assert len(old) == len(new)
    assert old in certificate.tbs_certificate_bytes
    signed = certificate.tbs_certificate_bytes.replace(old, new)
    signature = b"\x00" + signer.sign(signed, ec.ECDSA(hashes.SHA256()))
    algorithm = bytes.fromhex("300a06082a8648ce3d040302")  # ecdsa-with-SHA256
    content = signed + algorithm + b"\x03" + der_length(len(signature)) + signature
    return b"\x30" + der_length(len(content)) + content


def der_length(size: int) -> bytes:
    if size < 128:
        return bytes([size])
    digits = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([0x80 + len(digits)]) + digits


def san(*names: x509.GeneralName) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName(names)


CN, ORGANIZATION = NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME
DNS, URI, EMAIL = x509.DNSName, x509.UniformResourceIdentifier, x509.RFC822Name
Make = Callable[[Pki], Issued | None]


def named(common_name: str = "", *sans: str, organization: str | None = None) -> Make:
    return lambda pki: pki.ca.issue(common_name, sans, organization=organization)


def crafted(subject: list[tuple[ObjectIdentifier, str]], *extensions: x509.ExtensionType) -> Make:
    return lambda pki: pki.crafted(subject, list(extensions))


def under_a_leaf(pki: Pki) -> Issued:
    return pki.crafted([(CN, "search")], by=pki.good)


def without_intermediate(pki: Pki) -> Issued:
    made = pki.ca.intermediate("Between").issue("search")
    return replace(made, chain=made.cert_path)


def under_expired(pki: Pki) -> Issued:
    return Authority(pki.folder, "Old", not_before=NOW - 9 * HOUR, not_after=NOW - HOUR, above=pki.ca).issue("search")


# Who is let in, by name: (what he shows, how it must end on every listener).
GOOD = (Outcome.SERVED,)
DISTRUSTED = (Outcome.CLOSED,)
ROWS: dict[str, tuple[Make, tuple[Outcome, ...]]] = {
    "common name": (named("search"), GOOD),
    "common name, with an organization": (named("search", organization="Any"), GOOD),
    "common name, RSA key": (lambda pki: pki.ca.issue("search", key="rsa"), GOOD),
    "no extended key usage": (lambda pki: pki.ca.issue("search", client=False, server=False), GOOD),
    "whole subject": (crafted([(ORGANIZATION, "Example"), (CN, "batch")]), GOOD),
    "DNS name, no subject": (named("", "DNS:search.example.com"), GOOD),
    "DNS name among others": (named("x", "DNS:a.example.com", "DNS:search.example.com", "IP:10.0.0.1"), GOOD),
    "URI": (named("", "URI:spiffe://node/search"), GOOD),
    "under an intermediate, with it": (lambda pki: pki.ca.intermediate("Between").issue("search"), GOOD),
    "under two, with them": (lambda pki: pki.ca.intermediate("A").intermediate("B").issue("search"), GOOD),
    # -- no trust
    "no certificate": (lambda pki: None, DISTRUSTED),
    "another authority": (lambda pki: pki.other.issue("search"), DISTRUSTED),
    "another authority of the same name": (lambda pki: pki.twin.issue("search"), DISTRUSTED),
    "self-signed": (lambda pki: pki.self_signed(), DISTRUSTED),
    "expired": (lambda pki: pki.ca.issue("search", not_after=NOW - HOUR), DISTRUSTED),
    "not yet valid": (lambda pki: pki.ca.issue("search", not_before=NOW + HOUR), DISTRUSTED),
    "for servers only": (lambda pki: pki.ca.issue("search", client=False), DISTRUSTED),
    "without its intermediate": (without_intermediate, DISTRUSTED),
    "under an expired intermediate": (under_expired, DISTRUSTED),
    "under a certificate that is no authority": (under_a_leaf, DISTRUSTED),
    # -- no name that is listed
    "the server's own": (lambda pki: pki.server, REFUSED),
    "allowed name as prefix": (named("searcher"), REFUSED),
    "allowed name as suffix": (named("research"), REFUSED),
    "allowed name inside": (named("a search b"), REFUSED),
    "allowed name and a NUL": (crafted([(CN, "search\0.evil")]), REFUSED),
    "allowed name after a NUL": (crafted([(CN, "evil\0search")]), REFUSED),
    "another case": (named("Search"), REFUSED),
    "trailing dot": (named("search."), REFUSED),
    "trailing blank": (named("search "), REFUSED),
    "allowed name first of two": (crafted([(CN, "search"), (CN, "evil")]), REFUSED),
    "allowed name last of two": (crafted([(CN, "evil"), (CN, "search")]), REFUSED),
    "allowed name twice": (crafted([(CN, "search"), (CN, "search")]), REFUSED),
    "allowed name as organization": (crafted([(ORGANIZATION, "search"), (CN, "evil")]), REFUSED),
    "allowed name only as DNS name": (named("evil", "DNS:search"), REFUSED),
    "common name of an allowed subject": (named("batch"), REFUSED),
    "allowed subject, other organization": (named("batch", organization="Evil"), REFUSED),
    "allowed subject, other order": (crafted([(CN, "batch"), (ORGANIZATION, "Example")]), REFUSED),
    "allowed subject, and more": (
        crafted([(ORGANIZATION, "Example"), (CN, "batch"), (NameOID.ORGANIZATIONAL_UNIT_NAME, "x")]),
        REFUSED,
    ),
    "text of an allowed subject as common name": (crafted([(CN, "CN=batch,O=Example")]), REFUSED),
    "allowed DNS name as common name": (named("search.example.com"), REFUSED),
    "allowed DNS name as URI": (crafted([(CN, "evil")], san(URI("search.example.com"))), REFUSED),
    "allowed DNS name as mail address": (crafted([(CN, "evil")], san(EMAIL("search.example.com"))), REFUSED),
    "allowed URI as DNS name": (crafted([(CN, "evil")], san(DNS("spiffe://node/search"))), REFUSED),
    "allowed DNS name, another case": (named("evil", "DNS:SEARCH.example.com"), REFUSED),
    "allowed DNS name, trailing dot": (named("evil", "DNS:search.example.com."), REFUSED),
    "allowed DNS name and a NUL": (crafted([(CN, "evil")], san(DNS("search.example.com\0.evil"))), REFUSED),
    "below an allowed DNS name": (named("evil", "DNS:a.search.example.com"), REFUSED),
    "wildcard over an allowed DNS name": (named("evil", "DNS:*.example.com"), REFUSED),
    "allowed URI, and more": (named("evil", "URI:spiffe://node/search/x"), REFUSED),
    "no name at all": (lambda pki: pki.crafted([]), REFUSED),
    # -- what cannot be read
    "a name that is none": (
        lambda pki: pki.crafted(
            [(CN, "search"), (ORGANIZATION, "aaaaaa")], patch=(b"\x0c\x06aaaaaa", b"\x13\x06aa\0aaa")
        ),
        REFUSED,
    ),
    "an alternative name of a kind nobody reads": (
        crafted([(CN, "evil")], x509.UnrecognizedExtension(SAN, bytes.fromhex("3006a30430023000"))),
        REFUSED,
    ),
}
