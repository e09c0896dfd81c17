"""A random secret in a file of its owner alone, made by whoever needs it first."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

BYTES = 32
OWNER_ALONE = 0o600


def secret_in(path: str) -> bytes:
    """Of several who make it at once all get the same. Raises: OSError."""
    try:
        found = Path(path).read_bytes()
        if len(found) == BYTES:
            return found
        os.unlink(path)  # it was cut
    except FileNotFoundError:
        pass
    fresh = f"{path}.{secrets.token_hex(8)}.new"
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWNER_ALONE)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(BYTES))
        os.link(fresh, path)  # which fails where another one was quicker
    except FileExistsError:
        pass
    finally:
        os.unlink(fresh)
    return Path(path).read_bytes()
