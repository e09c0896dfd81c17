"""Whether a folder can be written to, proved by writing."""

from __future__ import annotations

import os
from pathlib import Path

PROBE_BYTES = 4096  # a block: an empty file fits onto a full disk


def refusal(folder: Path) -> OSError | None:
    """Why nothing can be written to the folder now; None when it can be."""
    path = folder / f".probe-{os.getpid()}"
    try:
        path.write_bytes(bytes(PROBE_BYTES))
    except OSError as error:
        return error
    finally:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            pass  # then the write was refused for the same reason
    return None
