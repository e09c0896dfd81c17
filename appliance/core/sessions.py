"""Sessions of a browser: who has shown a key lately, written into a cookie that only this appliance can write.

Theory of operation. A cookie holds the name of a key, a part of the key's digest, when it ends, and a random number,
and behind that a code over all of it (HMAC-SHA256) with a secret that stays in the data folder. Nothing is kept for it
here: any process may read it, and a key that is revoked, or made anew under its name, ends its sessions. A session of
nobody serves where no key is asked for; it has a token all the same.

A form bears a token made of the cookie, so that a page of another site cannot send it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Sequence
from typing import NamedTuple

from appliance.core.access import Key

LASTS_SECS = 12 * 3600
DIGEST_CHARACTERS = 16


class BrowserSession(NamedTuple):
    """key: whose it is; empty for nobody's. digest: the beginning of the key's. ends: seconds since 1970."""

    key: str
    digest: str
    ends: int
    nonce: str


def begin(key: Key | None, now: float, nonce: str) -> BrowserSession:
    """nonce: a random text."""
    name, digest = (key.name, key.sha256[:DIGEST_CHARACTERS]) if key else ("", "")
    return BrowserSession(name, digest, int(now) + LASTS_SECS, nonce)


def cookie(session: BrowserSession, secret: bytes) -> str:
    payload = base64.urlsafe_b64encode(json.dumps(session).encode()).decode().rstrip("=")
    return f"{payload}.{code(secret, 'session', payload)}"


def read(text: str, secret: bytes, now: float) -> BrowserSession | None:
    """The session in a cookie; None for one that we have not written, or that is over."""
    payload, _, given = text.partition(".")
    if not hmac.compare_digest(given.encode(), code(secret, "session", payload).encode()):
        return None
    session = BrowserSession(*json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))))
    return session if session.ends > now else None


def holder(session: BrowserSession, keys: Sequence[Key]) -> Key | None:
    """The key of a session, if there still is the very same one."""
    for key in keys:
        if key.name == session.key and hmac.compare_digest(key.sha256[:DIGEST_CHARACTERS], session.digest):
            return key
    return None


def cookie_name(secret: bytes) -> str:
    """Of its own for each appliance: browsers keep one cookie of a name for all ports of a host."""
    return f"tei_console_{code(secret, 'name', '')[:8]}"


def form_token(text: str, secret: bytes) -> str:
    """Of the forms of a session. text: its cookie."""
    return code(secret, "form", text)


def is_form_token(token: str, text: str, secret: bytes) -> bool:
    return hmac.compare_digest(token.encode(), form_token(text, secret).encode())


def code(secret: bytes, purpose: str, text: str) -> str:
    return hmac.new(secret, f"{purpose}:{text}".encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
