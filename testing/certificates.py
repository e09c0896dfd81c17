"""Certificates made at test time: authorities, intermediates, and what they issue, good or bad on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from itertools import count
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

KeyKind = Literal["ec", "ed25519", "rsa"]
Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey

A_DAY = timedelta(days=1)
NUMBERS = count(1)  # of files, so that no two share a path
EARLIER = timedelta(hours=1)  # so that a clock that is a little behind does not refuse what is new


@dataclass(frozen=True)
class Issued:
    """Files in PEM. A peer presents ``chain``: the certificate, then its intermediates, without the root."""

    cert_path: Path
    key_path: Path
    chain: Path


class Authority:
    """A certificate authority whose files lie in ``folder``. Two of the same name differ in their keys."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        not_before: datetime | None = None,
        not_after: datetime | None = None,
        above: Authority | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.name, self.above = folder, name, above
        self.key: Key = new_key("ec")
        subject = named(name, "Test authority")
        signer = above or self
        builder = _builder(subject, above.certificate.subject if above else subject, self.key, not_before, not_after)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        builder = builder.add_extension(_usage(authority=True), critical=True)
        builder = builder.add_extension(_signed_by(signer.key), critical=False)
        self.certificate: x509.Certificate = builder.sign(signer.key, _digest(signer.key))
        self.pem = self._file("ca.pem", self.certificate.public_bytes(Encoding.PEM))

    def intermediate(self, name: str) -> Authority:
        """An authority under this one. A peer that trusts this one needs the ``chain`` of what it issues."""
        return Authority(self.folder, name, above=self)

    def issue(
        self,
        common_name: str = "",
        sans: Sequence[str] = (),
        *,
        days: float = 1,
        not_before: datetime | None = None,
        not_after: datetime | None = None,
        organization: str | None = None,
        key: KeyKind = "ec",
        client: bool = True,
        server: bool = True,
    ) -> Issued:
        """A certificate valid from an hour ago and for ``days``, unless the dates say otherwise.

        common_name: none when empty. sans: "DNS:localhost", "IP:127.0.0.1", "URI:spiffe://node/a", "EMAIL:a@b.c".
        client, server: what its extended key usage allows; with neither it has no such extension, thus may do both.
        """
        own = new_key(key)
        until = not_after or datetime.now(UTC) + timedelta(days=days)
        subject = named(common_name, organization)
        builder = _builder(subject, self.certificate.subject, own, not_before, until)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(authority=False), critical=True)
        builder = builder.add_extension(_signed_by(self.key), critical=False)
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH] * client + [ExtendedKeyUsageOID.SERVER_AUTH] * server
        if uses:
            builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        if sans:
            builder = builder.add_extension(x509.SubjectAlternativeName([_san(san) for san in sans]), critical=False)
        certificate = builder.sign(self.key, _digest(self.key)).public_bytes(Encoding.PEM)
        private = own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        key_path = self._file("issued.key", private)
        key_path.chmod(0o600)
        return Issued(
            cert_path=self._file("issued.pem", certificate),
            key_path=key_path,
            chain=self._file("chain.pem", certificate + self._intermediates()),
        )

    def _intermediates(self) -> bytes:
        if self.above is None:
            return b""
        return self.certificate.public_bytes(Encoding.PEM) + self.above._intermediates()

    def _file(self, ending: str, content: bytes) -> Path:
        path = self.folder / f"{next(NUMBERS)}-{ending}"
        path.write_bytes(content)
        return path


def new_key(kind: KeyKind) -> Key:
    if kind == "ec":
        return ec.generate_private_key(ec.SECP256R1())
    if kind == "ed25519":
        return ed25519.Ed25519PrivateKey.generate()
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def named(common_name: str, organization: str | None) -> x509.Name:
    """The subject in the order O, CN; empty when it has neither."""
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization)] if organization else []
    parts += [x509.NameAttribute(NameOID.COMMON_NAME, common_name)] if common_name else []
    return x509.Name(parts)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: Key, not_before: datetime | None, not_after: datetime | None
) -> x509.CertificateBuilder:
    until = not_after or datetime.now(UTC) + A_DAY
    since = not_before or min(datetime.now(UTC), until - A_DAY) - EARLIER
    return x509.CertificateBuilder(
        subject_name=subject,
        issuer_name=issuer,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=since,
        not_valid_after=until,
    ).add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _signed_by(key: Key) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _digest(key: Key) -> hashes.SHA256 | None:
    return None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()


def _san(san: str) -> x509.GeneralName:
    kind, _, name = san.partition(":")
    if kind == "DNS":
        return x509.DNSName(name)
    if kind == "IP":
        return x509.IPAddress(ip_address(name))
    if kind == "URI":
        return x509.UniformResourceIdentifier(name)
    if kind == "EMAIL":
        return x509.RFC822Name(name)
    raise ValueError(f"{san!r} starts with none of DNS:, IP:, URI:, EMAIL:")
