"""API keys in files: `[[keys]]` of the configuration, and `keys.toml` of `appliance keys`. Read again when they change.

Authentication that is on stays on: an edit that empties or breaks a file shuts out, and never lets in. That a file had
keys is written down in the data folder, so that all processes know, also those that start later; what never had keys
turns authentication on by no mistake. A look that failed is no look: it is repeated, and until one succeeds

    keys.toml cannot be opened or read     the keys that were last read of it count    authentication is on
    keys.toml is no list of keys           none of it counts: one may be revoked       authentication is on
    the configuration, for either reason   the keys that were last read of it count    it is on if there ever were some
"""

from __future__ import annotations

import logging
import os
import threading
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

from appliance.core import access
from appliance.core.access import Key
from appliance.core.problems import Kind, Problem
from appliance.files.replacement import replace_file
from appliance.files.signature import Signature, signature

log = logging.getLogger(__name__)
LOOK_SECS = 0.02  # every call asks, and each look lets three other threads have the interpreter
AGAIN_SECS = 0.25  # until what could not be read, and is still the same, is tried again
UNREADABLE = (OSError, ValueError, RecursionError, Problem)

HEADER = """\
# Written by `appliance keys`. An empty list keeps everybody out. For no key to be asked for,
# delete this file, keys.required beside it and [[keys]] of the configuration, and restart.
"""


@dataclass
class File:
    """What was read of one file. optional: that it is not there is nothing wrong."""

    path: Path
    optional: bool
    keys: tuple[Key, ...] = ()
    mark: Signature | None = None  # of what was read
    looked: bool = False  # it was read, or known not to be there
    trouble: str = ""  # why the last look failed
    damaged: bool = False  # it was read, and is no list of keys
    failed: Signature | None = None  # at that look
    again_at: float = field(default=0.0, repr=False)

    def follow(self) -> None:
        """Look again. What fails leaves keys and mark as they were, and is tried again."""
        try:
            mark = signature(self.path)
            same = mark == (self.failed if self.trouble else self.mark)
            if same and (time.monotonic() < self.again_at if self.trouble else self.looked):
                return
            self.failed = mark
            self.keys = () if mark is None and self.optional else read(self.path)
            self.mark, self.looked, self.trouble, self.damaged = mark, True, "", False
        except UNREADABLE as error:
            self.damaged = not isinstance(error, OSError) or isinstance(error, IsADirectoryError)
            self.again_at = time.monotonic() + AGAIN_SECS
            trouble = refused(self.path, error)
            if trouble != self.trouble:
                log.error("%s", trouble)
            self.trouble = trouble


class Keys:
    """The keys that count now. own: the file of `appliance keys`; config: the configuration file, if there is one."""

    def __init__(self, own: Path, config: Path | None) -> None:
        self.own, self.config = File(own, optional=True), File(config, optional=False) if config else None
        self.sticky = False
        self.required = own.with_name("keys.required")  # keys.toml was there
        self.configured = own.with_name("keys.configured")  # the configuration had keys since the appliance was started
        self.sealed: set[Path] = set()
        self.process = os.getpid()
        self.looking = threading.Lock()
        self.looked_at = time.monotonic()
        self.found = self.look()

    def current(self) -> tuple[bool, tuple[Key, ...]]:
        """(whether authentication is on, the keys), not older than LOOK_SECS."""
        now = time.monotonic()
        if now - self.looked_at >= LOOK_SECS and self.looking.acquire(blocking=False):
            try:
                self.found, self.looked_at = self.look(), now
            finally:
                self.looking.release()
        return self.found

    @property
    def trouble(self) -> str:
        """Which file could not be read at the last look, and why; empty when both could."""
        return "; ".join(file.trouble for file in (self.own, self.config) if file and file.trouble)

    def begin(self) -> None:
        """At the start of the appliance: a configuration that has no keys any more asks for none."""
        if self.config is None or not (self.config.keys or self.config.trouble):
            self.configured.unlink(missing_ok=True)

    def look(self) -> tuple[bool, tuple[Key, ...]]:
        if self.process != os.getpid():  # forked: of what the parent has read long ago a key may be revoked
            self.process = os.getpid()
            self.own = File(self.own.path, optional=True)
            self.config = File(self.config.path, optional=False) if self.config else None
        own, config = self.own, self.config
        own.follow()
        if own.damaged:
            own.keys = ()
        if config:
            config.follow()
        known = (*(config.keys if config else ()), *own.keys)
        if own.mark or own.failed:
            self.ask_for_keys(self.required)
        if config and config.keys:
            self.ask_for_keys(self.configured)
        if not self.sticky:
            self.sticky = os.path.exists(self.required) or os.path.exists(self.configured)
        unknown = bool(own.trouble) and not own.looked
        return self.sticky or unknown, known

    def ask_for_keys(self, seal: Path) -> None:
        """From now on, and for the processes that cannot find it out themselves, too."""
        self.sticky = True
        if seal not in self.sealed:
            self.sealed.add(seal)
            try:
                seal.touch(0o600)
            except OSError as error:
                log.error("Programs that start later, and can read no key, may ask for none: %s: %s", seal, error)


def refused(path: Path, error: BaseException) -> str:
    return f"Cannot read the keys in {path}: {getattr(error, 'strerror', None) or error}"


def trouble(path: Path) -> str:
    """Why the keys of a file cannot be read; empty when they can, or when it is not there."""
    try:
        read(path)
    except FileNotFoundError:
        return ""
    except UNREADABLE as error:
        return refused(path, error)
    return ""


def read(path: Path) -> tuple[Key, ...]:
    """Raises: OSError, ValueError, Problem."""
    return access.keys(tomllib.loads(path.read_text(encoding="utf-8")).get("keys", []))


def write(path: Path, found: tuple[Key, ...]) -> None:
    """Replace the file as a whole, readable for this user alone. Raises: Problem."""
    try:
        replace_file(path, HEADER + tomli_w.dumps(access.mapping(found)), durable=True, mode=0o600)
    except OSError as error:
        raise Problem(Kind.EXHAUSTED, "STATE_WRITE_FAILED", f"Cannot write {path}: {error}. Nothing changed") from error
