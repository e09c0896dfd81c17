"""The state file and the registry of models: read without locks, changed only through `update` with a pure function.

A change is written to a temporary file, synced, renamed over the state file, and the directory is synced: the rename
is the commit point of every verb. Afterwards the same text is written, in the same way, as the last good copy. A file
that does not parse is never overwritten: it is set aside with a time stamp, and the last good copy takes its place.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import tomli_w
from filelock import FileLock, Timeout

from appliance.core import models, state
from appliance.core.models import Models
from appliance.core.problems import Kind, Problem
from appliance.core.state import State

LOCK_TIMEOUT_SECS = 10
UNREADABLE = (
    ValueError,
    KeyError,
    TypeError,
    Problem,
)  # not TOML, not a state, a value that no verb could have written


Kept = TypeVar("Kept", State, Models)


class DurableFile(Generic[Kept]):
    """One file; any number of processes and threads may use their own object on it at once.

    on_repair(message) is called when an unreadable file was set aside. form: (load, dump, what is there before the
    first change).
    """

    def __init__(
        self,
        path: str | Path,
        now: Callable[[], str],
        on_repair: Callable[[str], None],
        form: tuple[Callable[[Any], Kept], Callable[[Kept], dict[str, Any]], Kept],
    ) -> None:
        self.load: Callable[[Any], Kept] = form[0]
        self.dump: Callable[[Kept], dict[str, Any]] = form[1]
        self.empty: Kept = form[2]
        self.path = Path(path)
        self.good = self.path.with_name(self.path.name + ".good")
        self.lock = self.path.with_name(self.path.name + ".lock")
        self.now = now
        self.on_repair = on_repair

    def read(self) -> Kept:
        """The current state; the last good copy when the file does not parse; empty before the first change.

        Raises: Problem when the machine cannot read files at all (permissions, descriptors): that is not emptiness.
        """
        for path in (self.path, self.good):
            try:
                return self.parsed(path)
            except (FileNotFoundError, *UNREADABLE):
                continue
            except OSError as error:
                raise unreachable(path, error) from error
        return self.empty

    def update(self, change: Callable[[Kept], Kept]) -> Kept:
        """Apply a pure function and make the result durable; returns it.

        Raises: whatever ``change`` raises (then nothing changed); Problem STATE_WRITE_FAILED when the disk refuses.
        """
        with self.locked():
            self.repair()
            before = self.read()
            after = change(before)
            if after == before:
                return before
            after = replace(after, generation=before.generation + 1)
            text = tomli_w.dumps(self.dump(after))
            self.commit(self.path, text)
            try:
                write_durably(self.good, text)
            except OSError as error:
                self.on_repair(f"Cannot write the last good copy {self.good}: {error}; {self.path.name} itself is good")
            return after

    def commit(self, path: Path, text: str) -> None:
        try:
            write_durably(path, text)
        except OSError as error:
            raise Problem(
                Kind.EXHAUSTED,
                "STATE_WRITE_FAILED",
                f"Cannot write {path}: {error.strerror or error}. Nothing was changed; free disk space "
                "or make the folder writable, then try again",
            ) from error

    def repair(self) -> None:
        """Set an unreadable state file aside and put the last good copy in its place. Under the lock only."""
        try:
            self.parsed(self.path)
            return
        except FileNotFoundError:
            if not self.good.exists():
                return
            reason = "is missing"
        except UNREADABLE as error:
            reason = f"was unreadable ({error}) and is kept as {self.set_aside(self.path)}"
        except OSError as error:
            raise unreachable(self.path, error) from error
        try:
            self.parsed(self.good)
        except FileNotFoundError:
            reason += "; there was no good copy"
        except UNREADABLE:
            reason += f"; the good copy was unreadable too and is kept as {self.set_aside(self.good)}"
        kept = self.read()
        self.commit(self.path, tomli_w.dumps(self.dump(kept)))
        self.on_repair(f"File {self.path} {reason}; the last good copy, generation {kept.generation}, is used")

    def parsed(self, path: Path) -> Kept:
        with path.open("rb") as file:
            return self.load(tomllib.load(file))

    def set_aside(self, path: Path) -> str:
        """Rename a file that nobody can read, for a person to look at; returns its new name."""
        aside = path.with_name(f"{path.name}.bad-{self.now().replace(':', '')}")
        os.replace(path, aside)
        return aside.name

    @contextmanager
    def locked(self) -> Iterator[None]:
        lock = FileLock(self.lock, timeout=LOCK_TIMEOUT_SECS)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            raise Problem(
                Kind.UNAVAILABLE,
                "BACKEND_UNAVAILABLE",
                f"Cannot lock {self.path.name} within {LOCK_TIMEOUT_SECS} s: another change hangs; see {self.lock}",
            ) from None
        except OSError as error:
            raise Problem(
                Kind.EXHAUSTED, "STATE_WRITE_FAILED", f"Cannot lock {self.path}: {error}. Nothing was changed"
            ) from error
        try:
            yield
        finally:
            lock.release()


def unreachable(path: Path, error: OSError) -> Problem:
    return Problem(
        Kind.UNAVAILABLE,
        "BACKEND_UNAVAILABLE",
        f"Cannot read {path}: {error.strerror or error}. Nothing was changed; make it readable",
    )


class StateFile(DurableFile[State]):
    def __init__(self, path: str | Path, now: Callable[[], str], on_repair: Callable[[str], None]) -> None:
        super().__init__(path, now, on_repair, (state.load, state.dump, State()))


class ModelsFile(DurableFile[Models]):
    def __init__(self, path: str | Path, now: Callable[[], str], on_repair: Callable[[str], None]) -> None:
        super().__init__(path, now, on_repair, (models.load, models.dump, Models()))


def write_durably(path: Path, text: str) -> None:
    """Old content or new content, never neither, also after a power cut. Raises OSError, then the old one stands."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
