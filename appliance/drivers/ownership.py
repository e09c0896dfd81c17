"""Files that root makes in another user's folder belong to the owner of the folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.core.problems import invalid


@contextmanager
def owner_of(folder: Path) -> Iterator[None]:
    """In the block root acts as the owner of the folder; any other user acts unchanged.

    So the owner's programs can use the new files, and no link in the folder makes root write elsewhere. The whole
    process changes its user: only for programs with one thread. Raises: Problem when root may not do that.
    """
    try:
        owner = folder.stat()
    except FileNotFoundError:
        yield
        return
    if os.geteuid() != 0 or owner.st_uid == 0:
        yield
        return
    group = os.getegid()
    try:
        os.setegid(owner.st_gid)
        os.seteuid(owner.st_uid)
    except OSError as error:
        os.setegid(group)
        raise invalid(f"Cannot act as the owner of {folder} (uid {owner.st_uid}): {error.strerror}") from error
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
