"""The settings of TLS: certificates of our listeners, and those for calls to other machines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from appliance.core import fields as check
from appliance.core.knobs import knob, values_of
from appliance.core.problems import invalid, quoted

BLANK_AFTER_COMMA = re.compile(r"(?<!\\),\s")  # RFC 4514 escapes a blank that belongs to a value


# grpc's BoringSSL has no setting for the lowest version. This suite exists in TLS 1.2 only and needs a shared secret
# that no client has: so a handshake of 1.2 fails, while one of 1.3, whose suites are fixed, works.
ONLY_TLS_1_3 = {"GRPC_SSL_CIPHER_SUITES": "ECDHE-PSK-CHACHA20-POLY1305"}


@dataclass(frozen=True)
class TlsSettings:
    """`[tls]`: certificates for all listeners, and whom they let in. Off without cert_file. Paths are absolute."""

    cert_file: str = knob("", check.text())
    key_file: str = knob("", check.text())
    client_ca_file: str = knob("", check.text())
    require_client_cert: bool = knob(False, check.boolean)
    allowed_subjects: tuple[str, ...] = knob((), check.sequence_of(check.text(1024), 10_000))
    allowed_sans: tuple[str, ...] = knob((), check.sequence_of(check.text(1024), 10_000))
    min_version: str = knob("1.2", check.one_of("1.2", "1.3"))

    @property
    def environment(self) -> dict[str, str]:
        """What a program with a gRPC server needs in its environment, so that the lowest version holds."""
        return ONLY_TLS_1_3 if self.min_version == "1.3" else {}

    @classmethod
    def parse(cls, table: Any) -> TlsSettings:
        """Half of a configuration is an error: a switch that does nothing would be taken for one that works."""
        tls = cls(**values_of(cls, "tls", table))
        if not (tls.cert_file and tls.key_file):
            raise invalid('"tls.cert_file" and "tls.key_file" are both needed for TLS: set both, or leave [tls] out')
        if tls.require_client_cert != bool(tls.client_ca_file):
            raise invalid(
                '"tls.require_client_cert" needs "tls.client_ca_file", and the other way round: set both or neither'
            )
        for key in ("allowed_subjects", "allowed_sans"):
            if table.get(key) == []:
                raise invalid(f'"tls.{key}" is empty, which would let nobody in or everybody: leave it out, or fill it')
        for entry in tls.allowed_subjects:
            if "=" in entry and BLANK_AFTER_COMMA.search(entry):
                raise invalid(
                    f'"tls.allowed_subjects" {quoted(entry)} fits no certificate: no blanks behind the commas'
                )
        if (tls.allowed_subjects or tls.allowed_sans) and not tls.require_client_cert:
            raise invalid('"tls.allowed_subjects" and "tls.allowed_sans" need "tls.require_client_cert" to do anything')
        for key in ("cert_file", "key_file", "client_ca_file"):
            refuse_relative(f"tls.{key}", getattr(tls, key))
        return tls

    @property
    def on(self) -> bool:
        return bool(self.cert_file)


@dataclass(frozen=True)
class RemoteTlsSettings:
    """`[remote_tls]`: certificates for calls to replicas and appliances on other machines. Off without ca_file. Paths
    are absolute."""

    ca_file: str = knob("", check.text())
    cert_file: str = knob("", check.text())
    key_file: str = knob("", check.text())

    @classmethod
    def parse(cls, table: Any) -> RemoteTlsSettings:
        tls = cls(**values_of(cls, "remote_tls", table))
        if not tls.ca_file:
            raise invalid('"remote_tls.ca_file" is needed: without it nobody\'s certificate is trusted')
        if bool(tls.cert_file) != bool(tls.key_file):
            raise invalid('"remote_tls.cert_file" and "remote_tls.key_file" belong together: set both or neither')
        for key in ("ca_file", "cert_file", "key_file"):
            refuse_relative(f"remote_tls.{key}", getattr(tls, key))
        return tls

    @property
    def on(self) -> bool:
        return bool(self.ca_file)


def refuse_relative(key: str, path: str) -> None:
    """Raises: Problem; an empty path is none."""
    if path and not path.startswith("/"):
        raise invalid(f'"{key}" must be an absolute path, not {quoted(path)}')
