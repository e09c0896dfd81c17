"""Entries for the tests of stores, and processes that use one: ``python -m testing.cachestores WHAT FOLDER ...``."""

from __future__ import annotations

import hashlib
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from filelock import FileLock

from appliance.core.cachekey import KEY_BYTES, CachedEmbedding
from appliance.core.cachestore import Failure, Store, StoreFailed
from appliance.drivers.sqlitestore import SqliteStore

if TYPE_CHECKING:
    from appliance.drivers.qdrantstore import QdrantStore

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
FINGERPRINT = hashlib.blake2b(b"a fingerprint", digest_size=16).hexdigest()
Rows = dict[bytes, bytes]
PATIENCE_SECS = 60.0


def qdrant(place: str, secs: float) -> QdrantStore:
    """The store at a URL or in a folder, with a deadline."""
    from appliance.drivers.qdrantstore import QdrantStore  # only now: it takes a second of each worker of the tests

    return QdrantStore(place, secs)


def key_of(name: object) -> bytes:
    return hashlib.blake2b(str(name).encode(), digest_size=KEY_BYTES).digest()


def entry(key: bytes, vector: bytes, at_ms: int = 1000) -> bytes:
    return CachedEmbedding(key, at_ms, 5, 3, vector).packed()


def row(name: object, width: int = 384, at_ms: int = 1000) -> tuple[bytes, bytes]:
    """The same of the same arguments, in every process."""
    key = key_of(name)
    numbers = np.random.default_rng(int.from_bytes(key[:8], "big")).standard_normal(width, dtype=np.float32)
    return key, entry(key, numbers.astype("<f4").tobytes(), at_ms)


def rows(names: object, count: int, width: int = 384, at_ms: int = 1000) -> Rows:
    return dict(row(f"{names}-{number}", width, at_ms) for number in range(count))


def failure(call: Callable[[], object]) -> Failure:
    """Why it failed; it must."""
    try:
        call()
    except StoreFailed as error:
        return error.failure
    raise AssertionError("it did not fail")


def works(store: Store) -> bool:
    put = rows("works", 2)
    try:
        store.put_many(FINGERPRINT, put)
        return store.get_many(FINGERPRINT, list(put)) == put
    except StoreFailed:
        return False


def command(what: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", "testing.cachestores", what, *map(str, arguments)]


def begin(what: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(command(what, *arguments), cwd=ROOT, stdout=subprocess.PIPE, text=True)


def run(what: str, *arguments: object) -> str:
    """What it printed; it must end well."""
    process = begin(what, *arguments)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 0, (what, process.returncode, told)
    return told


def store_at(folder: str, max_bytes: int = 256 * MIB) -> SqliteStore:
    return SqliteStore(Path(folder), max_bytes, lambda words: print("damage", words, flush=True))


def put(folder: str, who: str, calls: str, count: str) -> None:
    """``calls`` batches of ``count`` entries; a line when it begins and one for each that is done."""
    store = store_at(folder)
    print("begun", flush=True)
    for call in range(int(calls)):
        put_patiently(store, rows(f"{who}-{call}", int(count)))
        print(call, flush=True)


def put_patiently(store: Store, batch: Rows) -> None:
    """Tries again while another process has the lock: on a busy machine it may have it for longer than a call waits."""
    until = time.monotonic() + PATIENCE_SECS
    while True:
        try:
            return store.put_many(FINGERPRINT, batch)
        except StoreFailed as error:
            if error.failure is not Failure.SLOW or time.monotonic() > until:
                raise


def put_until_it_fails(folder: str, largest: str) -> None:
    """No file may grow beyond ``largest`` bytes. Prints why it failed; the kernel's signal is ignored."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest), int(largest)))
    put_and_tell(folder)


def put_and_tell(folder: str) -> None:
    """Puts up to 40 MB; prints the first failure, and whether it was one when reading."""
    store = store_at(folder)
    told = []
    for call in range(250):
        batch = rows(call, 100)
        for what in (
            lambda batch=batch: store.put_many(FINGERPRINT, batch),
            lambda batch=batch: store.get_many(FINGERPRINT, list(batch)),
        ):
            try:
                what()
            except StoreFailed as error:
                told.append(error.failure)
        if told:
            break
    print(*told)


def hold(folder: str, secs: str) -> None:
    """Holds the lock of the folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with FileLock(Path(folder) / "lock"):
        print("held", flush=True)
        time.sleep(float(secs))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
