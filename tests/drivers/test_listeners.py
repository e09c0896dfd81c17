"""Who listens on a port: proved by the kernel's tables and the marker of the process, of real processes."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from appliance.drivers import listeners as driver
from appliance.drivers.listeners import Listeners, ListenerTable, marker_of
from appliance.drivers.listeners import listening as listening_now
from testing.running import eventually, free_ports

pytestmark = pytest.mark.processes

VARIABLE = "TEI_APPLIANCE_TEST_MARKER"
LISTEN = """
import os, socket, sys
listener = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
listener.bind((sys.argv[1], int(sys.argv[2])))
listener.listen()
if sys.argv[3:] == ["child"] and os.fork():
    listener.close()
else:
    print("listens", flush=True)
sys.stdin.read()
"""


@contextmanager
def listening(port: int, marker: str | None, host: str = "127.0.0.1", *more: str) -> Iterator[int]:
    """The pid of a process that listens, with or without a marker."""
    environ = {**os.environ, **({VARIABLE: marker} if marker else {})}
    command = [sys.executable, "-S", "-c", LISTEN, host, str(port), *more]
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "listens\n"
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def listeners() -> Listeners:
    return Listeners(VARIABLE)


def test_a_listener_is_proved_by_its_marker_and_by_no_other(port: int, listeners: Listeners) -> None:
    assert not listeners.proved(port, "b:a:0:1")
    with listening(port, "b:a:0:1"):
        for _ in range(2):  # the second answer is remembered
            assert listeners.proved(port, "b:a:0:1")
            for other in ("b:a:0:2", "b:a:1:1", "b:ab:0:1", "b:a:0:11", "b:a:0", ""):
                assert not listeners.proved(port, other), other
    assert not listeners.proved(port, "b:a:0:1")


def test_a_stranger_proves_nothing_and_is_named(port: int, listeners: Listeners) -> None:
    with listening(port, None) as pid:
        assert not listeners.proved(port, "b:a:0:1")
        owner = listeners.stranger(port, "b:a:")
        assert owner
        assert owner.pid == pid
        assert f"process {pid} (" in str(owner)
        assert "import os, socket, sys listener = socket.socket" in str(owner)  # its lines are one
    assert listeners.stranger(port, "b:a:") is None


def test_a_replica_that_ends_is_no_stranger(port: int, listeners: Listeners, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment is gone, by which it was known, and for a moment it listens still."""
    with listening(port, "b:a:0:1") as pid:

        def ends(pid: int, variable: str) -> str | None:
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: marker_of(pid, variable) is None)
            return marker_of(pid, variable)

        monkeypatch.setattr(driver, "marker_of", ends)
        assert listeners.stranger(port, "b:a:") is None
        assert driver.is_ending(pid)
        assert not driver.is_ending(os.getpid())


def test_the_replica_itself_is_no_stranger_whatever_its_launch(port: int, listeners: Listeners) -> None:
    with listening(port, "b:a:0:7"):
        assert listeners.stranger(port, "b:a:") is None
        assert listeners.stranger(port, "b:other:")


def test_a_child_of_the_replica_may_listen_for_it(port: int, listeners: Listeners) -> None:
    with listening(port, "b:a:0:1", "127.0.0.1", "child") as pid:
        assert listeners.proved(port, "b:a:0:1")
        assert listeners.stranger(port, "b:a:") is None
        assert marker_of(pid, VARIABLE) == "b:a:0:1"


def test_a_listener_of_ipv6_that_takes_ipv4_counts(port: int, listeners: Listeners) -> None:
    """As grpc's own servers listen."""
    with listening(port, "b:a:0:1", "::ffff:127.0.0.1"):
        assert listeners.proved(port, "b:a:0:1")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_who_listens_on_all_addresses_is_a_stranger(port: int, listeners: Listeners, host: str) -> None:
    with listening(port, None, host) as pid:
        owner = listeners.stranger(port, "b:a:")
        assert owner
        assert owner.pid == pid
        assert not listeners.proved(port, "b:a:0:1")


def test_two_that_share_a_port_prove_nothing(port: int, listeners: Listeners) -> None:
    """SO_REUSEPORT: the kernel would give each connection to one of them."""
    with ExitStack() as held:
        shared = LISTEN.replace("listener.bind", "listener.setsockopt(1, 15, 1)\nlistener.bind")
        for marker in ("b:a:0:1", "x:y:0:1"):
            command = [sys.executable, "-S", "-c", shared, "127.0.0.1", str(port)]
            environ = {**os.environ, VARIABLE: marker}
            process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            held.enter_context(process)
            held.callback(process.kill)
            assert process.stdout
            assert process.stdout.readline() == "listens\n"
        assert not listeners.proved(port, "b:a:0:1")


def test_many_connections_do_not_hide_a_listener(port: int, listeners: Listeners) -> None:
    with listening(port, "b:a:0:1"), ExitStack() as held:
        for _ in range(50):
            held.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert listeners.proved(port, "b:a:0:1")


def test_a_table_shows_all_who_listened_when_it_was_read(listeners: Listeners) -> None:
    first, second, third = free_ports(3)
    with listening(first, "b:a:0:1"), listening(second, None), listening(third, None, "0.0.0.0"):
        table = listening_now()
        assert listeners.proved(first, "b:a:0:1", table)
        assert listeners.stranger(first, "b:a:", table) is None
        assert not listeners.proved(second, "b:b:0:1", table)
        assert listeners.stranger(second, "b:b:", table)
        assert listeners.stranger(third, "b:c:", table)
    assert listeners.proved(first, "b:a:0:1", table), "it is of that moment"
    assert not listeners.proved(first, "b:a:0:1", listening_now())
    assert listeners.stranger(second, "b:b:", table) is None, "nobody is named who listens no more"
    with listening(first, "b:a:0:1"):
        assert not listeners.proved(first, "b:a:0:1", ListenerTable({}))


@contextmanager
def sockets_that_listen() -> Iterator[list[socket.socket]]:
    """More than one message of the kernel holds, on all kinds of addresses."""
    with ExitStack() as held:
        made = []
        for family, host in [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")] * 150 + [
            (socket.AF_INET, "0.0.0.0"),
            (socket.AF_INET6, "::"),
            (socket.AF_INET6, "::1"),
        ]:
            made.append(held.enter_context(socket.socket(family)))
            made[-1].bind((host, 0))
            made[-1].listen()
        yield made


def test_netlink_and_proc_tell_the_same() -> None:
    with sockets_that_listen() as made:
        inodes = {os.fstat(each.fileno()).st_ino: each.getsockname()[1] for each in made}
        told, read = (set(way()) for way in (driver.told_over_netlink, driver.read_from_proc))
    ours = {each for each in told if each.inode in inodes}
    assert ours == {each for each in read if each.inode in inodes}
    assert {each.inode: each.port for each in ours} == inodes


def test_what_is_told_of_one_port_is_what_the_table_has_of_it() -> None:
    """Also of several sockets that share it."""
    with sockets_that_listen() as made, socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            each.bind(("127.0.0.1", 0 if each is one else one.getsockname()[1]))
            each.listen()
        table = set(driver.told_over_netlink())
        for port in {each.getsockname()[1] for each in (*made, one)}:
            told = set(driver.told_over_netlink(port))
            assert told == {each for each in table if each.port == port}
            assert driver.listening(port).on_loopback(port) == driver.listening().on_loopback(port)
        shared = driver.listening(one.getsockname()[1]).on_loopback(one.getsockname()[1])
        assert set(shared) == {os.fstat(each.fileno()).st_ino for each in (one, other)}


def test_a_kernel_without_sock_diag_is_read_from_proc(
    port: int, listeners: Listeners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "SOCK_DIAG", 1000)
    driver.tells_over_netlink.cache_clear()
    try:
        with listening(port, "b:a:0:1"):
            assert listeners.proved(port, "b:a:0:1")
        assert not driver.tells_over_netlink()
    finally:
        driver.tells_over_netlink.cache_clear()


def test_without_a_file_descriptor_it_is_not_known_what_the_kernel_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    driver.tells_over_netlink.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", no_file)
        with pytest.raises(OSError, match="Too many"):
            driver.listening()
    assert driver.tells_over_netlink()
