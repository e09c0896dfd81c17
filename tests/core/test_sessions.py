"""A session is read back as it was written, by whoever has the secret, until it is over or its key is another one."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core import sessions
from appliance.core.access import Key
from appliance.core.sessions import LASTS_SECS

KEY = Key("ops", "a" * 64, "operator")
SECRET, OTHER = b"s" * 32, b"t" * 32
NOW = 1_000_000.0


def test_it_is_read_back_until_it_is_over() -> None:
    session = sessions.begin(KEY, NOW, "n")
    text = sessions.cookie(session, SECRET)
    assert sessions.read(text, SECRET, NOW) == sessions.read(text, SECRET, NOW + LASTS_SECS - 1) == session
    assert sessions.read(text, SECRET, NOW + LASTS_SECS) is None
    assert sessions.read(text, OTHER, NOW) is None


def test_it_ends_with_its_key() -> None:
    session = sessions.begin(KEY, NOW, "n")
    assert sessions.holder(session, [Key("other", "b" * 64, "admin"), KEY]) == KEY
    assert sessions.holder(session, [Key("other", "a" * 64, "admin")]) is None
    assert sessions.holder(session, [Key("ops", "c" * 64, "admin")]) is None, "it was revoked, and made anew"


def test_nobody_has_no_key() -> None:
    session = sessions.begin(None, NOW, "n")
    assert sessions.read(sessions.cookie(session, SECRET), SECRET, NOW) == session
    assert sessions.holder(session, [KEY, Key("x", "", "admin")]) is None


def test_no_other_cookie_passes() -> None:
    text = sessions.cookie(sessions.begin(KEY, NOW, "n"), SECRET)
    payload, _, given_code = text.partition(".")
    promoted = json.dumps(["admin", "a" * 16, int(NOW) + 10, "n"]).encode()
    forged = base64.urlsafe_b64encode(promoted).decode().rstrip("=")
    for wrong in ("", ".", payload, f"{payload}.", f"{forged}.{given_code}", f"{text}0", f"{payload}=.{given_code}"):
        assert sessions.read(wrong, SECRET, NOW) is None, wrong


@given(st.text())
def test_any_text_is_a_cookie_or_none(text: str) -> None:
    assert sessions.read(text, SECRET, NOW) is None


def test_a_token_belongs_to_its_session() -> None:
    one, other = (sessions.cookie(sessions.begin(KEY, NOW, nonce), SECRET) for nonce in "no")
    token = sessions.form_token(one, SECRET)
    assert sessions.is_form_token(token, one, SECRET)
    assert not sessions.is_form_token(token, other, SECRET)
    assert not sessions.is_form_token(token, one, OTHER)
    assert not sessions.is_form_token(one.partition(".")[2], one, SECRET), "the code of the cookie is no token"


@pytest.mark.parametrize("name", ["ü", "a b", "x" * 64])
def test_any_name_of_a_key_goes_through_a_cookie(name: str) -> None:
    text = sessions.cookie(sessions.begin(Key(name, "d" * 64, "viewer"), NOW, "n"), SECRET)
    assert text.isascii()
    assert not set(text) & set(' ",;\\')


def test_two_appliances_of_one_host_have_cookies_of_their_own() -> None:
    assert sessions.cookie_name(SECRET) != sessions.cookie_name(OTHER)
    assert sessions.cookie_name(SECRET) == sessions.cookie_name(SECRET)
