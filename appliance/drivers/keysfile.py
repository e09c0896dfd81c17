"""API keys in files: `[[keys]]` of the configuration, and `keys.toml` of `appliance keys`. Read again when they change.

Once authentication is on it stays on: an edit that empties or breaks a file locks callers out and never lets one in.
Marker files in the data folder say that a file had keys, so that processes that start later know it, too. A mistake in
a file that never had keys does not turn authentication on. A read that fails is repeated; until one succeeds:

    failure                                the keys that count from this file     authentication
    keys.toml cannot be opened or read     those of the last read that succeeded  is on
    keys.toml is no list of keys           none: one may have been revoked        is on
    the configuration, either failure      those of the last read that succeeded  is on if it ever had a key
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import tomli
import tomli_w

from appliance.core import access
from appliance.core.access import Key
from appliance.core.problems import Kind, Problem
from appliance.files.replacement import Unconfirmed, replace_file
from appliance.files.signature import Signature, signature

log = logging.getLogger(__name__)
LOOK_SECS = 0.02  # at most one look in this time: every call asks, and a look releases the interpreter three times
AGAIN_SECS = 0.25  # after a failure, until a file that has not changed since is read again
UNREADABLE = (OSError, ValueError, RecursionError, Problem)
REQUIRED, CONFIGURED = "keys.required", "keys.configured"  # markers beside the file

HEADER = """\
# Written by `appliance keys`. An empty list keeps everybody out. For no key to be asked for,
# delete this file, keys.required beside it and [[keys]] of the configuration, and restart.
"""


class Requirement(NamedTuple):
    """Whether authentication is on, and the keys that count."""

    required: bool
    keys: tuple[Key, ...]


@dataclass
class KeyFile:
    """One file and what was last read of it. optional: the file may be missing."""

    path: Path
    optional: bool
    keys: tuple[Key, ...] = ()
    mark: Signature | None = None  # at the last read that succeeded
    looked: bool = False  # it was read once, or was missing and may be
    error: str = ""  # why the last read failed
    damaged: bool = False  # it could be read, and is no list of keys
    failed: Signature | None = None  # at the last read that failed
    again_at: float = field(default=0.0, repr=False)

    def follow(self) -> None:
        """Read the file if it has changed. A failure leaves ``keys`` and ``mark`` as they were, and is repeated."""
        try:
            mark = signature(self.path)
            same = mark == (self.failed if self.error else self.mark)
            if same and (time.monotonic() < self.again_at if self.error else self.looked):
                return
            self.failed = mark
            self.keys = () if mark is None and self.optional else read(self.path)
            self.mark, self.looked, self.error, self.damaged = mark, True, "", False
        except UNREADABLE as error:
            self.damaged = not isinstance(error, OSError) or isinstance(error, IsADirectoryError)
            self.again_at = time.monotonic() + AGAIN_SECS
            message = unreadable(self.path, error)
            if message != self.error:
                log.error("%s", message)
            self.error = message


class Keyring:
    """The keys that count now. own: the file of `appliance keys`; config: the configuration file, if any."""

    def __init__(self, own: Path, config: Path | None) -> None:
        self.own, self.config = KeyFile(own, optional=True), KeyFile(config, optional=False) if config else None
        self.sticky = False
        self.required = own.with_name(REQUIRED)  # keys.toml existed
        self.configured = own.with_name(CONFIGURED)  # the configuration had keys since the appliance was started
        self.sealed: set[Path] = set()
        self.process = os.getpid()
        self.looking = threading.Lock()
        self.looked_at = time.monotonic()
        self.requirement = self.look()

    def current(self) -> Requirement:
        """Not older than LOOK_SECS, also where another thread is looking and gets no time to end: its look may have
        begun before the change that this caller was told of."""
        asked_at = time.monotonic()
        if asked_at - self.looked_at >= LOOK_SECS:
            with self.looking:
                now = time.monotonic()
                if asked_at - self.looked_at >= LOOK_SECS:
                    self.requirement, self.looked_at = self.look(), now
        return self.requirement

    @property
    def error(self) -> str:
        """Which file could not be read at the last look, and why; empty when both could."""
        return "; ".join(file.error for file in (self.own, self.config) if file and file.error)

    def unseal_configuration(self) -> None:
        """Called when the appliance starts: a configuration without keys then requires none any more."""
        if self.config is None or not (self.config.keys or self.config.error):
            self.configured.unlink(missing_ok=True)

    def look(self) -> Requirement:
        if self.process != os.getpid():  # forked: a key that the parent read long ago may have been revoked
            self.process = os.getpid()
            self.own = KeyFile(self.own.path, optional=True)
            self.config = KeyFile(self.config.path, optional=False) if self.config else None
        own, config = self.own, self.config
        own.follow()
        if own.damaged:
            own.keys = ()
        if config:
            config.follow()
        keys = (*(config.keys if config else ()), *own.keys)
        if own.mark or own.failed:
            self.require_keys(self.required)
        if config and config.keys:
            self.require_keys(self.configured)
        if not self.sticky:
            self.sticky = os.path.exists(self.required) or os.path.exists(self.configured)
        never_read = bool(own.error) and not own.looked
        return Requirement(self.sticky or never_read, keys)

    def require_keys(self, seal: Path) -> None:
        """Keys are required from now on. seal: the marker file that says so to processes that cannot read the keys."""
        self.sticky = True
        if seal not in self.sealed:
            self.sealed.add(seal)
            try:
                seal.touch(0o600)
            except OSError as error:
                log.error("Programs that start later, and can read no key, may ask for none: %s: %s", seal, error)


def are_required(own: Path) -> bool:
    """Whether who has no key is kept out, as the file of `appliance keys` or a marker beside it says."""
    return any(own.with_name(name).exists() for name in (own.name, REQUIRED, CONFIGURED))


def is_lost(own: Path) -> bool:
    """Whether the file of `appliance keys` was there and is not, so that it keeps everybody out."""
    return not own.exists() and own.with_name(REQUIRED).exists()


def unreadable(path: Path, error: BaseException) -> str:
    return f"Cannot read the keys in {path}: {getattr(error, 'strerror', None) or error}"


def read_error(path: Path) -> str:
    """Why the keys of a file cannot be read; empty when they can be, or when it is missing."""
    try:
        read(path)
    except FileNotFoundError:
        return ""
    except UNREADABLE as error:
        return unreadable(path, error)
    return ""


def read(path: Path) -> tuple[Key, ...]:
    """Raises: OSError, ValueError, Problem."""
    return access.keys(tomli.loads(path.read_text(encoding="utf-8-sig")).get("keys", []))


def write(path: Path, keys: tuple[Key, ...]) -> None:
    """Replace the file as a whole, and return when every process counts the new keys, and no other ones any more.
    Only this user may read it. Raises: Problem."""
    try:
        replace_file(path, HEADER + tomli_w.dumps(access.mapping(keys)), durable=True, mode=0o600)
    except Unconfirmed as error:
        raise Problem(Kind.EXHAUSTED, "STATE_WRITE_FAILED", f"{path}: {error.strerror}") from error
    except OSError as error:
        raise Problem(Kind.EXHAUSTED, "STATE_WRITE_FAILED", f"Cannot write {path}: {error}. Nothing changed") from error
    time.sleep(LOOK_SECS)  # no process answers from an older look then
