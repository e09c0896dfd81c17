"""What is read, and from where: folders, clones, and what neither is."""

import os
import subprocess
from pathlib import Path

import pytest

from examples.code_search import repository
from examples.code_search.files import LARGEST, LeftOut, Text, read
from examples.code_search.problems import Problem


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@invalid", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *who, "-C", str(folder), *arguments], check=True, capture_output=True, timeout=30)


def committed(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "a.py").write_text(text)
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "more")


def test_files_are_read_in_order_and_the_others_named(tmp_path: Path) -> None:
    folder, outside = tmp_path / "here", tmp_path / "outside"
    for place in (folder / "sub", folder / ".git", folder / "node_modules" / "x", folder / ".venv-x", outside):
        place.mkdir(parents=True)
        (place / "hidden.py").write_text("junk")
    (folder / "sub" / "hidden.py").rename(folder / "sub" / "b.py")
    (folder / "a.py").write_bytes(b"one\r\ntwo\n")
    (folder / "latin.txt").write_bytes("Stra\xdfe und noch ein langer Satz".encode("latin-1"))
    (folder / "zero.bin").write_bytes(b"ab\0cd")
    (folder / "picture.bin").write_bytes(bytes(range(128, 256)))
    (folder / "most.txt").write_bytes(b"x" * LARGEST)
    (folder / "much.txt").write_bytes(b"x" * (LARGEST + 1))
    (folder / "some.lock").write_text("x")
    (folder / "out.py").symlink_to(outside / "hidden.py")
    (folder / "out").symlink_to(outside)
    os.mkfifo(folder / "pipe")
    (folder / "new\nline").write_text("x")
    found = list(read(folder))
    assert {each.path: each.text for each in found if isinstance(each, Text)} == {
        "a.py": "one\ntwo\n",
        "latin.txt": "Stra\ufffde und noch ein langer Satz",
        "most.txt": "x" * LARGEST,
        "sub/b.py": "junk",
    }
    assert {each for each in found if isinstance(each, LeftOut)} == {
        LeftOut("zero.bin", "binary"),
        LeftOut("picture.bin", "binary"),
        LeftOut("much.txt", "larger than 1,000,000 bytes"),
        LeftOut("some.lock", "generated"),
        LeftOut("out.py", "a link"),
        LeftOut("pipe", "no regular file"),
        LeftOut("'new\\nline'", "its name cannot be shown"),
    }
    paths = [each.path for each in found if isinstance(each, Text)]
    assert paths == ["a.py", "latin.txt", "most.txt", "sub/b.py"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("", "Name a folder"),
        ("--upload-pack=touch /tmp/x", "neither"),
        ("-C", "neither"),
        ("ext::sh -c 'touch /tmp/x'", "neither"),
        ("ext::sh -c touch% /tmp/x https://a/b", "neither"),
        ("fd::7", "neither"),
        ("ftp://host/x", "must begin with one of https, http, ssh, file"),
        ("ext://host/x", "must begin with"),
        ("ssh://-oProxyCommand=x/y", "names no host"),
        ("https:///x", "names no host"),
        ("git@host.org:a/b", "ssh://git@HOST/PATH"),
        ("/no/such/folder", "is no folder"),
        ("/etc/passwd", "is no folder"),
    ],
)
def test_what_is_no_source_is_refused_before_git_sees_it(source: str, said: str) -> None:
    with pytest.raises(Problem, match=said):
        repository.named(source)


def test_a_folder_has_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert {repository.named(f" {text} ") for text in (".", str(tmp_path), "link", f"{tmp_path}/")} == {str(tmp_path)}
    assert repository.fetched(str(tmp_path), tmp_path / "clones") == tmp_path
    assert not (tmp_path / "clones").exists()


def test_a_repository_is_cloned_and_later_brought_up_to_date(tmp_path: Path) -> None:
    origin, clones = tmp_path / "origin", tmp_path / "clones"
    committed(origin, "one")
    name = repository.named(f"file://{origin}")
    folder = repository.fetched(name, clones)
    assert (folder / "a.py").read_text() == "one"
    committed(origin, "two")
    assert repository.fetched(name, clones) == folder
    assert (folder / "a.py").read_text() == "two"
    assert list(clones.iterdir()) == [folder]  # nothing else is left


def test_what_cannot_be_cloned_is_told_without_the_password(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="cannot be cloned: ") as told:
        repository.fetched(f"file://me:secret@{tmp_path}/nothing", tmp_path / "clones")
    assert "secret" not in str(told.value)
    assert list((tmp_path / "clones").iterdir()) == []


def test_a_repository_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    committed(tmp_path / "origin", "one")
    (tmp_path / "secret.py").write_text("secret")
    (tmp_path / "origin" / "b.py").symlink_to(tmp_path / "secret.py")
    git(tmp_path / "origin", "add", ".")
    git(tmp_path / "origin", "commit", "--quiet", "--message", "a link")
    folder = repository.fetched(f"file://{tmp_path}/origin", tmp_path / "clones")
    assert list(read(folder)) == [Text("a.py", "one"), LeftOut("b.py", "a link")]
