"""API keys in files: `[[keys]]` of the configuration, and `keys.toml` of `appliance keys`. Read again when they change.

Authentication that is on stays on: an edit that empties or breaks a file shuts out, and never lets in. That there
was a file of `appliance keys` is written down beside it, so that also a process that starts later knows.
"""

from __future__ import annotations

import logging
import os
import time
import tomllib
from pathlib import Path

import tomli_w

from appliance.core import access
from appliance.core.access import Key
from appliance.core.problems import Kind, Problem

log = logging.getLogger(__name__)
LOOK_SECS = 0.02  # every call asks, and each look lets three other threads have the interpreter


class Keys:
    """The keys that count now. own: the file of `appliance keys`; config: the configuration file, if there is one."""

    def __init__(self, own: Path, config: Path | None) -> None:
        self.own = own
        self.files = [path for path in (config, own) if path]
        self.seen: dict[Path, tuple[int, int, int] | None] = {}
        self.kept: dict[Path, tuple[Key, ...]] = {}
        self.sticky = False
        self.seal = own.with_name("keys.required")
        self.looked_at = time.monotonic()
        self.found = self.look()

    def current(self) -> tuple[bool, tuple[Key, ...]]:
        """(whether authentication is on, the keys), not older than LOOK_SECS."""
        now = time.monotonic()
        if now - self.looked_at >= LOOK_SECS:
            self.found, self.looked_at = self.look(), now
        return self.found

    def look(self) -> tuple[bool, tuple[Key, ...]]:
        for path in self.files:
            mark = marked(path)
            if path not in self.seen or self.seen[path] != mark:
                self.seen[path] = mark
                self.reread(path)
        known = tuple(key for path in self.files for key in self.kept.get(path, ()))
        there = self.seen[self.own] is not None
        if not self.sticky and (known or there or self.seal.exists()):
            self.sticky = True
            if there:
                self.remember()
        return self.sticky, known

    def remember(self) -> None:
        try:
            self.seal.touch(0o600)
        except OSError as error:
            log.error("Should %s be deleted, programs that start later will ask for no key: %s", self.own, error)

    def reread(self, path: Path) -> None:
        try:
            self.kept[path] = read(path)
        except FileNotFoundError:
            self.kept[path] = ()
        except (OSError, ValueError, RecursionError, Problem) as error:
            log.error("No key of %s counts until it can be read: %s", path, error)
            self.kept[path] = ()
            self.sticky = True


def marked(path: Path) -> tuple[int, int, int] | None:
    try:
        seen = path.stat()
    except FileNotFoundError:
        return None
    except OSError:
        return (0, 0, 0)  # it is there, and cannot be looked at: then it counts as changed and broken
    return seen.st_mtime_ns, seen.st_size, seen.st_ino


def read(path: Path) -> tuple[Key, ...]:
    """Raises: OSError, ValueError, Problem."""
    return access.keys(tomllib.loads(path.read_text(encoding="utf-8")).get("keys", []))


def write(path: Path, found: tuple[Key, ...]) -> None:
    """Replace the file as a whole, readable for this user alone. Raises: Problem."""
    fresh = path.with_name(path.name + ".new")
    try:
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(
                "# Written by `appliance keys`. An empty list keeps everybody out. For no key to be asked for,\n"
            )
            file.write("# delete this file, keys.required beside it and [[keys]] of the configuration, and restart.\n")
            file.write(tomli_w.dumps(access.mapping(found)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        raise Problem(Kind.EXHAUSTED, "STATE_WRITE_FAILED", f"Cannot write {path}: {error}. Nothing changed") from error
