"""Cached embeddings in a Redis or Valkey server, for several machines together. It is asked shortly or not at all.

A call takes a connection, sends all of its commands and reads the answers, each read with what is left of the call's
deadline. redis-py tries nothing again: a second try is worth less than computing the embedding. Once a call failed, the
others fail at once for a while (`Breaker`), so that a server that is away costs one deadline a second.
"""

from __future__ import annotations

import re
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any
from urllib.parse import quote

from redis import exceptions
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, parse_url
from redis.retry import Retry

from appliance.core.breaker import Breaker
from appliance.core.cachekey import HEADER
from appliance.core.cachestore import Failure, StoreFailed, StoreStats

PREFIX = b"tei:1:"
TRIAL = PREFIX + b"trial"
CONNECTIONS = 32  # of this process; who finds none waits for one, as long as the deadline is
ROWS_PER_SEC = 20_000  # a batch has so much longer
KEYS_AT_ONCE = 64  # of one MGET
WINDOW_KEYS = 2048  # that are asked for before the first answer is read
WINDOW_BYTES = 1 << 20  # that are written before the first answer is read
PURGED_AT_ONCE = 1000
STEP_SECS = 2.0  # of a purge, which walks through all keys in many steps
BROKEN = (Failure.AWAY, Failure.SLOW, Failure.REFUSED)  # the next call would find the same; a full one still reads

Command = tuple[bytes | str | int, ...]
OURS: dict[str, Any] = {
    "decode_responses": False,
    "driver_info": None,  # two exchanges less for each connection
    "health_check_interval": 0,
    "protocol": 2,
    "retry_on_error": [],
    "retry_on_timeout": False,
}


class RedisStore:
    """url: redis://, rediss:// or unix://, as redis-py reads them; ttl_secs: how long entries are kept, 0: for ever.

    What is evicted when the memory is full is the server's decision (maxmemory-policy).
    """

    def __init__(self, url: str, deadline_secs: float = 0.05, ttl_secs: int = 0) -> None:
        self.evicted = 0  # by the server, which does not tell whose
        self.deadline_secs = deadline_secs
        self.expiry: Command = ("EX", ttl_secs) if ttl_secs else ()
        options = options_of(url, deadline_secs)
        self.secrets = secrets_of(options)
        self.place = str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")
        self.pool = ConnectionPool(**options, max_connections=CONNECTIONS)
        self.free = threading.BoundedSemaphore(CONNECTIONS)
        self.lock = threading.Lock()
        self.breaker = Breaker()

    def get_many(self, fingerprint: str, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        prefix = prefix_of(fingerprint)
        found: dict[bytes, bytes] = {}
        with self.asking(self.deadline_secs + len(keys) / ROWS_PER_SEC) as exchange:
            for window in parts(keys, WINDOW_KEYS):
                groups = list(parts(window, KEYS_AT_ONCE))
                answers = exchange([("MGET", *(prefix + key for key in group)) for group in groups])
                for group, values in zip(groups, answers):
                    found.update((key, value) for key, value in zip(group, values) if value is not None)
        return found

    def put_many(self, fingerprint: str, values: Mapping[bytes, bytes]) -> None:
        prefix = prefix_of(fingerprint)
        with self.asking(self.deadline_secs + len(values) / ROWS_PER_SEC) as exchange:
            window: list[Command] = []
            size = 0
            for key, value in values.items():
                window.append(("SET", prefix + key, value, *self.expiry))
                size += len(value)
                if size >= WINDOW_BYTES:
                    exchange(window)
                    window, size = [], 0
            exchange(window)

    def purge(self, fingerprint: str, since_ms: int, until_ms: int) -> int:
        """Walks through all keys of the server's database, in steps between which others are served."""
        pattern = (prefix_of(fingerprint) if fingerprint else PREFIX) + b"*"
        deleted = 0
        cursor = b"0"
        while True:
            with self.asking(STEP_SECS) as exchange:
                cursor, keys = exchange([("SCAN", cursor, "MATCH", pattern, "COUNT", PURGED_AT_ONCE)])[0]
                heads = exchange([("GETRANGE", key, 0, HEADER.size - 1) for key in keys])
                chosen = [key for key, head in zip(keys, heads) if since_ms <= time_of(head) <= until_ms]
                deleted += sum(exchange([("UNLINK", *chosen)])) if chosen else 0
            if cursor == b"0":
                return deleted

    def stats(self) -> StoreStats:
        """The server's memory, whoever else uses it. How many entries are ours only a walk through all keys tells."""
        with self.asking(self.deadline_secs) as exchange:
            told = re.search(rb"^used_memory:(\d+)", exchange([("INFO", "memory")])[0], re.M)
        return StoreStats(None, int(told[1]) if told else None, self.refusal())

    def refusal(self) -> str:
        """Why nothing can be written, found out by writing something that is gone at once: whether a full server evicts
        depends on its policy and on what it has."""
        try:
            with self.asking(self.deadline_secs) as exchange:
                exchange([("SET", TRIAL, b"", "PX", 1)])
        except StoreFailed as failure:
            return f"nothing new is kept ({failure.failure}): {failure}"
        return ""

    def close(self) -> None:
        self.pool.disconnect()

    @contextmanager
    def asking(self, secs: float) -> Iterator[Exchange]:
        """What sends commands and gives their answers, within ``secs`` of now. Raises: StoreFailed."""
        until = time.monotonic() + secs
        with self.lock:
            if not self.breaker.admits(time.monotonic()):
                raise StoreFailed(Failure.AWAY, f"not asked again yet: {self.breaker.words}")
        if not self.free.acquire(timeout=secs):
            raise StoreFailed(Failure.SLOW, f"{self.place}: all {CONNECTIONS} connections are in use")
        try:
            connection = self.pool.get_connection()
            exchange = Exchange(connection, until)
            try:
                yield exchange
            finally:
                if exchange.unread:  # these answers are of no other call
                    connection.disconnect()
                self.pool.release(connection)
        except (exceptions.RedisError, OSError, ValueError) as error:
            failure, words = failure_of(error), self.masked(error)
            with self.lock:
                if failure in BROKEN:
                    self.breaker.failed(time.monotonic(), words)
                else:
                    self.breaker.succeeded()
            raise StoreFailed(failure, words) from None
        finally:
            self.free.release()
        with self.lock:
            self.breaker.succeeded()

    def masked(self, error: Exception) -> str:
        words = f"{self.place}: {error}"
        for secret in self.secrets:
            words = words.replace(secret, "***")
        return words


class Exchange:
    """Commands and answers over one connection. until: on the monotonic clock."""

    def __init__(self, connection: Any, until: float) -> None:
        self.connection = connection
        self.until = until
        self.unread = 0

    def __call__(self, commands: Sequence[Command]) -> list[Any]:
        """One answer for each command. Raises: what redis-py raises; with an answer that is an error, that one."""
        if not commands:
            return []
        self.left()
        self.unread = len(commands)
        self.connection.send_packed_command(self.connection.pack_commands(commands))
        answers = []
        while self.unread:
            answers.append(self.connection.read_response(disable_decoding=True, timeout=self.left()))
            self.unread -= 1
        return answers

    def left(self) -> float:
        left = self.until - time.monotonic()
        if left <= 0:
            raise exceptions.TimeoutError("the deadline is over")
        return left


def prefix_of(fingerprint: str) -> bytes:
    return PREFIX + fingerprint.encode() + b":"


def parts(items: Sequence[bytes], size: int) -> Iterator[list[bytes]]:
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part


def time_of(head: bytes) -> float:
    """When an entry was computed; what is none has no time."""
    try:
        return float(HEADER.unpack(head)[3])
    except struct.error:
        return float("nan")


def options_of(url: str, deadline_secs: float) -> dict[str, Any]:
    """What the pool makes connections of; what the address says of time and tries is not heard. Raises: StoreFailed."""
    try:
        options = {**parse_url(url), **OURS}
        options |= {"socket_timeout": deadline_secs, "socket_connect_timeout": deadline_secs}
        options |= {"retry": Retry(NoBackoff(), 0)}
        options.pop("max_connections", None)
        named = dict(options)
        named.pop("connection_class", Connection)(**named)  # connects to nothing yet
    except (ValueError, TypeError, exceptions.RedisError):  # the words may quote what is a part of the password
        raise StoreFailed(Failure.REFUSED, "the address is none that redis-py can read: redis://HOST:PORT/0") from None
    return options


def secrets_of(options: Mapping[str, Any]) -> list[str]:
    passwords = [str(options[name]) for name in ("password", "ssl_password") if options.get(name)]
    return sorted({*passwords, *(quote(each, safe="") for each in passwords)}, key=len, reverse=True)


def failure_of(error: Exception) -> Failure:
    """What an error of redis-py means; those that are kinds of others come first."""
    kinds: list[tuple[type[Exception] | tuple[type[Exception], ...], Failure]] = [
        ((exceptions.AuthenticationError, exceptions.AuthorizationError), Failure.REFUSED),
        (exceptions.OutOfMemoryError, Failure.FULL),
        (exceptions.ReadOnlyError, Failure.READ_ONLY),
        ((exceptions.TimeoutError, TimeoutError), Failure.SLOW),
        ((exceptions.ConnectionError, exceptions.MasterDownError, OSError), Failure.AWAY),
    ]
    if str(error).startswith("MISCONF"):  # it cannot write its snapshots, and takes no more until it can
        return Failure.READ_ONLY
    return next((failure for kind, failure in kinds if isinstance(error, kind)), Failure.REFUSED)
