"""The state file and the registry of models: read without a lock, changed only by `update` with a pure function.

A change is written to a temporary file, synced, renamed over the state file, and the directory is synced: the rename
is the commit point of every verb. Afterwards the same text is written, in the same way, as the last good copy.

    file           last good copy    read                      the next change
    reads          any               the file                  is made
    missing        missing           empty                     is made
    missing        reads             the copy                  puts the copy back first
    cannot be used reads             the copy                  sets the file aside, dated, and puts the copy back first
    any other                        STATE_UNREADABLE          STATE_UNREADABLE: nothing is set aside or written

A file cannot be used when it is no TOML, or when this release refuses its content: a newer release wrote it, or a check
became stricter. If no copy can be used, an empty state would stop and forget all instances; so a person has to decide.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import tomli
import tomli_w

from appliance.core import models, moving_in, state_toml
from appliance.core.conditions import HINTS
from appliance.core.events import Event
from appliance.core.models import Models
from appliance.core.problems import Kind, Problem
from appliance.core.state import State
from appliance.files.locking import locked
from appliance.files.replacement import Unconfirmed, replace_file

LOCK_TIMEOUT_SECS = 10
LONGEST_REASON = 300  # characters of why a file cannot be used; the value at fault may be long
UNREADABLE = (
    ValueError,
    KeyError,
    TypeError,
    RecursionError,
    Problem,
)  # not TOML, not a state, a value that no verb could have written


Content = TypeVar("Content", State, Models)


class Update(NamedTuple, Generic[Content]):
    """What a change was made of, and what it was changed to."""

    before: Content
    after: Content


@dataclass(frozen=True)
class FileForm(Generic[Content]):
    """How a content is read and written, and what it is before the first change."""

    load: Callable[[Any], Content]
    dump: Callable[[Content], dict[str, Any]]
    empty: Content


class DurableFile(Generic[Content]):
    """One file. Any number of processes and threads may use objects of their own for it at the same time.

    on_repair(message) is called when an unreadable file was set aside.
    """

    def __init__(
        self,
        path: str | Path,
        now: Callable[[], str],
        on_repair: Callable[[str], None],
        form: FileForm[Content],
    ) -> None:
        self.form: FileForm[Content] = form
        self.path = Path(path)
        self.good = self.path.with_name(self.path.name + ".good")
        self.lock = self.path.with_name(self.path.name + ".lock")
        self.now = now
        self.on_repair = on_repair
        self.parsed_last: tuple[bytes, Content] | None = None

    def read(self) -> Content:
        """The current content; that of the last good copy when the file cannot be used; empty before the first change.

        Raises: Problem STATE_UNREADABLE when neither file can be used; Problem unavailable when the files cannot be
        read (permissions, descriptors).
        """
        errors: dict[Path, Exception] = {}
        for path in (self.path, self.good):
            try:
                return self.parsed(path)
            except FileNotFoundError:
                continue
            except UNREADABLE as error:
                errors[path] = error
            except OSError as error:
                raise unreachable(path, error) from error
        if errors:
            raise unusable(self.path, errors)
        return self.form.empty

    def update(self, change: Callable[[Content], Content]) -> Update[Content]:
        """Apply a pure function and make the result durable.

        Raises, when nothing was changed: whatever ``change`` raises; Problem STATE_WRITE_FAILED when the disk refuses;
        Problem internal for a content that nobody could read any more.
        """
        with self.locked():
            self.repair()
            before = self.read()
            after = change(before)
            if after == before:
                return Update(before, before)
            after = replace(after, generation=before.generation + 1)
            text = tomli_w.dumps(self.form.dump(after))
            readable = self.read_back(text)
            self.commit(self.path, text)
            self.parsed_last = text.encode(), readable
            try:
                replace_file(self.good, text, durable=True)
            except OSError as error:
                self.on_repair(f"Cannot write the last good copy {self.good}: {error}; {self.path.name} itself is good")
            return Update(before, after)

    def read_back(self, text: str) -> Content:
        """What `read` will make of it, before it takes the place of what can be read. Raises: Problem internal."""
        try:
            return self.form.load(tomli.loads(text))
        except UNREADABLE as error:
            words = f"The change would make {self.path} unreadable ({str(error)[:LONGEST_REASON]}). Nothing was changed"
            words += "; this is a defect: report what was asked"
            raise Problem(Kind.INTERNAL, "INTERNAL_ERROR", words) from error

    def restore(self) -> None:
        """Repair a file that cannot be used, as the next change would do it. Raises: Problem as `read`."""
        with self.locked():
            self.repair()

    def commit(self, path: Path, text: str) -> None:
        try:
            replace_file(path, text, durable=True)
        except Unconfirmed as error:
            raise Problem(Kind.EXHAUSTED, "STATE_WRITE_FAILED", f"{path}: {error.strerror}") from error
        except OSError as error:
            raise Problem(
                Kind.EXHAUSTED,
                "STATE_WRITE_FAILED",
                f"Cannot write {path}: {error.strerror or error}. Nothing was changed; free disk space "
                "or make the folder writable, then try again",
            ) from error

    def repair(self) -> None:
        """Set an unreadable file aside and replace it by the last good copy. Only under the lock.

        Raises: Problem as `read`; then no file was changed.
        """
        try:
            self.parsed(self.path)
            return
        except FileNotFoundError:
            if not self.good.exists():
                return
            content, reason = self.read(), "is missing"
        except UNREADABLE as error:
            content = self.read()
            reason = f"was unreadable ({error}) and is kept as {self.set_aside(self.path)}"
        except OSError as error:
            raise unreachable(self.path, error) from error
        self.commit(self.path, tomli_w.dumps(self.form.dump(content)))
        self.on_repair(f"File {self.path} {reason}; the last good copy, generation {content.generation}, is used")

    def parsed(self, path: Path) -> Content:
        """The content of a file. The same bytes as the last time are the same content, which never changes: for 100
        instances they are compared in 0.05 ms, and parsed in 10."""
        text, last = path.read_bytes(), self.parsed_last
        if last is None or last[0] != text:
            last = self.parsed_last = text, self.form.load(tomli.loads(text.decode()))
        return last[1]

    def set_aside(self, path: Path) -> str:
        """Rename a file that cannot be read, for a person to examine; returns its new name."""
        aside = path.with_name(f"{path.name}.bad-{self.now().replace(':', '')}")
        os.replace(path, aside)
        return aside.name

    def locked(self) -> AbstractContextManager[None]:
        words = f"Cannot lock {self.path.name} within {LOCK_TIMEOUT_SECS} s: another change hangs; see {self.lock}"
        taken = Problem(Kind.UNAVAILABLE, "BACKEND_UNAVAILABLE", words)

        def refused(error: OSError) -> Problem:
            words = f"Cannot lock {self.path}: {error}. Nothing was changed"
            return Problem(Kind.EXHAUSTED, "STATE_WRITE_FAILED", words)

        return locked(self.lock, LOCK_TIMEOUT_SECS, taken, refused)


def unreachable(path: Path, error: OSError) -> Problem:
    return Problem(
        Kind.UNAVAILABLE,
        "BACKEND_UNAVAILABLE",
        f"Cannot read {path}: {error.strerror or error}. Nothing was changed; make it readable",
    )


def unusable(path: Path, errors: dict[Path, Exception]) -> Problem:
    reasons = "; ".join(f"{each.name}: {str(error)[:LONGEST_REASON]}" for each, error in errors.items())
    return Problem(
        Kind.UNAVAILABLE,
        "STATE_UNREADABLE",
        f"Cannot use {path}, nor the last good copy {path.name}.good ({reasons}): {HINTS[Event.STATE_UNREADABLE]}",
    )


class StateFile(DurableFile[State]):
    def __init__(self, path: str | Path, now: Callable[[], str], on_repair: Callable[[str], None]) -> None:
        super().__init__(path, now, on_repair, FileForm(partial(state_toml.load, known={}), state_toml.dump, State()))

    def take_over(self, content: State, source: Path) -> Path:
        """Make ``content``, which was made of the file ``source``, the state; returns where that file is kept.

        A state file of another program is renamed only after a copy of it is on the disk. Raises: Problem; then the
        file is as it was.
        """
        kept = source
        with self.locked():
            if source == self.path:
                kept = source.with_name(f"{source.name}.{self.now().replace(':', '')}")
                self.commit(kept, source.read_text(encoding="utf-8"))
            text = tomli_w.dumps(self.form.dump(content))
            self.commit(self.path, text)
            self.commit(self.good, text)
        return kept


def foreign_table(path: Path) -> dict[str, Any] | None:
    """The parsed state file of tei-manager; None when there is none, or it is none of that program.

    Raises: Problem for one that bears that program's name and cannot be read: to begin with nothing would lose it.
    """
    try:
        with path.open("rb") as file:
            table = tomli.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        if path.name == moving_in.DEFAULT_STATE:
            raise unusable(path, {path: error}) from error
        return None
    return table if moving_in.is_foreign(table) else None


class ModelsFile(DurableFile[Models]):
    def __init__(self, path: str | Path, now: Callable[[], str], on_repair: Callable[[str], None]) -> None:
        super().__init__(path, now, on_repair, FileForm(models.load, models.dump, Models()))
