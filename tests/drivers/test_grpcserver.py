"""The socket that one process of a data folder leaves to the next."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from appliance.drivers.grpcserver import Server
from testing.running import free_ports


def opened(path: Path) -> Server:
    server = Server(threads=2, max_message_bytes=1024, shared_port=True)
    server.start("127.0.0.1", free_ports(1)[0], own_socket=path)
    return server


def serves(path: Path) -> bool:
    channel = grpc.insecure_channel(f"unix:{path}", [("grpc.use_local_subchannel_pool", 1)])
    try:
        return channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5) is not None
    finally:
        channel.close()


def test_a_predecessor_that_ends_late_leaves_the_socket_to_its_successor(tmp_path: Path) -> None:
    """grpc deletes the path of its socket at its end, whoever's it is by then."""
    path = tmp_path / "multiplexer-0.sock"
    first = opened(path)
    second = opened(path)
    first.stop(0)
    try:
        assert serves(path)
        assert path.stat().st_mode & 0o777 == 0o700
        assert [found.name for found in tmp_path.iterdir()] == [path.name]
    finally:
        second.stop(0)


def test_a_socket_of_somebody_who_is_gone_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "multiplexer-0.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    server = opened(path)
    try:
        assert serves(path)
    finally:
        server.stop(0)


def test_a_client_that_is_asked_to_connect_again_loses_no_call(tmp_path: Path) -> None:
    server = Server(threads=16, max_message_bytes=1024, shared_port=True, longest_connection_secs=1)
    (port,) = free_ports(1)
    server.start("127.0.0.1", port)
    with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=20)
        assert next(watch) is not None  # and stays open on the connection that it began on
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        until = time.monotonic() + 3.5

        def caller() -> int:
            calls = 0
            while time.monotonic() < until:
                check(b"", timeout=5)
                calls += 1
            return calls

        with ThreadPoolExecutor() as threads:
            assert all(each.result() > 100 for each in [threads.submit(caller) for _ in range(4)])
        assert watch.is_active()
        watch.cancel()
    server.stop(0)


def test_who_says_nothing_is_ended_after_the_time_for_it(tmp_path: Path) -> None:
    path = tmp_path / "own.sock"
    server = Server(threads=2, max_message_bytes=1024, shared_port=True, handshake_secs=0.3)
    server.start(None, 0, own_socket=path)
    try:
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(str(path))
            silent.settimeout(20)
            while silent.recv(1024):
                pass
    finally:
        server.stop(0)
