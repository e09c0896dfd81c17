"""A model in one file, for machines without a hub: a tar archive of a manifest and the files that it lists.

An archive is not trusted: names that lead out of the folder, files that the manifest does not list, and other digests
are refused before any file is installed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Self

from appliance.core.models import SPARE_BYTES
from appliance.core.problems import Kind, Problem, invalid, quoted
from appliance.files.replacement import replacement

MANIFEST = "manifest.json"
LONGEST_MANIFEST = 16 * 1024 * 1024
# What may stand before a member, say of a long name or of more than 8 GiB.
EXTENSIONS = b"xgXLK"
LONGEST_EXTENSION = 64 * 1024  # bytes
CHUNK = 1024 * 1024
END = bytes(2 * tarfile.BLOCKSIZE)
FORMAT = "tei-appliance-model-1"

Watch = Callable[[int, int], None]  # (bytes done, bytes in total)


def member_header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf()


def padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)


def manifest(about: dict[str, Any]) -> bytes:
    text = json.dumps({"format": FORMAT, **about}, indent=1).encode()
    return member_header(MANIFEST, len(text)) + text + padding(len(text))


def length(about: dict[str, Any]) -> int:
    """The length of the whole archive, in bytes."""
    files = ((f"files/{file['name']}", file["size"]) for file in about["files"])
    return (
        len(manifest(about))
        + sum(len(member_header(*file)) + file[1] + len(padding(file[1])) for file in files)
        + len(END)
    )


def chunks(about: dict[str, Any], folder: Path) -> Iterator[bytes]:
    """An archive, in pieces. about: a manifest whose ``files`` have name, size and sha256.

    Raises: Problem MODEL_CHANGED at the end of a file that differs from the manifest; OSError.
    """
    yield manifest(about)
    for file in about["files"]:
        yield member_header(f"files/{file['name']}", file["size"])
        checksum, left = hashlib.sha256(), file["size"]
        with (folder / file["name"]).open("rb") as opened:
            while chunk := opened.read(min(CHUNK, left)):
                checksum.update(chunk)
                left -= len(chunk)
                yield chunk
            if left or opened.read(1) or checksum.hexdigest() != file["sha256"]:
                raise invalid(
                    f"{quoted(file['name'])} is not what its manifest says: verify the model", "MODEL_CHANGED"
                )
        yield padding(file["size"])
    yield END


def write(target: Path, parts: Iterable[bytes], total: int, watch: Watch) -> None:
    """Write the pieces of an archive to a file. Raises: what ``parts`` raises, or Problem; then there is no file."""
    done = 0
    try:
        with replacement(target, durable=False) as file:
            for part in parts:
                file.write(part)
                done += len(part)
                watch(done, total)
    except OSError as error:
        raise invalid(f"Cannot write {target}: {error}", "EXPORT_FAILED") from error


def contents(source: Path) -> dict[str, Any]:
    """The manifest of an archive. Raises: Problem."""
    try:
        with tarfile.open(source, "r|", tarinfo=BoundedTarInfo) as archive:
            return manifest_in(archive, str(source))
    except (tarfile.TarError, EOFError, RecursionError, ValueError) as error:
        raise damaged(str(source), str(error)) from error


class BoundedTarInfo(tarfile.TarInfo):
    """A member of an archive that is not trusted. tarfile reads whatever stands before a member as a whole (3.11)."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Raises: tarfile.TarError for what archives of ours do not have."""
        info = super().frombuf(buf, encoding, errors)
        if info.type == tarfile.GNUTYPE_SPARSE or (info.type in EXTENSIONS and info.size > LONGEST_EXTENSION):
            raise tarfile.ReadError(f"it has a member of the type {info.type!r} with {info.size} bytes")
        return info

    def _proc_gnusparse_10(self, *_: object) -> None:
        """Where a member's extension says that a map of its holes comes first: tarfile would read that, of whatever
        length. It has no public name for this (3.11 to 3.14)."""
        raise tarfile.ReadError("it has a sparse file")


def is_plain(member: tarfile.TarInfo) -> bool:
    """A file all of whose bytes are in the archive: of a sparse one, a few make any number on the disk."""
    return member.isreg() and not member.issparse()


class ChecksumReader:
    """Reads a file and computes its digest at the same time."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.checksum = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        content: bytes = self.file.read(size)
        self.checksum.update(content)
        return content


def read(opened: IO[bytes], source: str, folder: Path, watch: Watch) -> dict[str, Any]:
    """Unpack an archive into an empty folder and verify every file; returns its manifest.

    source: the archive's name in messages. Raises: Problem that names the file at fault.
    """
    try:
        with tarfile.open(fileobj=opened, mode="r|", bufsize=CHUNK, tarinfo=BoundedTarInfo) as archive:
            about = manifest_in(archive, source)
            missing = {f"files/{file['name']}": file for file in about["files"]}
            total, done = sum(file["size"] for file in about["files"]), 0
            refuse_without_room(folder, total, source)
            while (member := archive.next()) is not None:  # a for loop would begin with the manifest again
                file = missing.pop(member.name, None)
                if file is None or not is_plain(member) or member.size != file["size"]:
                    raise damaged(source, f"{quoted(member.name)} is not as its manifest lists it")
                unpack(archive, member, folder / file["name"], file["sha256"], source)
                done += member.size
                watch(done, total)
    except (tarfile.TarError, EOFError, RecursionError, ValueError) as error:
        raise damaged(source, str(error)) from error
    except OSError as error:
        raise not_stored(source, error) from error
    if missing:
        raise damaged(source, f"{quoted(next(iter(missing)))} is missing")
    return about


def refuse_without_room(folder: Path, needed: int, source: str) -> None:
    """Raises: Problem when that many bytes do not fit on the disk, on which the state may be as well."""
    free = shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        words = f"{source} is refused: it needs {needed} bytes and {folder} has {free} free: make room"
        raise Problem(Kind.EXHAUSTED, "IMPORT_FAILED", f"{words}. Nothing was imported")


def manifest_in(archive: tarfile.TarFile, source: str) -> dict[str, Any]:
    first = archive.next()
    if first is None or first.name != MANIFEST or not is_plain(first) or first.size > LONGEST_MANIFEST:
        raise damaged(source, "it does not begin with a manifest: is it an archive of `appliance models export`?")
    opened = archive.extractfile(first)
    try:
        about = json.loads(opened.read() if opened else b"")
        files = [(file["name"], file["size"], file["sha256"]) for file in about["files"]]
        if not all((type(name), type(size), type(sum_)) == (str, int, str) for name, size, sum_ in files):
            raise ValueError("a file needs a name, a size and a sha256")
        is_ours = about["format"] == FORMAT
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(source, f"its manifest cannot be read ({error})") from error
    if not is_ours:
        raise damaged(source, f"its format is {quoted(about['format'])}, not {FORMAT}")
    for name, size, _ in files:
        parts = name.split("/")
        if size < 0 or "\\" in name or not name.isprintable() or any(part in ("", ".", "..") for part in parts):
            raise damaged(source, f"{quoted(name)} is no name of a file inside it")
    return dict(about)


def unpack(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path, sha256: str, source: str) -> None:
    opened = archive.extractfile(member)
    assert opened is not None  # a regular file has content
    target.parent.mkdir(parents=True, exist_ok=True)
    reader = ChecksumReader(opened)
    with target.open("xb") as written:
        shutil.copyfileobj(reader, written, CHUNK)
        written.flush()
        os.fsync(written.fileno())
    if reader.checksum.hexdigest() != sha256:
        raise damaged(source, f"{quoted(target.name)} has another digest than its manifest lists")


def not_stored(source: str, error: OSError) -> Problem:
    """Of an archive that the disk does not take, or that cannot be read."""
    kind = Kind.EXHAUSTED if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) else Kind.INVALID
    return Problem(kind, "IMPORT_FAILED", f"Cannot import {source}: {error}")


def damaged(source: str, why: str) -> Problem:
    return invalid(f"{source} is refused: {why}. Nothing was imported", "IMPORT_FAILED")
