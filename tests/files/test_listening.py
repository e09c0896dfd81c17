"""Listening on a host: on each of its addresses, beside others that share the port, and on none where one is taken."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from appliance.files.sockets import listening
from testing.running import free_ports

IPV4, IPV6 = "127.0.0.1", "::1"
BACKLOG = 5


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def opened(stack: ExitStack, host: str, port: int) -> list[socket.socket]:
    found = [stack.enter_context(each) for each in listening(host, port)]
    for each in found:
        each.listen(BACKLOG)
    return found


def reached(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "wanted"),
    [
        ("127.0.0.1", {IPV4}),
        ("0.0.0.0", {IPV4, IPV6}),  # as grpcio does
        ("::1", {IPV6}),
        ("::", {IPV4, IPV6}),
        ("localhost", {each[4][0] for each in socket.getaddrinfo("localhost", 1, type=socket.SOCK_STREAM)}),
    ],
)
def test_a_host_is_reached_at_its_addresses_alone(stack: ExitStack, port: int, host: str, wanted: set[str]) -> None:
    opened(stack, host, port)
    assert {each for each in (IPV4, IPV6) if reached(each, port)} == wanted


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_several_share_a_port(stack: ExitStack, port: int, host: str) -> None:
    first, second = opened(stack, host, port), opened(stack, host, port)
    assert [each.getsockname() for each in first] == [each.getsockname() for each in second]


def test_a_socket_of_ipv4_beside_them_has_the_connections_to_itself(stack: ExitStack, port: int) -> None:
    """That is Envoy's."""
    for each in opened(stack, "127.0.0.1", port):
        each.setblocking(False)
        with socket.socket() as envoys:
            envoys.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            envoys.bind((IPV4, port))
            envoys.listen(BACKLOG)
            envoys.settimeout(5)
            for _ in range(BACKLOG):
                with socket.create_connection((IPV4, port), timeout=5):
                    envoys.accept()[0].close()
            with pytest.raises(BlockingIOError):
                each.accept()
        assert reached(IPV4, port)


@pytest.mark.filterwarnings("error::ResourceWarning")
@pytest.mark.parametrize(
    ("taken", "host"),
    [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "0.0.0.0"), ("127.0.0.1", "::"), ("0.0.0.0", "127.0.0.1")],
)
def test_a_port_of_one_that_does_not_share_is_refused(port: int, taken: str, host: str) -> None:
    with socket.create_server((taken, port)), pytest.raises(OSError, match="in use"):
        listening(host, port)


def test_a_host_that_is_none_of_this_machine_is_refused(port: int) -> None:
    with pytest.raises(OSError):
        listening("192.0.2.1", port)
    with pytest.raises(OSError):
        listening("no-such-host.invalid", port)
