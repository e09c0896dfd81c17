"""Who may do what, as a table by hand; names that are compared whole; and refusals that keep secrets."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core import access
from appliance.core.access import CertificateNames, Key, Need, Principal
from appliance.core.problems import Kind, Problem
from appliance.core.settings import Settings, parse
from appliance.core.tls_settings import TlsSettings

SECRET = "tei-CANARY-0123456789"
# The table at the top of core/access.py, by hand: who meets the need.
TABLE: dict[str, str] = {
    "open": "admin operator inference read",
    "any": "admin operator inference read",
    "read": "admin operator read",
    "inference": "admin operator inference",
    "operate": "admin operator",
    "admin": "admin",
}
CASES = list(itertools.product(access.ROLES, Need))


def key(name: str, role: str = "admin") -> Key:
    return Key(name, access.digest(f"{SECRET}-{name}"), role)


def bearer(name: str) -> str:
    return f"Bearer {SECRET}-{name}"


def sent(authorization: str | None) -> list[tuple[str, str]]:
    return [("authorization", authorization)] if authorization is not None else []


def basic(user: str, password: str = "") -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


KNOWN = tuple(key(role, role) for role in access.ROLES)


def admitted(known: Sequence[Key], headers: Sequence[tuple[str, str]], need: Need) -> Principal:
    """Who sends these headers, where keys are asked for. Raises: Problem unless they may do what has this need."""
    principal = access.identify(known, headers, None)
    access.authorize(principal, need)
    return principal


# -- roles and needs --------------------------------------------------------------------------------------------------


def test_the_table_has_every_need_and_role() -> None:
    assert sorted(TABLE) == sorted(Need)
    assert {role for roles in TABLE.values() for role in roles.split()} == set(access.ROLES) == set(access.MEETS)
    assert len(CASES) == 24


@pytest.mark.parametrize(("role", "need"), CASES)
def test_a_role_meets_what_the_table_says(role: str, need: Need) -> None:
    if role in TABLE[need].split():
        assert admitted(KNOWN, sent(bearer(role)), need) == Principal(role, role)
        return
    with pytest.raises(Problem) as refused:
        admitted(KNOWN, sent(bearer(role)), need)
    assert (refused.value.kind, refused.value.code) == (Kind.FORBIDDEN, "FORBIDDEN")
    assert SECRET not in refused.value.message
    for able in TABLE[need].split():
        assert able in refused.value.message


@pytest.mark.parametrize("need", Need)
@pytest.mark.parametrize("known", [(), KNOWN])
@pytest.mark.parametrize("authorization", [None, "", "Bearer", bearer("nobody"), f"{SECRET}-admin"])
def test_who_has_no_key_is_let_in_only_where_it_is_open(
    known: tuple[Key, ...], authorization: str | None, need: Need
) -> None:
    if need is Need.OPEN:
        assert admitted(known, sent(authorization), need).role is None
        return
    with pytest.raises(Problem) as refused:
        admitted(known, sent(authorization), need)
    assert refused.value.kind is Kind.UNAUTHENTICATED
    assert SECRET not in refused.value.message


# -- what is presented ------------------------------------------------------------------------------------------------

PRESENTED: dict[str | None, str | None] = {
    None: None,
    "": None,
    "Bearer k": "k",
    "bearer k": "k",
    "BEARER k": "k",
    "Bearer   k": "k",
    "Bearer k  ": "k",
    "Bearer": None,
    "Bearer ": None,
    "Bearerk": None,
    " Bearer k": None,
    "Bearer\tk": None,
    "Bearer k k": None,
    "Bearer k, Bearer l": None,
    "Bearer k\n": None,
    "Bearer k\nX: y": None,
    "Basic azpr": "k",  # k:k
    "basic  azpr ": "k",
    basic("k"): "k",
    basic("", "k"): "k",
    basic("user", "k"): "k",
    basic("user", "k:l"): "k:l",
    basic("k").rstrip("="): None,
    "Basic aw==": "k",  # without a colon
    basic("", ""): None,
    basic("k k"): None,
    basic("user", "k\n"): None,
    "Basic": None,
    "Basic ": None,
    "Basic azp": None,
    "Basic %%%%": None,
    "Basic azpr azpr": None,
    "Basic //8=": "\udcff\udcff",  # no UTF-8: nobody's
    "Token k": None,
    "k": None,
    "Bearer k Bearer": None,
}


@pytest.mark.parametrize("authorization", PRESENTED)
def test_two_forms_of_header_present_a_key(authorization: str | None) -> None:
    assert access.presented(sent(authorization)) == PRESENTED[authorization]


@given(st.text())
def test_nothing_that_is_presented_is_an_error(authorization: str) -> None:
    secret = access.presented(sent(authorization))
    assert secret is None or secret in authorization
    assert access.holder(KNOWN, secret) is None


@given(st.binary(max_size=30))
def test_no_name_and_password_is_an_error(pair: bytes) -> None:
    secret = access.presented(sent(f"Basic {base64.b64encode(pair).decode()}"))
    assert access.holder(KNOWN, secret) is None


@pytest.mark.parametrize("name", access.CREDENTIALS)
@pytest.mark.parametrize("scheme", ["Bearer {}", "{}"])
def test_each_header_lets_its_key_in(name: str, scheme: str) -> None:
    key = scheme.format(f"{SECRET}-read")
    if (name == "authorization") == (scheme == "{}"):
        with pytest.raises(Problem, match="This key is not known"):
            admitted(KNOWN, [(name, key)], Need.READ)
    else:
        assert admitted(KNOWN, [(name, key)], Need.READ).role == "read"


ADMIN, READ = bearer("admin"), f"{SECRET}-read"
# What was sent, and whether the admin comes in; else the headers that are named.
SEVERAL: dict[str, tuple[list[tuple[str, str]], str | None]] = {
    "the same key three times": (
        [("authorization", ADMIN), ("api-key", f"{SECRET}-admin"), ("x-api-key", f"{SECRET}-admin ")],
        None,
    ),
    "as password and as key": (
        [("authorization", basic("me", f"{SECRET}-admin")), ("api-key", f"{SECRET}-admin")],
        None,
    ),
    "beside a client that was given none": ([("authorization", "Bearer "), ("api-key", f"{SECRET}-admin")], None),
    "and an empty one": ([("authorization", ADMIN), ("x-api-key", "")], None),
    "another one": ([("authorization", ADMIN), ("api-key", READ)], "authorization and api-key"),
    "another one first": ([("api-key", READ), ("authorization", ADMIN)], "api-key and authorization"),
    "one that is unknown": ([("api-key", f"{SECRET}-admin"), ("x-api-key", "x")], "api-key and x-api-key"),
    "one that cannot be read": ([("api-key", f"{SECRET}-admin"), ("authorization", "Digest x")], "authorization"),
    "two of one name": ([("authorization", ADMIN), ("authorization", bearer("read"))], "authorization"),
}


@pytest.mark.parametrize("what", SEVERAL)
def test_a_key_that_is_sent_twice_is_one_and_two_are_none(what: str) -> None:
    headers, named = SEVERAL[what]
    if named is None:
        assert admitted(KNOWN, headers, Need.ADMIN) == Principal("admin", "admin")
        return
    with pytest.raises(Problem, match=f"different keys in .*{named}") as refused:
        admitted(KNOWN, headers, Need.ANY)
    assert refused.value.kind is Kind.UNAUTHENTICATED
    assert SECRET not in refused.value.message
    assert admitted(KNOWN, headers, Need.OPEN).role is None


@given(st.text(st.characters(exclude_categories=()), max_size=30))
def test_any_text_has_a_digest(secret: str) -> None:
    if any("\ud800" <= each <= "\udfff" and not "\udc80" <= each <= "\udcff" for each in secret):
        return  # no header has them: WSGI and gRPC give Latin-1 and ASCII
    assert len(access.digest(secret)) == 64


@pytest.mark.parametrize(
    "secret",
    [
        None,
        "",
        f"{SECRET}-admi",
        f"{SECRET}-admins",
        f"{SECRET}-ADMIN",
        f" {SECRET}-admin",
        access.digest(f"{SECRET}-admin"),  # what the file has is no key
        f"{SECRET}-admin\0",
    ],
)
def test_a_key_is_found_whole_or_not_at_all(secret: str | None) -> None:
    assert access.holder(KNOWN, f"{SECRET}-admin") == KNOWN[0]
    assert access.holder(KNOWN, secret) is None


# -- keys as they are configured --------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"name": "a", "sha256": "0" * 64, "role": "read"}


def changed(**fields: Any) -> list[Mapping[str, Any]]:
    return [{name: value for name, value in {**GOOD, **fields}.items() if value is not ...}]


# What is refused: (the entries, what the message names).
REFUSED_KEYS: dict[str, tuple[Any, str]] = {
    "no list": (SECRET, "list"),
    "a table": ({"key": SECRET}, "list"),
    "entries that are none": ([SECRET], "table"),
    "the key instead of its digest": (changed(sha256=SECRET), 'keys[0]: field "sha256"'),
    "a digest in capitals": (changed(sha256=f"{SECRET}".encode().hex().upper().ljust(64, "A")), "sha256"),
    "a digest that is short": (changed(sha256="0" * 63), "sha256"),
    "a digest and a line break": (changed(sha256="0" * 64 + "\n"), "sha256"),
    "a digest that is a number": (changed(sha256=0), "sha256"),
    "no digest": (changed(sha256=...), "sha256"),
    "no name": (changed(name=...), "name"),
    "no role": (changed(role=...), "role"),
    "the key itself beside it": (changed(key=SECRET), '"key"'),
    "the key as a field": (changed(**{SECRET: 1}), "unknown field"),
    "a role that is none": (changed(role="root"), "admin, operator, inference, read"),
    "the key as the role": (changed(role=SECRET), "role"),
    "the key as the role of a list": (changed(role=[SECRET]), "role"),
    "an empty name": (changed(name=""), "name"),
    "a name that breaks lines": (changed(name="a\nb"), "name"),
    "a name that is a number": (changed(name=7), "name"),
    "a name twice": ([GOOD, {**GOOD, "role": "admin"}], '"a"'),
}


@pytest.mark.parametrize("what", REFUSED_KEYS)
def test_keys_are_refused_without_repeating_what_may_be_one(what: str) -> None:
    entries, named = REFUSED_KEYS[what]
    with pytest.raises((Problem, ValueError)) as refused:
        access.keys(entries)
    message = str(getattr(refused.value, "message", refused.value))
    assert named in message
    assert SECRET not in message
    assert SECRET not in message.swapcase()


def test_keys_come_back_as_they_went() -> None:
    assert access.keys(access.mapping(KNOWN)["keys"]) == KNOWN
    assert access.keys([]) == ()


# -- names in certificates --------------------------------------------------------------------------------------------

SUBJECTS = ("search", "CN=batch,O=Example")
SANS = ("search.example.com", "spiffe://node/search")


def names(common_name: str = "", subject: str = "", *sans: str) -> CertificateNames:
    return CertificateNames(common_name, subject or (f"CN={common_name}" if common_name else ""), sans)


LISTED = [
    names("search"),
    names("search", "CN=search,O=Anybody"),
    names("batch", "CN=batch,O=Example"),
    names("", "", "search.example.com"),
    names("x", "CN=x", "a", "spiffe://node/search"),
]
UNLISTED = [
    names(),
    names("searc"),
    names("searchx"),
    names("xsearch"),
    names("Search"),
    names("search "),
    names("search\0"),
    names("search\0.evil"),
    names("batch"),
    names("batch", "CN=batch,O=Evil"),
    names("batch", "O=Example,CN=batch"),
    names("CN=batch,O=Example", "CN=CN\\=batch\\,O\\=Example"),  # a subject as text in a common name
    names("evil", "search"),  # no subject looks like that, and if one did, it would be no common name
    names("search.example.com"),
    names("x", "CN=x", "search"),
    names("x", "CN=x", "CN=batch,O=Example"),
    names("x", "CN=x", "search.example.com.", "SEARCH.example.com", "a.search.example.com", "*.example.com"),
    names("x", "CN=x", ""),
]


@pytest.mark.parametrize("shown", LISTED)
def test_a_listed_name_is_let_in(shown: CertificateNames) -> None:
    access.refuse_names(shown, SUBJECTS, SANS)


@pytest.mark.parametrize("shown", UNLISTED)
def test_names_are_compared_whole_and_each_with_its_own_list(shown: CertificateNames) -> None:
    with pytest.raises(Problem) as refused:
        access.refuse_names(shown, SUBJECTS, SANS)
    assert refused.value.kind is Kind.FORBIDDEN


@given(st.text(max_size=12), st.text(max_size=12))
def test_only_an_equal_name_is_let_in(listed: str, shown: str) -> None:
    if not listed or "=" in listed or listed == shown:
        return
    for subjects, sans in (((listed,), ()), ((), (listed,))):
        with pytest.raises(Problem):
            access.refuse_names(CertificateNames(shown, f"CN={shown}", (shown,)), subjects, sans)


def test_lists_ask_for_a_certificate_and_no_lists_do_not() -> None:
    access.refuse_names(None, (), ())
    access.refuse_names(names("anybody"), (), ())
    for subjects, sans in ((("a",), ()), ((), ("a",))):
        with pytest.raises(Problem) as refused:
            access.refuse_names(None, subjects, sans)
        assert refused.value.kind is Kind.UNAUTHENTICATED


# -- halves of a configuration ----------------------------------------------------------------------------------------

FILES = {"cert_file": "/c", "key_file": "/k"}
MUTUAL: dict[str, Any] = {**FILES, "client_ca_file": "/a", "require_client_cert": True}

# What is refused: (the table, the key that the message names).
HALVES: dict[str, tuple[Any, str]] = {
    "nothing": ({}, "tls.cert_file"),
    "no certificate": ({"key_file": "/k"}, "tls.cert_file"),
    "no key": ({"cert_file": "/c"}, "tls.key_file"),
    "only a version": ({"min_version": "1.3"}, "tls.cert_file"),
    "only what is the default": ({"require_client_cert": False}, "tls.cert_file"),
    "only who asks": ({"client_ca_file": "/a", "require_client_cert": True}, "tls.cert_file"),
    "only names": ({"allowed_subjects": ["a"]}, "tls.cert_file"),
    "an authority that is not asked": ({**FILES, "client_ca_file": "/a"}, "tls.require_client_cert"),
    "an authority that is said not to be asked": (
        {**MUTUAL, "require_client_cert": False},
        "tls.require_client_cert",
    ),
    "no authority": ({**FILES, "require_client_cert": True}, "tls.client_ca_file"),
    "subjects of nobody": ({**FILES, "allowed_subjects": ["a"]}, "tls.allowed_subjects"),
    "alternative names of nobody": ({**FILES, "allowed_sans": ["a"]}, "tls.allowed_sans"),
    "an empty certificate": ({**FILES, "cert_file": ""}, "tls.cert_file"),
    "a relative certificate": ({**FILES, "cert_file": "c"}, "tls.cert_file"),
    "a relative key": ({**FILES, "key_file": "./k"}, "tls.key_file"),
    "a relative authority": ({**MUTUAL, "client_ca_file": "a"}, "tls.client_ca_file"),
    "an old version": ({**FILES, "min_version": "1.1"}, "tls.min_version"),
    "a version that is a number": ({**FILES, "min_version": 1.3}, "tls.min_version"),
    "yes as text": ({**MUTUAL, "require_client_cert": "true"}, "tls.require_client_cert"),
    "names that are no list": ({**MUTUAL, "allowed_subjects": "a"}, "tls.allowed_subjects"),
    "an empty name": ({**MUTUAL, "allowed_subjects": [""]}, "tls.allowed_subjects"),
    "an empty alternative name": ({**MUTUAL, "allowed_sans": [""]}, "tls.allowed_sans"),
    "a name with a NUL": ({**MUTUAL, "allowed_subjects": ["a\0"]}, "tls.allowed_subjects"),
    "an empty list of names": ({**MUTUAL, "allowed_subjects": []}, "tls.allowed_subjects"),
    "an empty list of alternative names": ({**MUTUAL, "allowed_sans": []}, "tls.allowed_sans"),
    "a blank that fits no certificate": ({**MUTUAL, "allowed_subjects": ["CN=a, O=b"]}, "tls.allowed_subjects"),
    "an unknown key": ({**FILES, "certfile": "/c"}, "tls.certfile"),
    "a switch in capitals": ({**MUTUAL, "Require_client_cert": True}, "tls.Require_client_cert"),
    "no table": (True, "tls"),
}


@pytest.mark.parametrize("what", HALVES)
def test_half_a_configuration_is_refused_by_the_name_of_its_key(what: str) -> None:
    table, named = HALVES[what]
    with pytest.raises(Problem) as refused:
        parse({"tls": table}, {}, {}, "/data")
    assert refused.value.kind is Kind.INVALID
    assert named in refused.value.message


@pytest.mark.parametrize(
    "table",
    [
        FILES,
        {**FILES, "min_version": "1.3"},
        MUTUAL,
        {**MUTUAL, "allowed_subjects": ["a, b", r"CN=a\, b,O=c"], "allowed_sans": ["b"]},
    ],
)
def test_a_whole_configuration_is_taken(table: Mapping[str, Any]) -> None:
    tls = parse({"tls": table}, {}, {}, "/data").tls
    assert tls.on
    assert {key: getattr(tls, key) for key in table} == {
        key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
    }


def test_without_a_table_there_is_no_tls() -> None:
    tls = parse({}, {}, {}, "/data").tls
    assert (tls.on, tls) == (False, TlsSettings())
    assert Settings.__dataclass_fields__["open_health"].default is False
