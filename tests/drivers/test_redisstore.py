"""A real Redis that is killed, stopped, full, a replica, or asks for a password."""

import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.core.cachestore import Failure, Store, StoreFailed
from appliance.drivers.redisstore import RedisStore
from testing.background import Background
from testing.cachestores import FINGERPRINT, failure, key_of, row, rows, works
from testing.certificates import Authority
from testing.redisserver import RedisServer
from testing.running import eventually, free_ports

pytestmark = pytest.mark.processes

SLACK_SECS = 15.0  # for a busy machine; a call that waits without a bound takes longer
SECS = 20.0
DEADLINE_SECS = 0.2
PATIENT_SECS = 3.0  # a deadline that a call keeps though its thread rests for a second or two


class Load(Background):
    """Threads that put and get as fast as they are let, until the end of the block."""

    def __init__(self, store: Store, threads: int = 8) -> None:
        super().__init__()
        self.store = store
        self.put = rows("load", 50)
        self.longest = 0.0
        self.failures: set[Failure] = set()
        self.faults: list[BaseException] = []
        self.threads = [threading.Thread(target=self.work, args=(number,)) for number in range(threads)]

    def work(self, number: int) -> None:
        while not self.ended.is_set():
            begun = time.monotonic()
            try:
                if number % 2:
                    self.store.put_many(FINGERPRINT, self.put)
                else:
                    got = self.store.get_many(FINGERPRINT, list(self.put))
                    assert got.items() <= self.put.items()
            except StoreFailed as error:
                self.failures.add(error.failure)
            except BaseException as error:
                self.faults.append(error)
                return
            self.longest = max(self.longest, time.monotonic() - begun)
            time.sleep(0.005)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        assert self.faults == []


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.mark.parametrize("by", ["port", "socket"])
def test_a_redis_that_is_killed_is_away_and_comes_back_by_itself(server: RedisServer, by: str) -> None:
    store = RedisStore(server.url() if by == "port" else server.socket_url, DEADLINE_SECS)
    eventually(lambda: works(store))
    with Load(store) as load:
        time.sleep(0.2)
        server.kill()
        eventually(lambda: Failure.AWAY in load.failures)
        time.sleep(0.2)
        server.start()
        eventually(lambda: works(store))
    assert load.failures <= {Failure.AWAY, Failure.SLOW}
    assert load.longest < 2 * DEADLINE_SECS + SLACK_SECS
    store.close()


def test_a_redis_that_is_stopped_costs_one_deadline_a_second(server: RedisServer) -> None:
    store = RedisStore(server.url(), DEADLINE_SECS)
    eventually(lambda: works(store))
    server.send(signal.SIGSTOP)
    try:
        begun = time.monotonic()
        assert failure(lambda: store.get_many(FINGERPRINT, [key_of("x")])) is Failure.SLOW
        assert DEADLINE_SECS <= time.monotonic() - begun < DEADLINE_SECS + SLACK_SECS
        before = time.thread_time(), time.monotonic()
        for _ in range(500):
            assert failure(lambda: store.get_many(FINGERPRINT, [key_of("x")])) in (Failure.AWAY, Failure.SLOW)
        assert time.monotonic() - before[1] < 500 * DEADLINE_SECS / 10  # most did not ask
        with Load(store) as load:
            time.sleep(1.5)
        assert load.longest < 2 * DEADLINE_SECS + SLACK_SECS
    finally:
        server.send(signal.SIGCONT)
    eventually(lambda: works(store))
    store.close()


def test_a_redis_that_was_stopped_for_a_moment_gives_no_answer_to_another_call(server: RedisServer) -> None:
    """What comes late belongs to a call that is over: its connection is not used again."""
    store = RedisStore(server.url(), PATIENT_SECS)
    (one, first), (two, second) = row("first"), row("second")
    store.put_many(FINGERPRINT, {one: first, two: second})
    server.send(signal.SIGSTOP)
    assert failure(lambda: store.get_many(FINGERPRINT, [one])) is Failure.SLOW
    server.send(signal.SIGCONT)
    assert eventually(lambda: works(store))
    for _ in range(50):
        assert store.get_many(FINGERPRINT, [two]) == {two: second}
    store.close()


def test_hundreds_of_threads_share_few_connections(server: RedisServer) -> None:
    store = RedisStore(server.url(), 20.0)
    with Load(store, 200) as load:
        time.sleep(0.5)
    assert load.failures == set()
    clients = sum(line.startswith("id=") for line in ask(server, "CLIENT LIST").splitlines())
    assert clients <= 32 + 1
    store.close()


def ask(server: RedisServer, command: str) -> str:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(f"{command}\r\nQUIT\r\n".encode())
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


def test_a_redis_whose_memory_is_full_is_called_so_and_still_read() -> None:
    with RedisServer(maxmemory="6mb") as server:
        store = RedisStore(server.url(), 5.0)
        put = rows("early", 10)
        store.put_many(FINGERPRINT, put)
        failures = set()
        for call in range(60):
            try:
                store.put_many(FINGERPRINT, rows(call, 100))
            except StoreFailed as error:
                failures.add(error.failure)
        assert failures == {Failure.FULL}
        assert store.get_many(FINGERPRINT, list(put)) == put
        assert store.stats().refusal.startswith("nothing new is kept (full)")
        store.close()


def test_a_redis_that_is_a_replica_takes_nothing(server: RedisServer) -> None:
    ask(server, "CONFIG SET replica-serve-stale-data yes")
    ask(server, "REPLICAOF 127.0.0.1 1")
    store = RedisStore(server.url(), 5.0)
    assert failure(lambda: store.put_many(FINGERPRINT, rows("x", 1))) is Failure.READ_ONLY
    assert store.get_many(FINGERPRINT, list(rows("x", 1))) == {}
    assert store.stats().refusal.startswith("nothing new is kept (read_only)")
    store.close()


@pytest.mark.parametrize("password", ["wrong-token", "wrong%2Ftoken", ""])
def test_a_wrong_password_is_refused_in_words_without_it(password: str) -> None:
    with RedisServer(requirepass="right") as server:
        store = RedisStore(server.url(password), 5.0)
        with pytest.raises(StoreFailed) as raised:
            store.get_many(FINGERPRINT, [key_of("x")])
        assert raised.value.failure is Failure.REFUSED
        with pytest.raises(StoreFailed) as again:
            store.get_many(FINGERPRINT, [key_of("x")])
        for words in (str(raised.value), str(again.value)):
            assert "token" not in words
            assert str(server.port) in words
        right = RedisStore(server.url("right"), 5.0)
        assert works(right)
        right.close()
        store.close()


def test_nobody_at_the_address_is_away() -> None:
    with RedisServer() as server:
        url = server.url("secret-token")
    store = RedisStore(url, DEADLINE_SECS)
    assert failure(lambda: store.get_many(FINGERPRINT, [key_of("x")])) is Failure.AWAY
    assert failure(lambda: store.purge("", 0, 1)) is Failure.AWAY
    assert failure(store.stats) is Failure.AWAY
    store.close()


def test_redis_keeps_values_as_long_as_it_is_told(server: RedisServer) -> None:
    store = RedisStore(server.url(), SECS, ttl_secs=5)
    put = rows("short", 3)
    store.put_many(FINGERPRINT, put)
    assert store.get_many(FINGERPRINT, list(put)) == put
    eventually(lambda: store.get_many(FINGERPRINT, list(put)) == {})
    store.close()


def test_redis_is_not_told_by_its_address_to_be_slow(server: RedisServer) -> None:
    store = RedisStore(f"{server.url()}?socket_timeout=99&retry_on_timeout=1&max_connections=1", SECS)
    connection: Any = store.pool.make_connection()
    assert (connection.socket_timeout, connection.retry.get_retries()) == (SECS, 0)
    store.put_many(FINGERPRINT, rows("heard", 1))
    store.purge(FINGERPRINT, 0, 2000)
    store.close()


def test_redis_is_reached_over_tls_and_an_unknown_authority_is_not_believed(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path, "ours"), Authority(tmp_path / "stranger", "stranger")
    issued, (port,) = authority.issue("localhost", ["DNS:localhost"]), free_ports(1)
    options = {"tls-cert-file": str(issued.chain), "tls-key-file": str(issued.key_path), "tls-auth-clients": "no"}
    with RedisServer(**{"tls-port": str(port), "tls-ca-cert-file": str(authority.pem), **options}):
        ours, theirs = (
            RedisStore(f"rediss://localhost:{port}/0?ssl_ca_certs={each.pem}", SECS) for each in (authority, stranger)
        )
        put = rows("over TLS", 3)
        ours.put_many(FINGERPRINT, put)
        assert ours.get_many(FINGERPRINT, list(put)) == put
        with pytest.raises(StoreFailed, match="certificate verify failed"):
            theirs.get_many(FINGERPRINT, list(put))
        ours.close()
        theirs.close()


@pytest.mark.parametrize(
    "url", ["redis://:to/ken@h", "http://:token@h", "redis://:token@h?nonsense=1", "redis://:t@[h"]
)
def test_an_address_that_redis_cannot_have_is_refused_in_words_without_it(url: str) -> None:
    with pytest.raises(StoreFailed) as raised:
        RedisStore(url)
    assert raised.value.failure is Failure.REFUSED
    assert not {"ken", "token"} & set(str(raised.value).replace("'", " ").split())
