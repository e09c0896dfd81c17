"""What an error of SQLite or of the system means to whoever keeps entries in files, and its words."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

from appliance.core.cachestore import Failure

# A quota, or a limit of the size of a file: what is there already is whole.
UNWRITTEN = (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_TRUNCATE)


def of_sqlite(error: sqlite3.Error, path: Path) -> tuple[Failure, str]:
    """What an error of SQLite means, in its own codes and words."""
    code = getattr(error, "sqlite_errorcode", 0)
    if code in UNWRITTEN:
        return Failure.FULL, f"{path}: {error}"
    kinds = {
        sqlite3.SQLITE_FULL: Failure.FULL,
        sqlite3.SQLITE_READONLY: Failure.READ_ONLY,
        sqlite3.SQLITE_PERM: Failure.READ_ONLY,
        sqlite3.SQLITE_BUSY: Failure.SLOW,
        sqlite3.SQLITE_LOCKED: Failure.SLOW,
        sqlite3.SQLITE_CANTOPEN: Failure.AWAY,
        sqlite3.SQLITE_NOMEM: Failure.AWAY,
        sqlite3.SQLITE_INTERRUPT: Failure.AWAY,
    }
    return kinds.get(code & 0xFF, Failure.DAMAGED), f"{path}: {error}"


def of_system(error: OSError) -> tuple[Failure, str]:
    kinds = {
        errno.ENOSPC: Failure.FULL,
        errno.EDQUOT: Failure.FULL,
        errno.EROFS: Failure.READ_ONLY,
        errno.EACCES: Failure.READ_ONLY,
        errno.EPERM: Failure.READ_ONLY,
    }
    return kinds.get(error.errno or 0, Failure.AWAY), str(error)
