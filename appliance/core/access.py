"""Who may do what: API keys with roles, and the names in client certificates.

Theory of operation. A request has a need, by its route and verb or its RPC; a key has a role; the table says which
roles meet which needs. Authentication is on as soon as a key is configured or a key file exists, also an empty one: so
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
from typing import Any

from appliance.core import fields as check
from appliance.core.problems import Kind, Problem, invalid, nearest, quoted

ROLES = ("admin", "operator", "inference", "read")
KEY_PREFIX = "tei-"
# HTTP headers and gRPC metadata with a key: as OpenAI's clients send it, as Azure's, and as others.
CREDENTIALS = ("authorization", "api-key", "x-api-key")
BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)
BASIC = re.compile(r"basic +([A-Za-z0-9+/]+=*) *", re.IGNORECASE)
NO_KEY = re.compile(r"(?:bearer|basic)? *", re.IGNORECASE)  # what a client sends that was given none
PLAIN = re.compile(r" *(\S+) *")

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
class Names:
    """Of a client certificate: common name, whole subject (RFC 4514), subject alternative names."""

    common_name: str
    subject: str
    sans: tuple[str, ...]


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def key_name(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}", value):
        raise ValueError(f"must have 1 to 64 letters, digits and . _ @ -, not {check.shown(value)}")
    return value


def sha256_hex(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
        raise ValueError("must be the SHA-256 of the key: 64 digits 0-9 a-f (appliance keys create writes it)")
    return value


def role(value: Any) -> str:
    if value not in ROLES:
        raise ValueError(f"must be one of {', '.join(ROLES)}")
    return str(value)


KEY_CHECKS: dict[str, check.Check] = {"name": key_name, "sha256": sha256_hex, "role": role}


def keys(value: Any) -> tuple[Key, ...]:
    """`[[keys]]`. Raises: ValueError or Problem; the message never repeats what may be a key."""
    found = []
    if not isinstance(value, (list, tuple)) or not all(isinstance(entry, Mapping) for entry in value):
        raise ValueError("must be a list of tables [[keys]], each with name, sha256 and role")
    for place, entry in enumerate(value):
        for name in entry:
            if name not in KEY_CHECKS:
                shown = f' "{name}"' if re.fullmatch(r"[a-zA-Z0-9_]{1,16}", name) else ""
                raise invalid(f"keys[{place}]: unknown field{shown}{nearest(name, KEY_CHECKS)}")
        values = {}
        for name, checked in KEY_CHECKS.items():
            if name not in entry:
                raise invalid(f'keys[{place}]: field "{name}" is required')
            try:
                values[name] = checked(entry[name])
            except ValueError as error:
                raise invalid(f'keys[{place}]: field "{name}" {error}') from None
        found.append(Key(**values))
    names = [key.name for key in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise invalid(f'keys: two keys are named "{twice}": rename one')
    return tuple(found)


def wanted(given: Any) -> tuple[str, str]:
    """Name and role of a key that somebody asks for. Raises: Problem."""
    if not isinstance(given, Mapping):
        raise invalid(f"A key must be an object with name and role, not {check.shown(given)}")
    checks = {"name": key_name, "role": role}
    for field in given:
        if field not in checks:
            raise invalid(f"Unknown field {quoted(field)}{nearest(str(field), checks)}")
    values = {}
    for field, checked in checks.items():
        if field not in given:
            raise invalid(f'Field "{field}" is required')
        try:
            values[field] = checked(given[field])
        except ValueError as error:
            raise invalid(f'Field "{field}" {error}') from None
    return values["name"], values["role"]


def loopback(peer: str) -> bool:
    """Whether an address is one of this machine alone."""
    try:
        found = ipaddress.ip_address(peer)
    except ValueError:
        return False
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback  # an IPv4 caller of a listener on "::"


def presented(sent: Iterable[tuple[str, str]]) -> str | None:
    """The key among what was sent, (one of CREDENTIALS, its value) each; None for none that can be read.

    Raises: Problem when there are different ones: what one part of the way has checked must be what counts at its end.
    """
    found = [(name, key_in(name, value)) for name, value in sent if not NO_KEY.fullmatch(value)]
    if len({key for _, key in found}) > 1:
        where = " and ".join(dict.fromkeys(name for name, _ in found))
        raise Problem(Kind.UNAUTHENTICATED, "UNAUTHENTICATED", f"There are different keys in {where}: send one of them")
    return found[0][1] if found else None


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


def holder(known: Sequence[Key], secret: str | None) -> Key | None:
    """Whose key this is. Every known key is compared, so that the time tells nothing."""
    if secret is None:
        return None
    wanted, found = digest(secret), None
    for key in known:
        if hmac.compare_digest(key.sha256, wanted):
            found = key
    return found


def refuse(known: Sequence[Key], sent: Sequence[tuple[str, str]], need: Need) -> Key | None:
    """The key that was presented and meets the need. Raises: Problem UNAUTHENTICATED or FORBIDDEN.

    For where authentication is on. For an open need no key is asked for. sent: see `presented`.
    """
    if need is Need.OPEN:
        return None
    key = holder(known, presented(sent))
    if key is None:
        words = "A key is needed" if all(NO_KEY.fullmatch(value) for _, value in sent) else "This key is not known"
        hint = "send it as Authorization: Bearer KEY (gRPC: metadata authorization)"
        raise Problem(Kind.UNAUTHENTICATED, "UNAUTHENTICATED", f"{words}: {hint}")
    if need not in MEETS[key.role]:
        able = ", ".join(role for role in ROLES if need in MEETS[role])
        raise Problem(
            Kind.FORBIDDEN, "FORBIDDEN", f'Key "{key.name}" has the role {key.role}; this takes one of: {able}'
        )
    return key


def rest_need(verb: str, path: str, open_health: bool) -> Need:
    """Of the management API."""
    if path in ("/health", "/ready"):
        return Need.OPEN if open_health else Need.ANY
    if path == "/keys" or path.startswith("/keys/"):
        return Need.ADMIN
    if path.startswith("/models/") and path.endswith("/archive"):
        return Need.OPERATE
    return {"GET": Need.READ, "HEAD": Need.READ, "OPTIONS": Need.READ, "DELETE": Need.ADMIN}.get(verb, Need.OPERATE)


def gateway_need(verb: str, path: str, open_health: bool) -> Need:
    if path == "/health":
        return Need.OPEN if open_health else Need.ANY
    return Need.ANY if verb in ("GET", "HEAD", "OPTIONS") else Need.INFERENCE


def grpc_need(method: str, open_health: bool) -> Need:
    """method: the full name, "/package.Service/Method"."""
    service, _, name = method.lstrip("/").partition("/")
    if service == "grpc.health.v1.Health":
        return Need.OPEN if open_health else Need.ANY
    if service.startswith("grpc.reflection.") or name == "Info":
        return Need.ANY
    return Need.INFERENCE


def refuse_names(names: Names | None, subjects: Sequence[str], sans: Sequence[str]) -> None:
    """Raises: Problem FORBIDDEN unless a name of the certificate is on one of the lists. Empty lists allow all."""
    if not subjects and not sans:
        return
    if names is None:
        raise no_certificate()
    # Whoever chooses his common name could write a whole subject into it.
    listed = any(entry == (names.subject if "=" in entry else names.common_name) for entry in subjects)
    if not listed and set(names.sans).isdisjoint(sans):
        raise Problem(
            Kind.FORBIDDEN,
            "FORBIDDEN",
            f'The certificate of "{names.subject[:200]}" is on neither allowed_subjects nor allowed_sans',
        )


def no_certificate() -> Problem:
    return Problem(Kind.UNAUTHENTICATED, "UNAUTHENTICATED", "A client certificate is needed, and none was sent")


def mapping(found: Sequence[Key]) -> dict[str, list[Mapping[str, str]]]:
    """As TOML has them."""
    return {"keys": [{"name": key.name, "sha256": key.sha256, "role": key.role} for key in found]}
