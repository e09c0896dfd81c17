"""Files that are damaged, in use, full or read-only: StoreFailed and nothing else, no wrong value; they work again."""

import random
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from appliance.core.cachekey import KEY_BYTES, CachedEmbedding, Damaged, unpacked
from appliance.core.cachestore import Failure, Store, StoreFailed
from appliance.drivers.sqlitestore import GENERATIONS, LOCK_SECS, SqliteStore
from testing.cachestores import FINGERPRINT, MIB, begin, failure, key_of, rows, run, works
from testing.running import eventually

pytestmark = pytest.mark.processes

SLACK_SECS = 15.0  # for a busy machine; a call that waits without a bound takes longer


# -- SQLite: damage ---------------------------------------------------------------------------------------------------


def wrong(got: dict[bytes, bytes], put: dict[bytes, bytes]) -> list[bytes]:
    """Keys with a value that passes for whole and is not what was put."""
    keys = []
    for key, value in got.items():
        with suppress(Damaged):
            if key not in put or unpacked(key, value) != unpacked(key, put[key]):
                keys.append(key)
    return keys


def damage(path: Path, dice: random.Random) -> str:
    """Cuts the file, overwrites a piece, or turns a few bits. What it did."""
    size = path.stat().st_size
    what = dice.choice(["cut", "piece", "bits", "head"])
    with path.open("r+b") as file:
        if what == "cut":
            file.truncate(dice.randrange(size))
        elif what == "piece":
            file.seek(dice.randrange(size))
            file.write(dice.randbytes(dice.choice([1, 16, 512, 8192])))
        else:
            for _ in range(dice.randrange(1, 9)):
                place = dice.randrange(min(size, 8192) if what == "head" else size)
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ 1 << dice.randrange(8)]))
    return what


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[bytes, bytes]]:
    """A closed store, with a write-ahead log as a process that was killed leaves it."""
    folder = tmp_path_factory.mktemp("pristine") / "cache"
    put = rows("whole", 60, 64) | rows("wide", 10, 2100)
    store = SqliteStore(folder, 64 * MIB, print)
    for part in range(0, 70, 10):
        store.put_many(FINGERPRINT, dict(list(put.items())[part : part + 10]))
        if part == 30:
            store.close()  # what came before is in the file, what comes after in the log
    copied = folder.with_name("copied")
    shutil.copytree(folder, copied)
    store.close()
    return copied, put


def tried(store: Store, put: dict[bytes, bytes], here: Path, what: str) -> int:
    """How many calls failed. Each gives no wrong value; one that fails deleted a file."""
    calls: list[Callable[[], object]] = [
        lambda: wrong(store.get_many(FINGERPRINT, list(put)), put),
        lambda: store.put_many(FINGERPRINT, rows("after", 3)),
        lambda: store.stats() and None,
        lambda: store.purge(FINGERPRINT, 5, 6) and None,
    ]
    failures = []
    for call in calls:
        before = set(here.glob("*.db"))
        try:
            assert not call(), what
        except StoreFailed as error:
            failures.append((error.failure, len(before - set(here.glob("*.db")))))
    assert failures == [(Failure.DAMAGED, 1)] * len(failures), what
    return len(failures)


def damaged_variants(folder: Path, pristine: tuple[Path, dict[bytes, bytes]], seeds: range, opened: bool) -> None:
    """opened: another process, here another store, uses the files while they are damaged."""
    source, put = pristine
    all_said = []
    for seed in seeds:
        dice = random.Random(seed)
        here = folder / str(seed)
        shutil.copytree(source, here)
        said: list[str] = []
        stores = [SqliteStore(here, 64 * MIB, said.append) for _ in range(1 + opened)]
        if opened:
            assert stores[1].get_many(FINGERPRINT, list(put)) == put
        files = sorted(path for path in here.iterdir() if path.suffix in (".db", ".db-wal") and path.stat().st_size)
        what = f"seed {seed}: {damage(dice.choice(files), dice)}"
        assert sum(tried(store, put, here, what) for store in stores) == len(said), what
        for store in stores:  # it works again, whatever is left of the files
            eventually(lambda store=store: works(store))
            assert not wrong(store.get_many(FINGERPRINT, list(put)), put), what
            store.close()
        shutil.rmtree(here)
        all_said += said
    assert len(all_said) > len(seeds) / 10, "the test damages too little"


@pytest.mark.timeout(600)
def test_a_damaged_file_gives_no_wrong_value_and_is_begun_anew(
    tmp_path: Path, pristine: tuple[Path, dict[bytes, bytes]]
) -> None:
    damaged_variants(tmp_path, pristine, range(160), opened=False)


def test_a_file_that_is_damaged_while_it_is_open_gives_no_wrong_value(
    tmp_path: Path, pristine: tuple[Path, dict[bytes, bytes]]
) -> None:
    damaged_variants(tmp_path, pristine, range(1000, 1040), opened=True)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_many_damaged_files(tmp_path: Path, pristine: tuple[Path, dict[bytes, bytes]]) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print("seeds from", seed)
    damaged_variants(tmp_path, pristine, range(seed, seed + 3000), opened=False)
    damaged_variants(tmp_path, pristine, range(seed, seed + 1000), opened=True)


@pytest.mark.parametrize("content", [b"", b"no database" * 100, bytes(8192)], ids=["empty", "text", "zeros"])
def test_what_is_no_database_is_deleted_and_begun_anew(tmp_path: Path, content: bytes) -> None:
    said: list[str] = []
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "1.db").write_bytes(content)
    store = SqliteStore(folder, 64 * MIB, said.append)
    assert failure(lambda: store.get_many(FINGERPRINT, [key_of("x")])) is Failure.DAMAGED
    assert len(said) == 1
    assert "1.db" in said[0]
    put = rows("new", 3)
    store.put_many(FINGERPRINT, put)
    assert store.get_many(FINGERPRINT, list(put)) == put
    assert len(said) == 1
    store.close()


def test_what_a_killed_process_left_half_made_is_in_nobodys_way(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    for name in ("unfinished", "unfinished-wal", "unfinished-shm"):
        (folder / name).write_bytes(b"half" * 1000)
    store = SqliteStore(folder, 64 * MIB, pytest.fail)
    put = rows("new", 3)
    store.put_many(FINGERPRINT, put)
    assert store.get_many(FINGERPRINT, list(put)) == put
    assert not list(folder.glob("unfinished*"))
    store.close()


def kills(folder: Path, seeds: range) -> None:
    """One folder: what each killed process left is there for the next."""
    for seed in seeds:
        writer = begin("put", folder, seed, 100_000, 7)
        assert writer.stdout
        assert writer.stdout.readline() == "begun\n"
        time.sleep(random.Random(seed).uniform(0, 0.08))
        writer.kill()
        told, _ = writer.communicate()
        done = [int(line) for line in told.splitlines() if line.isdecimal()]
        assert "damage" not in told, seed
        store = SqliteStore(folder, 256 * MIB, pytest.fail)
        expected: dict[bytes, bytes] = {}
        for call in done[-20:]:
            expected |= rows(f"{seed}-{call}", 7)
        next_call = rows(f"{seed}-{len(done)}", 7)  # it may have been on its way: all of it is there, or nothing
        got = store.get_many(FINGERPRINT, [*expected, *next_call])
        late = {key: value for key, value in got.items() if key in next_call}
        assert {key: value for key, value in got.items() if key in expected} == expected, seed
        assert late in ({}, next_call), seed
        store.put_many(FINGERPRINT, rows("between", 2))
        store.close()


@pytest.mark.timeout(600)
def test_a_killed_writer_leaves_whole_batches(tmp_path: Path) -> None:
    kills(tmp_path / "cache", range(20))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_many_killed_writers(tmp_path: Path) -> None:
    kills(tmp_path / "cache", range(100, 300))


# -- SQLite: others, and the disk -------------------------------------------------------------------------------------


def test_a_file_that_another_process_deleted_is_not_made_again_by_reading(tmp_path: Path) -> None:
    said: list[str] = []
    one, two = (SqliteStore(tmp_path / "cache", 64 * MIB, said.append) for _ in range(2))
    put = rows("there", 3)
    one.put_many(FINGERPRINT, put)
    assert two.get_many(FINGERPRINT, list(put)) == put
    for generation in two.generations:  # as if all connections were in use, so that this call opens another
        generation.close()
    assert one.purge("", 0, 2**53) == 3
    assert two.get_many(FINGERPRINT, list(put)) == {}
    assert two.stats().entries == 0
    assert said == []
    assert not list((tmp_path / "cache").glob("*.db*"))
    for store in (one, two):
        store.close()


def test_another_process_that_holds_the_lock_is_not_waited_for_long(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "cache", 64 * MIB, pytest.fail)
    put = rows("there", 3)
    store.put_many(FINGERPRINT, put)
    holder = begin("hold", tmp_path / "cache", 60)
    assert holder.stdout
    assert holder.stdout.readline() == "held\n"
    begun = time.monotonic()
    assert failure(lambda: store.put_many(FINGERPRINT, rows("more", 1))) is Failure.SLOW
    assert time.monotonic() - begun < LOCK_SECS + SLACK_SECS
    assert store.get_many(FINGERPRINT, list(put)) == put  # who reads does not wait
    holder.kill()
    holder.communicate()
    store.put_many(FINGERPRINT, rows("more", 1))
    store.close()


def test_a_file_that_may_not_grow_ends_no_process(tmp_path: Path) -> None:
    """The kernel refuses what is written beyond a limit; it would end a process that did not ignore its signal."""
    assert run("put_until_it_fails", tmp_path / "cache", 3 * MIB) == "full\n"
    store = SqliteStore(tmp_path / "cache", 64 * MIB, pytest.fail)
    early = rows(0, 100)
    assert store.get_many(FINGERPRINT, list(early)) == early
    put = rows("after", 3)
    store.put_many(FINGERPRINT, put)
    assert store.get_many(FINGERPRINT, list(put)) == put
    store.close()


def test_a_full_disk_is_called_so_and_what_is_there_is_still_read(small_disk: Path) -> None:
    store = SqliteStore(small_disk / "cache", 64 * MIB, pytest.fail)
    put = rows("early", 10)
    store.put_many(FINGERPRINT, put)
    failures = []
    for call in range(60):
        try:
            store.put_many(FINGERPRINT, rows(call, 100))
        except StoreFailed as error:
            failures.append(error.failure)
    assert failures
    assert set(failures) == {Failure.FULL}
    assert store.get_many(FINGERPRINT, list(put)) == put
    store.purge("", 0, 2**53)
    store.put_many(FINGERPRINT, put)
    assert store.get_many(FINGERPRINT, list(put)) == put
    store.close()


def test_a_disk_that_is_full_before_the_first_entry_is_called_so(small_disk: Path) -> None:
    with pytest.raises(OSError):
        (small_disk / "filler").write_bytes(bytes(8 * MIB))
    store = SqliteStore(small_disk / "cache", 64 * MIB, pytest.fail)
    assert failure(lambda: store.put_many(FINGERPRINT, rows("x", 1))) is Failure.FULL
    (small_disk / "filler").unlink()
    store.put_many(FINGERPRINT, rows("x", 1))
    store.close()


def test_a_disk_that_became_read_only_is_called_so(small_disk: Path) -> None:
    put = rows("early", 10)
    store = SqliteStore(small_disk / "cache", 64 * MIB, pytest.fail)
    store.put_many(FINGERPRINT, put)
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    store = SqliteStore(small_disk / "cache", 64 * MIB, pytest.fail)
    begun = time.monotonic()
    assert failure(lambda: store.put_many(FINGERPRINT, rows("x", 1))) is Failure.READ_ONLY
    assert time.monotonic() - begun < LOCK_SECS + SLACK_SECS
    assert failure(lambda: store.get_many(FINGERPRINT, list(put))) is Failure.AWAY  # SQLite makes files beside it
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    store.put_many(FINGERPRINT, rows("x", 1))
    assert store.get_many(FINGERPRINT, list(put)) == put
    store.close()


def test_the_size_is_bounded_and_what_is_used_stays(tmp_path: Path) -> None:
    bound = 8 * MIB
    store = SqliteStore(tmp_path / "cache", bound, pytest.fail)
    used, unused = rows("used", 20), rows("unused", 20)
    store.put_many(FINGERPRINT, used | unused)
    largest, written, call, last = 0, 0, 0, {}
    while written < 5 * bound:
        last = rows(call, 50)
        store.put_many(FINGERPRINT, last)
        assert store.get_many(FINGERPRINT, list(used)) == used, call
        written += sum(map(len, last.values()))
        call += 1
        largest = max(largest, sum(path.stat().st_size for path in (tmp_path / "cache").iterdir()))
    assert largest < 1.3 * bound, largest / bound
    assert largest > 0.5 * bound, largest / bound
    assert len(list((tmp_path / "cache").glob("*.db"))) <= GENERATIONS
    assert store.get_many(FINGERPRINT, list(last)) == last
    assert store.get_many(FINGERPRINT, list(unused)) == {}
    assert store.evicted > 0
    store.close()


def test_what_waits_to_be_written_again_is_purged_as_well(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "cache", MIB, pytest.fail)
    used = rows("used", 5)
    store.put_many(FINGERPRINT, used)
    for call in range(1000):
        if len(store.generations) == GENERATIONS:
            break
        store.put_many(FINGERPRINT, rows(call, 20))
    assert store.get_many(FINGERPRINT, list(used)) == used  # out of the oldest file
    store.purge(FINGERPRINT, 0, 2000)
    store.put_many(FINGERPRINT, rows("after", 1))
    assert store.get_many(FINGERPRINT, list(used)) == {}
    store.close()


def test_a_purge_up_to_a_time_leaves_what_was_computed_later(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "cache", 64 * MIB, pytest.fail)
    before, after = rows("before", 3, at_ms=1000), rows("after", 3, at_ms=1001)
    store.put_many(FINGERPRINT, before | after)
    assert store.purge("", 0, 1000) == 3
    assert store.get_many(FINGERPRINT, [*before, *after]) == after
    store.close()


def test_a_purge_that_is_done_once_more_leaves_what_was_computed_since(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "cache", 3 * MIB, lambda words: None)
    now_ms = time.time_ns() // 1_000_000
    before, since = (
        {key: CachedEmbedding(key, at_ms, 1, 1, b"1234").packed()}
        for key, at_ms in ((b"b" * KEY_BYTES, now_ms - 40_000), (b"s" * KEY_BYTES, now_ms - 20_000))
    )
    store.put_many(FINGERPRINT, before | since)
    assert store.purge("", 0, now_ms - 30_000) == 1
    assert store.get_many(FINGERPRINT, [*before, *since]) == since
    store.close()
