"""Cached embeddings in SQLite files below the data folder, shared by all multiplexer processes of the machine.

SQLite and not a mapped file: where a mapped file is cut or its disk fails, the kernel ends the process that reads it.

The store is a row of generations, files with rising numbers. What is written goes to the newest; when that has its
share of the size, the next one begins and the oldest file is deleted. An entry that is found in one of the two oldest
is written again to the newest: so the size is bounded, what is used stays, and no row is ever deleted to make room.
Each file has its entries in the order of their coming behind a small index, so that a batch writes few pages.

Nothing is synced: a power cut may damage a file, which is then deleted and begun anew; each entry has a checksum, too.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from filelock import FileLock, Timeout

from appliance.core.cachekey import HEADER
from appliance.core.cachestore import Failure, StoreFailed, StoreStats
from appliance.files.failures import of_sqlite, of_system

GENERATIONS = 8
LOCK_SECS = 2.0  # so long a writer waits for another process
LOOK_SECS = 0.5  # how often a process looks which generations there are
READERS = 8  # connections of one file that are kept
AT_ONCE = (256, 16, 1)  # keys of one query; few statements, so that all stay compiled
PURGED_AT_ONCE = 5000
UNTIL_NOW_MS = 1000  # what ends within this time of now is a purge of whole files, and of what came to them since
MOST_PROMOTED = 10_000  # entries of old generations that wait to be written again
PAGE_BYTES = 8192  # five vectors of 384 numbers
TABLES = """
CREATE TABLE IF NOT EXISTS entries(
    id INTEGER PRIMARY KEY,
    fingerprint INTEGER NOT NULL,
    hash INTEGER NOT NULL,
    at INTEGER NOT NULL,
    value BLOB NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS by_key ON entries(fingerprint, hash);
"""
AT = HEADER.unpack_from  # of a value: its fourth field is its time


def number(digest: bytes) -> int:
    """The first 8 bytes as SQLite's integer."""
    return int.from_bytes(digest[:8], "big", signed=True)


class Generation:
    """One file. Whoever uses it after it was deleted still reads it: the kernel keeps it until it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = int(path.stem)
        self.idle: SimpleQueue[sqlite3.Connection] = SimpleQueue()

    @contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """One that no other thread uses meanwhile. Raises: sqlite3.Error, OSError."""
        try:
            connection = self.idle.get_nowait()
        except Empty:
            connection = opened(self.path)
        with ExitStack() as unless_kept:
            unless_kept.callback(connection.close)
            yield connection
            if self.idle.qsize() < READERS:
                self.idle.put(connection)
                unless_kept.pop_all()

    def close(self) -> None:
        with suppress(Empty):
            while True:
                self.idle.get_nowait().close()

    @property
    def size(self) -> int:
        return sum(size_of(path) for path in files_of(self.path))


def files_of(path: Path) -> list[Path]:
    """A database and what SQLite keeps beside it."""
    return [path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")]


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def opened(path: Path) -> sqlite3.Connection:
    """Raises: sqlite3.Error, also where there is no file: an empty one in its place would look damaged to others."""
    address = f"{path.absolute().as_uri()}?mode=rw"
    connection = sqlite3.connect(address, timeout=LOCK_SECS, isolation_level=None, check_same_thread=False, uri=True)
    with ExitStack() as unless_opened:
        unless_opened.callback(connection.close)
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("PRAGMA cache_size=-8000")  # 8 MB
        connection.execute("PRAGMA wal_autocheckpoint=2000")
        unless_opened.pop_all()
    return connection


class Vanished(StoreFailed):
    """Another process deleted the file, to make room or because it was told to."""


class SqliteStore:
    """folder: made where it is not there; max_bytes: of all generations together, for a moment one eighth more.

    on_damage: called with the words for what was deleted because it could not be read.
    """

    def __init__(self, folder: Path, max_bytes: int, on_damage: Callable[[str], None]) -> None:
        self.folder = folder
        self.share = max_bytes // GENERATIONS
        self.on_damage = on_damage
        self.lock = threading.Lock()
        self.generations: list[Generation] = []  # the newest first
        self.looked_at = float("-inf")
        self.promoted: dict[str, dict[bytes, bytes]] = {}
        self.promoted_count = 0
        self.evicted = 0

    # -- reading ------------------------------------------------------------------------------------------------------

    def get_many(self, fingerprint: str, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        generations = self.present()
        for place, generation in enumerate(generations):
            missing = [key for key in keys if key not in found] if found else list(keys)
            if not missing:
                break
            try:
                with self.failing(generation), generation.connection() as connection:
                    values = select(connection, number(bytes.fromhex(fingerprint)), missing)
            except Vanished:
                continue
            if values and place >= max(1, GENERATIONS - 2):
                self.promote(fingerprint, values)
            found |= values
        return found

    def promote(self, fingerprint: str, values: Mapping[bytes, bytes]) -> None:
        with self.lock:
            if self.promoted_count < MOST_PROMOTED:
                self.promoted_count += len(values)
                self.promoted.setdefault(fingerprint, {}).update(values)

    def present(self) -> list[Generation]:
        """The generations as they were seen a moment ago."""
        if time.monotonic() - self.looked_at > LOOK_SECS:
            self.look()
        return self.generations

    def look(self) -> None:
        """See which files are there."""
        with self.lock:
            known = {each.number: each for each in self.generations}
            try:
                numbers = {int(path.stem) for path in self.folder.glob("*.db") if path.stem.isdecimal()}
            except OSError as error:
                raise StoreFailed(Failure.AWAY, f"{self.folder} cannot be read: {error}") from None
            for gone in known.keys() - numbers:
                known[gone].close()
            self.generations = [
                known.get(each) or Generation(self.path(each)) for each in sorted(numbers, reverse=True)
            ]
            self.looked_at = time.monotonic()

    def path(self, generation: int) -> Path:
        return self.folder / f"{generation}.db"

    # -- writing ------------------------------------------------------------------------------------------------------

    def put_many(self, fingerprint: str, values: Mapping[bytes, bytes]) -> None:
        with self.lock:
            promoted, self.promoted, self.promoted_count = self.promoted, {}, 0
        promoted[fingerprint] = {**promoted.get(fingerprint, {}), **values}
        with self.writing():
            generation = self.newest()
            with self.failing(generation), generation.connection() as connection:
                for each, its_values in promoted.items():
                    insert(connection, number(bytes.fromhex(each)), its_values)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One process at a time writes, begins a generation or deletes one."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with FileLock(self.folder / "lock", timeout=LOCK_SECS, thread_local=False):
                yield
        except Timeout:
            raise StoreFailed(Failure.SLOW, f"{self.folder} is in use for over {LOCK_SECS:g} s") from None
        except OSError as error:
            raise StoreFailed(*of_system(error)) from None

    def newest(self) -> Generation:
        """The generation to write to; the next one, where that is full."""
        self.look()
        for generation in self.generations[:1]:
            if generation.size < self.share:
                return generation
        after = self.generations[0].number + 1 if self.generations else 0
        path = self.path(max(after, time.time_ns() // 1_000_000))  # a number is never used again
        try:
            create(path)
        except sqlite3.Error as error:
            raise StoreFailed(*of_sqlite(error, path)) from None
        for old in self.generations[GENERATIONS - 1 :]:
            with suppress(sqlite3.Error), old.connection() as connection:
                self.evicted += connection.execute("SELECT count(*) FROM entries").fetchone()[0]
            remove(old.path)
        self.look()
        return self.generations[0]

    def purge(self, fingerprint: str, since_ms: int, until_ms: int) -> int:
        deleted = 0
        whole = not fingerprint and since_ms <= 0 and until_ms >= time.time_ns() // 1_000_000 - UNTIL_NOW_MS
        with self.lock:  # what is in it would be written again
            self.promoted, self.promoted_count = {}, 0
        for generation in self.all():
            if whole:
                deleted += self.delete_whole(generation)
                continue
            which = ("", ()) if not fingerprint else ("fingerprint = ? AND ", (number(bytes.fromhex(fingerprint)),))
            statement = (
                f"DELETE FROM entries WHERE id IN (SELECT id FROM entries WHERE {which[0]}at BETWEEN ? AND ? "
                f"LIMIT {PURGED_AT_ONCE})"
            )
            some = PURGED_AT_ONCE
            with suppress(Vanished):
                while some == PURGED_AT_ONCE:  # others write in between
                    with self.writing(), self.failing(generation), generation.connection() as connection:
                        some = connection.execute(statement, (*which[1], since_ms, until_ms)).rowcount
                    deleted += some
        return deleted

    def all(self) -> list[Generation]:
        self.look()
        return self.generations

    def delete_whole(self, generation: Generation) -> int:
        count = 0
        with self.writing():
            with suppress(sqlite3.Error), generation.connection() as connection:
                count = connection.execute("SELECT count(*) FROM entries").fetchone()[0]
            remove(generation.path)
        self.look()
        return count

    def stats(self) -> StoreStats:
        entries = 0
        generations = self.all()
        for generation in generations:
            with suppress(Vanished), self.failing(generation), generation.connection() as connection:
                entries += connection.execute("SELECT count(*) FROM entries").fetchone()[0]
        return StoreStats(entries, sum(each.size for each in generations))

    def close(self) -> None:
        for generation in self.generations:
            generation.close()

    # -- faults -------------------------------------------------------------------------------------------------------

    @contextmanager
    def failing(self, generation: Generation) -> Iterator[None]:
        """Raises: StoreFailed for what SQLite raises. A file that cannot be read is deleted: it is begun anew."""
        try:
            yield
        except sqlite3.Error as error:
            failure, words = of_sqlite(error, generation.path)
            self.looked_at = float("-inf")
            if not generation.path.exists():
                raise Vanished(Failure.AWAY, words) from None
            if failure is Failure.DAMAGED:
                generation.close()
                with suppress(OSError):
                    remove(generation.path)
                self.on_damage(words)
            raise StoreFailed(failure, words) from None
        except OSError as error:
            raise StoreFailed(*of_system(error)) from None


def create(path: Path) -> None:
    """A new file, of this user alone; under its name only when it has its tables: others read it at once."""
    unfinished = path.with_name("unfinished")
    remove(unfinished)  # of a process that was killed
    os.close(os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    connection = opened(unfinished)
    try:
        connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.executescript(TABLES)
    finally:
        connection.close()
    unfinished.rename(path)


def remove(path: Path) -> None:
    """Raises: OSError."""
    for file in files_of(path):
        file.unlink(missing_ok=True)


def select(connection: sqlite3.Connection, fingerprint: int, keys: Sequence[bytes]) -> dict[bytes, bytes]:
    """The values of those keys that are there. Two keys with one hash are one row: the cache compares the whole key."""
    by_hash = {number(key): key for key in keys}
    hashes = list(by_hash)
    found: dict[bytes, bytes] = {}
    begin = 0
    for size in AT_ONCE:
        marks = ",".join("?" * size)
        query = f"SELECT hash, value FROM entries WHERE fingerprint = ? AND hash IN ({marks})"
        while len(hashes) - begin >= size:
            part = hashes[begin : begin + size]
            for hash_, value in connection.execute(query, (fingerprint, *part)):
                if isinstance(value, bytes):  # of a damaged file it may be anything
                    found[by_hash[hash_]] = value
            begin += size
    return found


def insert(connection: sqlite3.Connection, fingerprint: int, values: Mapping[bytes, bytes]) -> None:
    rows = [(fingerprint, number(key), AT(value)[3], value) for key, value in values.items()]
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT OR REPLACE INTO entries(fingerprint, hash, at, value) VALUES (?, ?, ?, ?)", rows)
