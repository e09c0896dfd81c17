"""A file is replaced as a whole, or not at all."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from appliance.files.replacement import Unconfirmed, replace_file, replacement


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize(("content", "written"), [("é\n", b"\xc3\xa9\n"), (b"\xff\x00", b"\xff\x00"), ("", b"")])
def test_it_has_the_new_content_and_leaves_nothing_beside_it(
    tmp_path: Path, content: str | bytes, written: bytes, durable: bool
) -> None:
    path = tmp_path / "file.toml"
    path.write_text("old, and longer than the new one")
    replace_file(path, content, durable=durable)
    assert path.read_bytes() == written
    assert os.listdir(tmp_path) == ["file.toml"]


def test_what_the_disk_did_not_confirm_is_not_called_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sync = tmp_path / "file", os.fsync

    def of_files_only(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        sync(handle)

    monkeypatch.setattr(os, "fsync", of_files_only)
    with pytest.raises(Unconfirmed):
        replace_file(path, "new", durable=True)
    assert path.read_text() == "new"


def test_without_its_folder_nothing_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where this process has no file descriptor left."""
    path, opened = tmp_path / "file", os.open
    path.write_text("old")

    def of_files_only(name: Path, flags: int, mode: int = 0o777) -> int:
        if name == tmp_path:
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(name, flags, mode)

    monkeypatch.setattr(os, "open", of_files_only)
    with pytest.raises(OSError, match="Too many") as refused:
        replace_file(path, "new", durable=True)
    assert not isinstance(refused.value, Unconfirmed)
    assert path.read_text() == "old"


def test_a_reader_gets_the_old_or_the_new_content_and_never_a_part(tmp_path: Path) -> None:
    path, contents, ended = tmp_path / "file", {str(digit) * 100_000 for digit in range(10)}, threading.Event()
    replace_file(path, "0" * 100_000, durable=False)
    others: list[str] = []

    def read() -> None:
        while not ended.is_set():
            if (content := path.read_text()) not in contents:
                others.append(content[:20])

    reader = threading.Thread(target=read)
    reader.start()
    for content in sorted(contents) * 20:
        replace_file(path, content, durable=False)
    ended.set()
    reader.join()
    assert others == []


def test_a_mode_is_of_the_new_file(tmp_path: Path) -> None:
    replace_file(tmp_path / "secret", "key", durable=True, mode=0o600)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_what_an_earlier_process_left_half_written_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file.new").write_text("half of something that was much longer")
    replace_file(tmp_path / "file", "whole", durable=True)
    assert (tmp_path / "file").read_text() == "whole"
    assert os.listdir(tmp_path) == ["file"]


def test_where_it_cannot_be_written_the_old_content_stands(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    (tmp_path / "file.new").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(path, "new", durable=True)
    assert path.read_text() == "old"


def test_where_it_cannot_be_renamed_nothing_is_left_over(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.mkdir()
    with pytest.raises(OSError, match="file"):
        replace_file(folder, "new", durable=False)
    assert os.listdir(tmp_path) == ["file"]


def test_a_writer_that_fails_leaves_the_old_content_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail_half_way() -> None:
        with replacement(path, durable=False) as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail_half_way()
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["file"])


def test_several_writers_do_not_mix_what_they_write(tmp_path: Path) -> None:
    path, both = tmp_path / "file", threading.Barrier(2)

    def write(content: bytes) -> None:
        with replacement(path, durable=False, several_writers=True) as file:
            file.write(content)
            both.wait(10)
            file.write(content)

    writers = [threading.Thread(target=write, args=(content,)) for content in (b"a" * 70_000, b"b" * 70_000)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert path.read_bytes() in (b"a" * 140_000, b"b" * 140_000)
    assert os.listdir(tmp_path) == ["file"]
