"""Whose files are made: those of the owner of a folder, also where root makes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.core.problems import invalid


@contextmanager
def owner_of(folder: Path) -> Iterator[None]:
    """Act as the owner of the folder while in the block, where this is root and the folder is somebody else's.

    So the owner's programs can use what was made, and no link that the owner laid leads root elsewhere. For programs
    of one thread: the whole process changes. Raises: Problem when root may not.
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
