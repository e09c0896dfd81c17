"""API keys in files: which callers are let in when a file cannot be read; and that all processes agree."""

import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest

from appliance.core import access
from appliance.core.access import Key
from appliance.drivers import keysfile
from appliance.drivers.keysfile import Keyring
from testing.running import eventually

OWN = Key("own", access.digest("tei-own"), "admin")
OTHER = Key("other", access.digest("tei-other"), "inference")
CONFIGURED = Key("configured", access.digest("tei-configured"), "read")
SETTINGS = "api_port = 9000\n"
WITH_KEY = f'{SETTINGS}[[keys]]\nname = "configured"\nsha256 = "{CONFIGURED.sha256}"\nrole = "read"\n'
BROKEN = "api_port = \n"
OFF: tuple[bool, tuple[Key, ...]] = (False, ())
SHUT: tuple[bool, tuple[Key, ...]] = (True, ())
SOON_SECS = 2.0


class Files:
    """The two files in a folder, and the processes that follow them."""

    def __init__(self, folder: Path) -> None:
        self.own, self.config = folder / "keys.toml", folder / "appliance.toml"
        self.config.write_text(SETTINGS)

    def process(self) -> Keyring:
        """One that starts now."""
        return Keyring(self.own, self.config)


@pytest.fixture
def files() -> Iterator[Files]:
    """In a folder into which everybody may look: pytest's own are closed."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Files(Path(folder))


@contextmanager
def no_descriptors() -> Iterator[None]:
    """What is open stays open; nothing more can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def closed_to_us(path: Path) -> Iterator[None]:
    """Nobody but root may read it, and we are somebody else."""
    before = os.geteuid()
    path.chmod(0)
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)
        path.chmod(0o600)


def looks(keys: Keyring) -> tuple[bool, tuple[Key, ...]]:
    """A look that is not one of a moment ago."""
    keys.looked_at = float("-inf")
    return keys.current()


def sees(keys: Keyring, wanted: tuple[bool, tuple[Key, ...]]) -> None:
    eventually(lambda: looks(keys) == wanted, SOON_SECS)
    assert looks(keys) == wanted


# -- the configuration ------------------------------------------------------------------------------------------------


def test_a_mistake_in_a_configuration_without_keys_asks_nobody_for_one(files: Files) -> None:
    older = files.process()
    files.config.write_text(BROKEN)
    newer = files.process()
    for keys in (older, newer):
        assert looks(keys) == OFF
        assert str(files.config) in keys.error
    files.config.write_text(SETTINGS)
    for keys in (older, newer):
        assert looks(keys) == OFF
        assert keys.error == ""


def test_a_configuration_with_a_byte_order_mark_has_its_keys(files: Files) -> None:
    """Editors of some systems write one, and the settings are read with it: without its keys all doors were open."""
    files.config.write_text("\ufeff" + WITH_KEY, encoding="utf-8")
    assert looks(files.process()) == (True, (CONFIGURED,))


@pytest.mark.parametrize(
    "text", [BROKEN, "[[keys]]\nname = 1\n", "keys = " + "[" * 100_000, None], ids=["no TOML", "no key", "deep", "gone"]
)
def test_a_mistake_in_a_configuration_with_keys_takes_none_away(files: Files, text: str | None) -> None:
    files.config.write_text(WITH_KEY)
    older = files.process()
    assert looks(older) == (True, (CONFIGURED,))
    files.config.unlink() if text is None else files.config.write_text(text)
    newer = files.process()
    assert looks(older) == (True, (CONFIGURED,))
    assert looks(newer) == SHUT
    assert str(files.config) in older.error
    files.config.write_text(WITH_KEY)
    for keys in (older, newer):
        assert looks(keys) == (True, (CONFIGURED,))
        assert keys.error == ""


def test_a_process_that_starts_on_a_broken_configuration_knows_that_it_had_keys(files: Files) -> None:
    """Added while the others ran, and broken before this one started: else it alone would let everybody in."""
    older = files.process()
    assert looks(older) == OFF
    files.config.write_text(WITH_KEY)
    assert looks(older) == (True, (CONFIGURED,))
    files.config.write_text(BROKEN)
    assert looks(files.process()) == SHUT


def test_keys_taken_out_of_the_configuration_are_asked_for_until_the_next_start_of_the_appliance(files: Files) -> None:
    files.config.write_text(WITH_KEY)
    older = files.process()
    files.config.write_text(BROKEN)
    files.process().unseal_configuration()  # of which nothing can be known
    files.config.write_text(SETTINGS)
    assert looks(older) == looks(files.process()) == SHUT
    files.process().unseal_configuration()
    assert looks(files.process()) == OFF


def test_a_forked_process_does_not_count_what_its_parent_read_long_ago(files: Files) -> None:
    files.config.write_text(WITH_KEY)
    parent = files.process()
    files.config.write_text(BROKEN)
    if (child := os.fork()) == 0:
        os._exit(0 if looks(parent) == SHUT else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert looks(parent) == (True, (CONFIGURED,))


# -- when a change counts ---------------------------------------------------------------------------------------------


def test_what_was_written_counts_in_every_process_when_the_writer_goes_on(files: Files) -> None:
    keys = files.process()
    for written in ((OWN,), (OWN, OTHER), ()):
        looks(keys)  # this one has looked a moment ago
        keysfile.write(files.own, written)
        assert keys.current() == (True, written)


def test_no_thread_answers_from_before_a_change_while_another_has_not_ended_its_look(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that looks may be without a processor for as long as others have it."""
    keys, follows = files.process(), Event()
    goes_on, follow = Event(), keys.own.follow

    def slow_follow() -> None:
        follow()
        follows.set()
        goes_on.wait(SOON_SECS)

    monkeypatch.setattr(keys.own, "follow", slow_follow)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(looks, keys)
        assert follows.wait(SOON_SECS)
        keysfile.write(files.own, (OWN,))
        Timer(0.1, goes_on.set).start()
        assert keys.current() == (True, (OWN,))
        slow.result()


# -- keys.toml --------------------------------------------------------------------------------------------------------

CLOSED: dict[str, Callable[[Path], AbstractContextManager[None]]] = {
    "no file descriptor": lambda path: no_descriptors(),
    "not ours": closed_to_us,
}


@pytest.mark.parametrize("closed", CLOSED.values(), ids=CLOSED.keys())
def test_a_file_that_cannot_be_read_for_a_moment_loses_no_key(files: Files, closed: Any) -> None:
    keysfile.write(files.own, (OWN,))
    keys = files.process()
    keysfile.write(files.own, (OWN, OTHER))
    with closed(files.own):
        assert looks(keys) == (True, (OWN,))
        assert str(files.own) in keys.error
    sees(keys, (True, (OWN, OTHER)))  # although nothing of the file has changed that a look at it would tell
    assert keys.error == ""


@pytest.mark.parametrize("closed", CLOSED.values(), ids=CLOSED.keys())
def test_a_process_that_starts_while_it_cannot_be_read_lets_nobody_in_and_looks_again(
    files: Files, closed: Any
) -> None:
    keysfile.write(files.own, (OWN,))
    with closed(files.own):
        keys = files.process()
        assert looks(keys) == SHUT
    sees(keys, (True, (OWN,)))


@pytest.mark.parametrize("closed", CLOSED.values(), ids=CLOSED.keys())
def test_where_no_key_ever_was_nothing_that_cannot_be_read_asks_for_one(files: Files, closed: Any) -> None:
    keys = files.process()
    files.config.write_text(f"{SETTINGS}\n")
    with closed(files.config):
        assert looks(keys) == OFF
        assert str(files.config) in keys.error
    sees(keys, OFF)


@pytest.mark.parametrize("damage", ["[[keys]\n", "keys = [1]\n", "keys = " + "[" * 100_000, None])
def test_no_key_of_a_damaged_file_counts_in_any_process(files: Files, damage: str | None) -> None:
    keysfile.write(files.own, (OWN,))
    files.config.write_text(WITH_KEY)
    older = files.process()
    files.own.unlink()
    files.own.mkdir() if damage is None else files.own.write_text(damage)
    for keys in (older, files.process()):
        assert looks(keys) == (True, (CONFIGURED,))
        assert str(files.own) in keys.error
        assert keysfile.read_error(files.own) == keys.error
    files.own.rmdir() if damage is None else files.own.unlink()
    assert keysfile.read_error(files.own) == ""
    sees(older, (True, (CONFIGURED,)))
    keysfile.write(files.own, (OWN,))
    sees(older, (True, (CONFIGURED, OWN)))


def test_a_file_that_was_deleted_is_remembered_also_where_the_configuration_had_keys_before_it(files: Files) -> None:
    files.config.write_text(WITH_KEY)
    older = files.process()
    keysfile.write(files.own, (OWN,))
    sees(older, (True, (CONFIGURED, OWN)))
    files.own.unlink()
    files.config.write_text(SETTINGS)
    files.process().unseal_configuration()
    assert looks(older) == looks(files.process()) == SHUT
