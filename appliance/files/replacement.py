"""A file is replaced as a whole: a reader gets the old content or the new one, never a part."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

READABLE_BY_ALL = 0o666  # as far as the umask allows


class Unconfirmed(OSError):
    """The new content stands, but the disk did not confirm it: a power cut may bring back the old one."""


def replace_file(path: Path, content: str | bytes, *, durable: bool, mode: int = READABLE_BY_ALL) -> None:
    """Replace a file that one process at a time writes. Text is written as UTF-8. Otherwise as `replacement`."""
    with replacement(path, durable=durable, mode=mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacement(
    path: Path, *, durable: bool, mode: int = READABLE_BY_ALL, several_writers: bool = False
) -> Iterator[IO[bytes]]:
    """A file beside ``path``, which takes its place at the end of the block; after an exception it is deleted instead.

    durable: the file and its folder are synced, so that a power cut, too, leaves the old content or the new one, and a
    return means the new one. Without it a power cut may leave an empty file: for what can be measured or made anew.
    mode: of a new file, as `os.open` takes it. several_writers: processes may replace it at the same moment; each then
    writes under a name of its own, which a killed one leaves behind. Raises: OSError; then the old content stands,
    unless it is `Unconfirmed`.
    """
    writer = f".{os.getpid()}-{threading.get_native_id()}" if several_writers else ""
    fresh = path.with_name(f"{path.name}{writer}.new")
    # Opened first: once the file is replaced, nothing but the disk itself may fail.
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC) if durable else None
    try:
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(fresh, path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        if folder is not None:
            confirm(folder)
    finally:
        if folder is not None:
            os.close(folder)


def sync(path: Path) -> None:
    """Make what a file has durable, or the names in a folder. Raises: OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_names(paths: Iterable[Path], root: Path) -> None:
    """Make the names of files and links durable, and of the folders between ``root`` and them. Raises: OSError."""
    for folder in {each for path in paths for each in path.parents if each.is_relative_to(root)}:
        sync(folder)


def confirm(folder: int) -> None:
    """Make the names in a folder durable. Raises: Unconfirmed."""
    try:
        os.fsync(folder)
    except OSError as error:
        words = f"it was changed, but the disk did not confirm that ({error.strerror}): a power cut may undo it"
        raise Unconfirmed(error.errno, words) from error
