"""Who may do what: API keys with roles, and the names in client certificates.

Theory of operation. A request has a need, which stands in its program's table of routes or RPCs; a key has a role; the
table below says which roles meet which needs. First it is found out who asks (`identify`, `refuse_names`), then whether
they may (`authorize`). Authentication is on as soon as a key is configured or a key file exists, also an empty one:
revoking the last key shuts everybody out instead of letting everybody in. Keys are stored as SHA-256; they are random
and long, so nothing slower is needed against guessing.

    need        asked by                                      admin  operator  inference  read
    open        /health and /ready, where open_health is set    -        -         -        -    (no key at all)
    any         Info, health, reflection, docs, lists of models yes      yes       yes      yes
    read        GET of the management API                       yes      yes       no       yes
    inference   texts: gRPC, and POST of the gateway            yes      yes       yes      no
    operate     POST of the management API, archives of models  yes      yes       no       no
    admin       DELETE of the management API, and its keys      yes      no        no       no

Certificates are compared by exact names, never by a part of one: an entry of allowed_subjects is a common name, or,
with an equals sign in it, a whole subject as RFC 4514 writes it; an entry of allowed_sans is one subject alternative
name. One match is enough.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from appliance.core import fields as check
from appliance.core.problems import Kind, Problem, invalid

ROLES = ("admin", "operator", "inference", "read")
KEY_PREFIX = "tei-"
# HTTP headers and gRPC metadata with a key: as OpenAI's clients send it, as Azure's, and as others.
CREDENTIALS = ("authorization", "api-key", "x-api-key")
BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)
BASIC = re.compile(r"basic +([A-Za-z0-9+/]+=*) *", re.IGNORECASE)
NO_KEY = re.compile(r"(?:bearer|basic)? *", re.IGNORECASE)  # what a client sends that has none
PLAIN = re.compile(r" *(\S+) *")
KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
SHA256 = re.compile(r"[0-9a-f]{64}")

# The same for OpenAPI; any one of them is enough.
SCHEMES: dict[str, dict[str, str]] = {
    "key": {"type": "http", "scheme": "bearer"},
    "basic": {"type": "http", "scheme": "basic", "description": "The key as password, or as user without a password"},
    **{name: {"type": "apiKey", "in": "header", "name": name} for name in CREDENTIALS[1:]},
}


class Need(StrEnum):
    OPEN = "open"
    ANY = "any"
    READ = "read"
    INFERENCE = "inference"
    OPERATE = "operate"
    ADMIN = "admin"


MEETS: dict[str, frozenset[Need]] = {
    "admin": frozenset(Need),
    "operator": frozenset({Need.OPEN, Need.ANY, Need.READ, Need.INFERENCE, Need.OPERATE}),
    "inference": frozenset({Need.OPEN, Need.ANY, Need.INFERENCE}),
    "read": frozenset({Need.OPEN, Need.ANY, Need.READ}),
}


@dataclass(frozen=True)
class Key:
    """``sha256``: of the key itself, in hex."""

    name: str
    sha256: str
    role: str


@dataclass(frozen=True)
class CertificateNames:
    """Of a client certificate: common name, whole subject (RFC 4514), subject alternative names."""

    common_name: str
    subject: str
    sans: tuple[str, ...]


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


@check.with_schema({"type": "string", "pattern": f"^{KEY_NAME.pattern}$"})
def key_name(value: Any) -> str:
    if not isinstance(value, str) or not KEY_NAME.fullmatch(value):
        raise ValueError(f"must have 1 to 64 letters, digits and . _ @ -, not {check.shown(value)}")
    return value


@check.with_schema({"type": "string", "pattern": f"^{SHA256.pattern}$"})
def sha256_hex(value: Any) -> str:
    if not isinstance(value, str) or not SHA256.fullmatch(value):
        raise ValueError("must be the SHA-256 of the key: 64 digits 0-9 a-f (appliance keys create writes it)")
    return value


@check.with_schema({"enum": list(ROLES)})
def role(value: Any) -> str:
    if value not in ROLES:
        raise ValueError(f"must be one of {', '.join(ROLES)}")
    return str(value)


KEY_CHECKS: dict[str, check.Check] = {"name": key_name, "sha256": sha256_hex, "role": role}
NEW_KEY = check.Fields({"name": key_name, "role": role}, required=("name", "role"))


def keys(value: Any) -> tuple[Key, ...]:
    """`[[keys]]`. Raises: ValueError or Problem; the message never repeats what may be a key."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(entry, Mapping) for entry in value):
        raise ValueError("must be a list of tables [[keys]], each with name, sha256 and role")
    listed = tuple(Key(**key_fields(place).values(entry)) for place, entry in enumerate(value))
    names = [key.name for key in listed]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise invalid(f'keys: two keys are named "{twice}": rename one')
    return listed


def key_fields(place: int) -> check.Fields:
    """place: of the entry in its list, which errors name."""
    return check.Fields(
        KEY_CHECKS,
        required=tuple(KEY_CHECKS),
        name=f'keys[{place}]: field "{{}}"',
        unknown=f"keys[{place}]: unknown field{{}}",
        shown=lambda name: f' "{name}"' if re.fullmatch(r"[a-zA-Z0-9_]{1,16}", str(name)) else "",
    )


def new_key(body: Any) -> tuple[str, str]:
    """Name and role of a key that a caller asks for. Raises: Problem."""
    values = NEW_KEY.values(check.required_object(body, "A key must be an object with name and role"))
    return values["name"], values["role"]


def loopback(peer: str) -> bool:
    """Whether an address is one of this machine alone."""
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback  # an IPv4 caller of a listener on "::"


def presented(sent: Iterable[tuple[str, str]]) -> str | None:
    """The key among what was sent, (one of CREDENTIALS, its value) each; None for none that can be read.

    Raises: Problem when there are different ones: what one part of the way has checked must be what counts at its end.
    """
    keys = [(name, key_in(name, value)) for name, value in sent if not NO_KEY.fullmatch(value)]
    if len({key for _, key in keys}) > 1:
        where = " and ".join(dict.fromkeys(name for name, _ in keys))
        raise Problem(Kind.UNAUTHENTICATED, "UNAUTHENTICATED", f"There are different keys in {where}: send one of them")
    return keys[0][1] if keys else None


def key_in(name: str, value: str) -> str | None:
    """The key in one value, None where it cannot be read."""
    if name != "authorization":
        match = PLAIN.fullmatch(value)
        return match[1] if match else None
    if match := BEARER.fullmatch(value):
        return match[1]
    match = BASIC.fullmatch(value)
    try:
        pair = base64.b64decode(match[1], validate=True).decode("utf-8", "surrogateescape") if match else ""
    except ValueError:
        return None
    user, _, password = pair.partition(":")
    match = re.fullmatch(r"\S+", password or user)
    return match[0] if match else None


def holder(keys: Sequence[Key], secret: str | None) -> Key | None:
    """Whose key this is. Every key is compared, so that the time tells nothing."""
    if secret is None:
        return None
    sha256, owner = digest(secret), None
    for key in keys:
        if hmac.compare_digest(key.sha256, sha256):
            owner = key
    return owner


class Principal(NamedTuple):
    """Who makes a request: a name for the audit, and the role of their key; None where no key is asked for.

    refusal: why they are let in only where it is open.
    """

    name: str
    role: str | None = None
    refusal: Problem | None = None


ANONYMOUS = "anonymous"
NOBODY = Principal(ANONYMOUS)  # no key is asked for, and no certificate was shown


def key_of(keys: Sequence[Key], sent: Sequence[tuple[str, str]]) -> Key:
    """The key that was presented (see `presented`). Raises: Problem UNAUTHENTICATED."""
    key = holder(keys, presented(sent))
    if key is None:
        words = "A key is needed" if all(NO_KEY.fullmatch(value) for _, value in sent) else "This key is not known"
        hint = "send it as Authorization: Bearer KEY (gRPC: metadata authorization)"
        raise Problem(Kind.UNAUTHENTICATED, "UNAUTHENTICATED", f"{words}: {hint}")
    return key


def identify(keys: Sequence[Key] | None, sent: Sequence[tuple[str, str]], names: CertificateNames | None) -> Principal:
    """Who it is. keys: None where no key is asked for. sent: see `presented`. names: of their certificate."""
    if keys is None:
        return Principal(names.common_name or names.subject) if names else NOBODY
    try:
        key = key_of(keys, sent)
    except Problem as problem:
        return Principal(ANONYMOUS, refusal=problem)
    return Principal(key.name, key.role)


def authorize(principal: Principal, need: Need) -> None:
    """Raises: Problem UNAUTHENTICATED or FORBIDDEN unless they may do what has this need."""
    if need is Need.OPEN:
        return
    if principal.refusal:
        raise principal.refusal
    if principal.role is not None and need not in MEETS[principal.role]:
        able = ", ".join(role for role in ROLES if need in MEETS[role])
        raise Problem(
            Kind.FORBIDDEN,
            "FORBIDDEN",
            f'Key "{principal.name}" has the role {principal.role}; this takes one of: {able}',
        )


def effective(need: Need, open_health: bool) -> Need:
    """What a route that can be open needs now: it is open only where open_health is set."""
    return Need.ANY if need is Need.OPEN and not open_health else need


def refuse_names(names: CertificateNames | None, subjects: Sequence[str], sans: Sequence[str]) -> None:
    """Raises: Problem FORBIDDEN unless a name of the certificate is on one of the lists. Empty lists allow all."""
    if not subjects and not sans:
        return
    if names is None:
        raise no_certificate()
    # A caller who chooses their common name could write a whole subject into it.
    listed = any(entry == (names.subject if "=" in entry else names.common_name) for entry in subjects)
    if not listed and set(names.sans).isdisjoint(sans):
        raise Problem(
            Kind.FORBIDDEN,
            "FORBIDDEN",
            f'The certificate of "{names.subject[:200]}" is on neither allowed_subjects nor allowed_sans',
        )


def no_certificate() -> Problem:
    return Problem(Kind.UNAUTHENTICATED, "UNAUTHENTICATED", "A client certificate is needed, and none was sent")


def mapping(keys: Sequence[Key]) -> dict[str, list[Mapping[str, str]]]:
    """As TOML has them."""
    return {"keys": [{"name": key.name, "sha256": key.sha256, "role": key.role} for key in keys]}
