"""What the factory makes is what it says, judged by the standard library's TLS on both ends."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from testing.certificates import Authority, Issued, KeyKind

HOSTS = ["DNS:localhost", "IP:127.0.0.1"]
NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)
SECS = 10.0

Make = Callable[[Authority], Issued]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "The node's own")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Of the same name, with another key."""
    return Authority(tmp_path_factory.mktemp("stranger"), "The node's own")


def talk(
    trusted: Authority, server: Issued, client: Issued | None, host: str = "localhost"
) -> tuple[dict[str, Any] | str, str]:
    """One connection with certificates required. What each end saw: the client's certificate or why not; an answer."""
    near, far = socket.socketpair()
    near.settimeout(SECS)
    far.settimeout(SECS)
    seen: list[dict[str, Any] | str] = []

    def serve() -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(trusted.pem))
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(server.chain, server.key_path)
        with far:
            try:
                with context.wrap_socket(far, server_side=True) as wrapped:
                    seen.append(dict(wrapped.getpeercert() or {}))
                    wrapped.sendall(b"yes")
            except ssl.SSLError as error:
                seen.append(error.reason or str(error))

    thread = Thread(target=serve)
    thread.start()
    context = ssl.create_default_context(cafile=str(trusted.pem))
    if client:
        context.load_cert_chain(client.chain, client.key_path)
    try:
        with near, context.wrap_socket(near, server_hostname=host) as wrapped:
            answer = wrapped.recv(3).decode()  # only here does a client of TLS 1.3 learn that it was refused
    except ssl.SSLCertVerificationError as error:
        answer = error.verify_message
    except ssl.SSLError as error:
        answer = error.reason or str(error)
    thread.join()
    return seen[0], answer


@pytest.mark.parametrize("key", ["ec", "ed25519", "rsa"])
def test_a_good_pair_talks_and_names_itself(authority: Authority, key: KeyKind) -> None:
    names = ["DNS:a.example", "IP:10.0.0.1", "URI:spiffe://node/a", "EMAIL:a@b.example"]
    client = authority.issue("alice", names, organization="Ops, Inc.", key=key)
    seen, answer = talk(authority, authority.issue("node", HOSTS, key=key), client)
    assert answer == "yes"
    assert isinstance(seen, dict)
    assert seen["subject"] == ((("organizationName", "Ops, Inc."),), (("commonName", "alice"),))
    assert seen["subjectAltName"] == (
        ("DNS", "a.example"),
        ("IP Address", "10.0.0.1"),
        ("URI", "spiffe://node/a"),
        ("email", "a@b.example"),
    )


def test_an_intermediate_is_carried_in_the_chain(authority: Authority) -> None:
    below = authority.intermediate("Second").intermediate("Third")
    seen, answer = talk(authority, below.issue("node", HOSTS), below.issue("alice"))
    assert (type(seen), answer) == (dict, "yes")
    alone = below.issue("alice")
    seen, _ = talk(authority, below.issue("node", HOSTS), Issued(alone.cert_path, alone.key_path, alone.cert_path))
    assert seen == "CERTIFICATE_VERIFY_FAILED"


@pytest.mark.parametrize(
    ("make", "alert"),
    [
        (lambda own: own.issue("a", not_after=NOW - HOUR), "SSLV3_ALERT_CERTIFICATE_EXPIRED"),
        (lambda own: own.issue("a", not_before=NOW + HOUR, not_after=NOW + 2 * HOUR), "SSLV3_ALERT_BAD_CERTIFICATE"),
        (lambda own: own.issue("a", client=False), "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE"),
    ],
    ids=["expired", "not yet valid", "for servers only"],
)
def test_a_bad_client_is_refused(authority: Authority, make: Make, alert: str) -> None:
    seen, answer = talk(authority, authority.issue("node", HOSTS), make(authority))
    assert (seen, answer) == ("CERTIFICATE_VERIFY_FAILED", alert)


def test_a_client_of_a_stranger_of_the_same_name_is_refused(authority: Authority, stranger: Authority) -> None:
    seen, answer = talk(authority, authority.issue("node", HOSTS), stranger.issue("alice"))
    assert (seen, answer) == ("CERTIFICATE_VERIFY_FAILED", "TLSV1_ALERT_UNKNOWN_CA")


def test_a_client_without_a_certificate_is_refused(authority: Authority) -> None:
    seen, answer = talk(authority, authority.issue("node", HOSTS), None)
    assert (seen, answer) == ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "TLSV13_ALERT_CERTIFICATE_REQUIRED")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda own: own.issue("node", HOSTS, not_after=NOW - HOUR), "certificate has expired"),
        (
            lambda own: own.issue("node", HOSTS, not_before=NOW + HOUR, not_after=NOW + 2 * HOUR),
            "certificate is not yet valid",
        ),
        (lambda own: own.issue("node", HOSTS, server=False), "unsuitable certificate purpose"),
        (lambda own: own.issue("localhost", ["DNS:elsewhere"]), "Hostname mismatch"),
    ],
    ids=["expired", "not yet valid", "for clients only", "wrong name"],
)
def test_a_bad_server_is_refused(authority: Authority, make: Make, why: str) -> None:
    _, answer = talk(authority, make(authority), authority.issue("alice"))
    assert answer.startswith(why)


def test_a_server_of_a_stranger_is_refused(authority: Authority, stranger: Authority) -> None:
    _, answer = talk(authority, stranger.issue("node", HOSTS), authority.issue("alice"))
    assert answer == "unable to get local issuer certificate"


def test_an_address_is_a_name_too(authority: Authority) -> None:
    assert talk(authority, authority.issue("node", HOSTS), authority.issue("a"), "127.0.0.1")[1] == "yes"
    assert talk(authority, authority.issue("node", ["DNS:127.0.0.1"]), authority.issue("a"), "127.0.0.1")[1] != "yes"


def test_an_authority_out_of_date_vouches_for_nobody(authority: Authority, tmp_path: Path) -> None:
    old = Authority(tmp_path, "Old", not_after=NOW - HOUR)
    _, answer = talk(old, old.issue("node", HOSTS), old.issue("alice"))
    assert answer == "certificate has expired"


def test_a_kind_of_name_that_it_does_not_know_is_an_error(authority: Authority) -> None:
    with pytest.raises(ValueError, match="localhost"):
        authority.issue("a", ["localhost"])
