"""The texts of a folder: what is too large, binary, generated or a link is left out."""

import os
import re
import stat
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

LARGEST = 1_000_000  # bytes
FOLDERS = (
    *(".git", ".hg", ".svn", "node_modules", "bower_components", "__pycache__", ".venv*", "venv", ".tox", ".nox"),
    *(".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".idea", ".gradle", ".terraform", "*.egg-info"),
    *("build", "dist", "target", "site-packages", ".next", ".cache"),
)
FILES = ("*.lock", "package-lock.json", "pnpm-lock.yaml", "go.sum", "*.min.js", "*.min.css", "*.map", "*.svg")


class Text(NamedTuple):
    """path: below the folder, with slashes."""

    path: str
    text: str


class LeftOut(NamedTuple):
    path: str
    reason: str


def read(folder: Path) -> Iterator[Text | LeftOut]:
    """The files of a folder in the order of their paths."""
    for place, names, files in os.walk(folder, followlinks=False):
        names[:] = sorted(name for name in names if not _matches(name, FOLDERS))
        for name in sorted(files):
            whole = Path(place, name)
            path = whole.relative_to(folder).as_posix()
            # Names that are no UTF-8 could be neither shown nor kept in the index.
            if not path.isprintable():
                yield LeftOut(ascii(path), "its name cannot be shown")
            elif _matches(name, FILES):
                yield LeftOut(path, "generated")
            else:
                yield _read(whole, path)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _read(whole: Path, path: str) -> Text | LeftOut:
    """Looks at the open file and not at its name, which may meanwhile name another."""
    try:
        # A link may lead out of the folder, and a pipe would be waited for.
        handle = os.open(whole, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return LeftOut(path, "a link" if whole.is_symlink() else "cannot be read")
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return LeftOut(path, "no regular file")
        raw = file.read(LARGEST + 1)
    if len(raw) > LARGEST:
        return LeftOut(path, f"larger than {LARGEST:,} bytes")
    text = raw.decode(errors="replace")
    # Latin-1 has an unreadable character here and there, a picture nothing else.
    if b"\0" in raw or text.count("\ufffd") > len(text) / 10:
        return LeftOut(path, "binary")
    return Text(path, re.sub(r"\r\n?", "\n", text))
