"""Where code comes from: a folder of this machine, or a git repository, which is cloned."""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from examples.code_search.problems import Problem

SCHEMES = ("https", "http", "ssh", "file")
TIMEOUT = 600  # seconds for a clone


def named(source: str) -> str:
    """The one name of a source: its URL, or the resolved path of its folder. Refuses what is neither."""
    text = source.strip()
    if not text:
        raise Problem("Name a folder of this machine, or the URL of a git repository.")
    # git takes ext::COMMAND for a command to run, and an argument with a hyphen in front for an option.
    if text.startswith("-") or re.match(r"\w+::", text):
        raise Problem(f"{text!r} is neither a folder nor the URL of a git repository.")
    if "://" in text:
        parts = urlsplit(text)
        if parts.scheme not in SCHEMES:
            raise Problem(f"{text!r} is no URL of a git repository: it must begin with one of {', '.join(SCHEMES)}.")
        if (parts.hostname or "").startswith("-") or not (parts.hostname or parts.scheme == "file"):
            raise Problem(f"{text!r} names no host.")
        return text
    folder = Path(text).expanduser()
    if not folder.is_dir():
        hint = " Write git@HOST:PATH as ssh://git@HOST/PATH." if re.match(r"[\w.-]+@[\w.-]+:", text) else ""
        raise Problem(f"{text!r} is no folder of this machine.{hint}")
    return str(folder.resolve())


def is_url(name: str) -> bool:
    return "://" in name


def fetched(name: str, clones: Path) -> Path:
    """The folder with the newest files of a named source. Repositories are cloned into ``clones``, without history."""
    if not is_url(name):
        return Path(name)
    target = clones / hashlib.sha256(name.encode()).hexdigest()[:20]
    if target.is_dir():
        _git(name, "-C", str(target), "fetch", "--quiet", "--depth", "1", "--no-tags", "origin", "HEAD")
        _git(name, "-C", str(target), "reset", "--quiet", "--hard", "FETCH_HEAD")
        return target
    clones.mkdir(parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(dir=clones, prefix="begun-"))
    try:
        _git(name, "clone", "--quiet", "--depth", "1", "--no-tags", "--", name, str(room / "clone"))
        (room / "clone").rename(target)  # as a whole: a clone that was interrupted is never taken for one
    finally:
        shutil.rmtree(room)
    return target


def _git(name: str, *arguments: str) -> None:
    environ = {
        **os.environ,
        "GIT_ALLOW_PROTOCOL": ":".join(SCHEMES),  # also for what a server redirects to
        "GIT_TERMINAL_PROMPT": "0",  # nobody sits there who could answer
        "GIT_SSH_COMMAND": "ssh -o BatchMode=yes",
        "GIT_LFS_SKIP_SMUDGE": "1",
    }
    command = ["git", *arguments]
    try:
        found = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT
        )
    except FileNotFoundError:
        raise Problem("git is not installed: install it, or name a folder.") from None
    except subprocess.TimeoutExpired:
        raise Problem(f"{public(name)} was not cloned within {TIMEOUT} seconds.") from None
    if found.returncode:
        said = found.stderr.strip().splitlines() or ["git said nothing"]
        raise Problem(f"{public(name)} cannot be cloned: {public(said[-1])}")


def public(text: str) -> str:
    """Without the password of a URL."""
    return re.sub(r"(\w+://)[^/@\s]*@", r"\1", text)
