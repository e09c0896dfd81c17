"""Whether a folder can be written to, proved by writing."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

PROBE_BYTES = 4096  # a block: an empty file fits onto a full disk


def refusal(folder: Path) -> OSError | None:
    """Why nothing can be written to the folder now; None when it can be."""
    path = folder / f".probe-{secrets.token_hex(8)}"
    try:
        # root may look at the folder of somebody else: it writes into no file that is there, nor through a link.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        return error
    finally:
        with contextlib.suppress(OSError):  # then the write was refused for the same reason
            path.unlink()
    return None
