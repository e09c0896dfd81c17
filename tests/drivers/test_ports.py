"""Ports: what listens is busy and answers; what was merely used is free again."""

import socket
from collections.abc import Iterator

import pytest

from appliance.drivers import ports

LOOPBACK = "127.0.0.1"


@pytest.fixture(params=["127.0.0.1", "0.0.0.0"])
def listening(request: pytest.FixtureRequest) -> Iterator[int]:
    with socket.create_server((request.param, 0)) as server:
        yield server.getsockname()[1]


def free() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def test_a_listener_is_busy_and_answers(listening: int) -> None:
    assert ports.busy([listening], LOOPBACK) == {listening}
    assert ports.answers(LOOPBACK, listening)


def test_a_free_port_is_neither() -> None:
    port = free()
    assert ports.busy([port], LOOPBACK) == frozenset()
    assert not ports.answers(LOOPBACK, port)


def test_only_the_busy_ones_come_back(listening: int) -> None:
    port = free()
    assert ports.busy(iter([port, listening]), LOOPBACK) == {listening}
    assert ports.busy([], LOOPBACK) == frozenset()


def test_looking_takes_nothing(listening: int) -> None:
    port = free()
    for _ in range(3):
        ports.busy([port], LOOPBACK)
    with socket.create_server((LOOPBACK, port)):
        assert ports.busy([port], LOOPBACK) == {port}


def test_a_port_whose_connection_just_ended_is_free() -> None:
    """Our side closes first, so that the connection is in TIME_WAIT on the listener's port."""
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection((LOOPBACK, port)) as client:
            server.accept()[0].close()
            assert client.recv(1) == b""
    assert ports.busy([port], LOOPBACK) == frozenset()


def test_a_bound_port_that_nobody_listens_on_does_not_answer() -> None:
    with socket.socket() as bound:
        bound.bind((LOOPBACK, 0))
        assert not ports.answers(LOOPBACK, bound.getsockname()[1])


def test_an_address_that_is_not_ours_does_not_answer() -> None:
    assert not ports.answers("192.0.2.1", 9, timeout=0.05)
    assert ports.busy([9999], "192.0.2.1") == {9999}


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ipv6_works_too() -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 loopback here")
    with server:
        port = server.getsockname()[1]
        assert ports.busy([port], "::1") == {port}
        assert ports.answers("::1", port)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_unused_ports_are_all_different_and_free(host: str) -> None:
    found = ports.unused(host, 50)
    assert len(set(found)) == 50
    assert ports.busy(found, host) == frozenset()
