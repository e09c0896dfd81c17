"""Archives of models that nobody vouches for: what stands before a member takes no memory."""

import hashlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from appliance.core.problems import Kind, Problem
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


SPARSE = {
    "a map before the content": {"major": "1", "minor": "0", "realsize": str(MIB)},
    "a map in the header": {"map": "0,1", "size": str(MIB)},
}


@pytest.mark.parametrize("name", [archive.MANIFEST, "files/weights.bin"])
@pytest.mark.parametrize("sparse", SPARSE.values(), ids=SPARSE)
def test_a_sparse_file_is_refused_before_it_is_written(tmp_path: Path, sparse: dict[str, str], name: str) -> None:
    """An archive of 4 KB would fill the disk."""
    listed = [{"name": "weights.bin", "size": MIB, "sha256": hashlib.sha256(bytes(MIB)).hexdigest()}]
    info = tarfile.TarInfo(name)
    info.size = 512
    info.pax_headers = {f"GNU.sparse.{key}": value for key, value in {**sparse, "name": name}.items()}
    member = info.tobuf(tarfile.PAX_FORMAT) + b"1\n0\n0\n".ljust(512, b"\0")
    before = b"" if name == archive.MANIFEST else archive.manifest({**about(), "files": listed})
    with pytest.raises(Problem, match=r"manifest|sparse file"):
        read(io.BytesIO(before + member + archive.END), tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", [*b"xgXLKS"])
def test_a_large_header_is_refused_before_it_is_read(tmp_path: Path, kind: int, first: bool) -> None:
    opened = Endless(*([] if first else [archive.manifest(about())]), header(bytes([kind]), 1024 * MIB))
    with pytest.raises(Problem, match="is refused") as caught:
        read(opened, tmp_path)
    assert caught.value.code == "IMPORT_FAILED"
    assert opened.given <= 2 * MIB


def test_a_map_of_holes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """It became a list of numbers in memory, four times as large as what was sent."""
    info = tarfile.TarInfo("files/config.json")
    info.size = 1024 * MIB
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    opened = Endless(
        archive.manifest(about()), info.tobuf(tarfile.PAX_FORMAT), b"999999999999\n", *[b"0\n" * 1024] * 4096
    )
    with pytest.raises(Problem, match="sparse file"):
        read(opened, tmp_path)
    assert opened.given <= 2 * MIB


def test_what_does_not_fit_on_the_disk_is_refused_before_it_fills_it(tmp_path: Path) -> None:
    """The state may be on it as well."""
    listed = [{"name": "weights.bin", "size": 2**62, "sha256": DIGEST}]
    opened = Endless(archive.manifest({**about(), "files": listed}), archive.member_header("files/weights.bin", 2**62))
    with pytest.raises(Problem, match="make room") as caught:
        read(opened, tmp_path)
    assert (caught.value.kind, caught.value.code) == (Kind.EXHAUSTED, "IMPORT_FAILED")
    assert opened.given <= 2 * MIB


def given(listed: str) -> bytes:
    """A manifest with this for its files, and one file behind it."""
    text = f'{{"format": "{archive.FORMAT}", "files": {listed}}}'.encode()
    parts = [archive.member_header(archive.MANIFEST, len(text)), text, archive.padding(len(text))]
    return b"".join([*parts, archive.member_header("files/5", 1), b"1", archive.padding(1), archive.END])


DIGEST = hashlib.sha256(b"1").hexdigest()
NO_FILES = {
    "an infinite size": f'[{{"name": "5", "size": Infinity, "sha256": "{DIGEST}"}}]',
    "a size in words": f'[{{"name": "5", "size": "1", "sha256": "{DIGEST}"}}]',
    "a size that is true": f'[{{"name": "5", "size": true, "sha256": "{DIGEST}"}}]',
    "a name that is a number": f'[{{"name": 5, "size": 1, "sha256": "{DIGEST}"}}]',
    "a digest that is none": '[{"name": "5", "size": 1, "sha256": null}]',
    "a file that is none": '["5"]',
    "files that are none": "5",
}


def test_a_manifest_of_ours_is_read(tmp_path: Path) -> None:
    read(io.BytesIO(given(f'[{{"name": "5", "size": 1, "sha256": "{DIGEST}"}}]')), tmp_path)
    assert (tmp_path / "5").read_bytes() == b"1"


@pytest.mark.parametrize("listed", NO_FILES.values(), ids=NO_FILES)
def test_a_manifest_of_other_types_is_refused(tmp_path: Path, listed: str) -> None:
    """It ended as a traceback, half of the way through."""
    with pytest.raises(Problem, match="its manifest cannot be read") as caught:
        read(io.BytesIO(given(listed)), tmp_path)
    assert caught.value.code == "IMPORT_FAILED"
    assert list(tmp_path.iterdir()) == []


def sparse_member() -> bytes:
    """One whose pax header says that a map of holes stands before its content, and none does."""
    opened = io.BytesIO()
    with tarfile.open(fileobj=opened, mode="w", format=tarfile.PAX_FORMAT) as made:
        info = tarfile.TarInfo("files/5")
        info.size = 3
        about = {"major": "1", "minor": "0", "name": "files/5", "realsize": "3"}
        info.pax_headers = {f"GNU.sparse.{key}": value for key, value in about.items()}
        made.addfile(info, io.BytesIO(b"zz\n"))
    return opened.getvalue()


@pytest.mark.parametrize("name", ["w\\udcff", "a\\nb", "a\\u0000b", "../a", "a//b"], ids=lambda name: name)
def test_a_name_that_no_file_of_a_model_has_is_refused(tmp_path: Path, name: str) -> None:
    """One that was no text made `GET /models` fail for all models."""
    with pytest.raises(Problem, match="is no name of a file inside it"):
        read(io.BytesIO(given(f'[{{"name": "{name}", "size": 1, "sha256": "{DIGEST}"}}]')), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_member_with_a_bad_header_is_refused(tmp_path: Path) -> None:
    """tarfile (3.11) raises ValueError for it."""
    whole = archive.manifest({"files": [{"name": "5", "size": 3, "sha256": DIGEST}]}) + sparse_member()
    with pytest.raises(Problem, match="is refused") as caught:
        read(io.BytesIO(whole), tmp_path)
    assert caught.value.code == "IMPORT_FAILED"


def endless_headers() -> Iterator[bytes]:
    for _ in range(5000):
        yield header(tarfile.GNUTYPE_LONGNAME, 5) + b"name\0".ljust(tarfile.BLOCKSIZE, b"\0")


def test_headers_of_headers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="is refused"):
        read(Endless(archive.manifest(about()), *endless_headers()), tmp_path)
