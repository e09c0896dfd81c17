"""Archives of models that nobody vouches for: what stands before a member takes no memory."""

import hashlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from appliance.core.problems import Problem
from appliance.drivers import archive

FILES = {"config.json": b"{}", f"{'deep/' * 40}weights.bin": bytes(3000)}
MIB = 2**20


def about() -> dict[str, Any]:
    files = [
        {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in FILES.items()
    ]
    return {"format": archive.FORMAT, "model_id": "org/m", "files": files}


class Endless(io.RawIOBase):
    """An archive of these parts, and then of zeros without end. given: bytes that were read of it."""

    def __init__(self, *parts: bytes) -> None:
        self.left, self.given = b"".join(parts), 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        assert self.given < 64 * MIB, "it reads whatever comes"
        part, self.left = self.left[:size], self.left[size:]
        part += bytes(size - len(part))
        self.given += len(part)
        return part


def header(kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo("next")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def read(opened: Any, folder: Path) -> dict[str, Any]:
    return archive.read(cast(Any, opened), "it", folder, lambda done, total: None)


def test_what_was_written_is_read_also_with_long_names(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for name, content in FILES.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    target.mkdir()
    assert read(io.BytesIO(b"".join(archive.chunks(about(), source))), target) == about()
    assert {name: (target / name).read_bytes() for name in FILES} == FILES


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", [*b"xgXLKS"])
def test_a_large_header_is_refused_before_it_is_read(tmp_path: Path, kind: int, first: bool) -> None:
    opened = Endless(*([] if first else [archive.manifest(about())]), header(bytes([kind]), 1024 * MIB))
    with pytest.raises(Problem, match="is refused") as caught:
        read(opened, tmp_path)
    assert caught.value.code == "IMPORT_FAILED"
    assert opened.given <= 2 * MIB


def endless_headers() -> Iterator[bytes]:
    for _ in range(5000):
        yield header(tarfile.GNUTYPE_LONGNAME, 5) + b"name\0".ljust(tarfile.BLOCKSIZE, b"\0")


def test_headers_of_headers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="is refused"):
        read(Endless(archive.manifest(about()), *endless_headers()), tmp_path)
