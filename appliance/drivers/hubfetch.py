"""Downloads from a Hugging Face hub into its cache, through `huggingface_hub`: only complete, verified files count.

`snapshot_download` is not used (huggingface_hub 2.4.0, measured): it compares no digests, begins a file again after a
crash, and waits without a time limit for a hub that does not answer. Here a file grows under a temporary name, is
continued after a crash, and becomes a blob of the cache only when its digest is the one that the hub lists.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from filelock import FileLock
from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils._headers import build_hf_headers

from appliance.core.models import SPARE_BYTES
from appliance.core.problems import Kind, Problem, quoted
from appliance.files.checksum import git_blob_of, sha256_of
from appliance.files.replacement import replace_file, sync_names

LISTING_SECS = 20.0
CHUNK = 1024 * 1024
COMMIT = re.compile(r"[0-9a-f]{40}")

constants.DOWNLOAD_CHUNK_SIZE = CHUNK  # a file grows by this; a broken connection loses up to the library's 10 MiB


@dataclass(frozen=True)
class RemoteFile:
    """A file as the hub lists it. digest: its blob's name, SHA-256 for a large file, git's SHA-1 for a small one."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class Listing:
    commit: str
    files: tuple[RemoteFile, ...]


# A page of a proxy, fields of other types, a token that no header can carry, an endpoint that is no URL.
ANOTHER = (ValueError, TypeError, KeyError, AttributeError, RecursionError, httpx2.InvalidURL)


def download_failed(message: str) -> Problem:
    return Problem(Kind.INTERNAL, "MODEL_DOWNLOAD_FAILED", message)


@contextmanager
def hub_errors_as_problems(model_id: str) -> Iterator[None]:
    """Raise every failure of the hub and of the network as a Problem that says what to do about it."""
    hub = constants.ENDPOINT
    try:
        yield
    except GatedRepoError as error:
        raise download_failed(
            f"{hub} asks for permission for {quoted(model_id)}: accept its terms, set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise download_failed(f"{quoted(model_id)} has no such revision on {hub}") from error
    except RepositoryNotFoundError as error:
        raise download_failed(
            f"{hub} has no model {quoted(model_id)}, or it is private: check the id, set HF_TOKEN"
        ) from error
    except RemoteEntryNotFoundError as error:
        raise download_failed(f"{hub} lists a file of {quoted(model_id)} that it does not have: {error}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "an error"
        why = {401: "set a valid HF_TOKEN", 403: "this token may not read it", 429: "try again later"}.get(status, "")
        raise download_failed(f"{hub} answered {status} for {quoted(model_id)}{why and ': ' + why}") from error
    except httpx2.TimeoutException as error:
        raise download_failed(
            f"{hub} does not answer any more ({type(error).__name__}): try again, what came is kept"
        ) from error
    except httpx2.HTTPError as error:
        raise download_failed(
            f"Cannot reach {hub}: {error or type(error).__name__}; set HF_ENDPOINT for a mirror"
        ) from error
    except ANOTHER as error:
        words = f"{hub} cannot be asked, or answered something that is no model's listing"
        raise download_failed(f"{words} ({error}): is a proxy in between? Look at HF_ENDPOINT and HF_TOKEN") from error
    except OfflineModeIsEnabled as error:
        raise download_failed(
            f"HF_HUB_OFFLINE is set, so {hub} is not asked: unset it, or import an archive"
        ) from error
    except OSError as error:
        raise download_failed(f"Cannot store {quoted(model_id)}: {error}") from error


def listing(model_id: str, revision: str) -> Listing:
    """The commit and files of a revision, in one request. Raises: Problem."""
    with hub_errors_as_problems(model_id):
        info = HfApi().model_info(model_id, revision=revision, files_metadata=True, timeout=LISTING_SECS)
        if not COMMIT.fullmatch(info.sha or ""):  # it becomes the name of a folder
            raise download_failed(f"{constants.ENDPOINT} gave {quoted(info.sha)} for a commit")
        files = []
        for file in info.siblings or []:
            digest = file.lfs.sha256 if file.lfs else file.blob_id
            if type(file.size) is not int or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", digest or ""):
                raise download_failed(f"{constants.ENDPOINT} does not tell size and digest of {quoted(file.rfilename)}")
            files.append(RemoteFile(file.rfilename, file.size, str(digest)))
        return Listing(str(info.sha), tuple(files))


class Repository:
    """One model's part of the cache at ``folder``."""

    def __init__(self, model_id: str, folder: Path) -> None:
        self.model_id = model_id
        self.folder = folder

    def blob(self, file: RemoteFile) -> Path:
        return self.folder / "blobs" / file.digest

    def partial(self, file: RemoteFile) -> Path:
        return self.folder / "blobs" / f"{file.digest}.appliance.incomplete"

    def present(self, file: RemoteFile) -> int:
        """How many bytes of the file have been downloaded."""
        for path in (self.blob(file), self.partial(file)):
            if path.exists():
                return min(path.stat().st_size, file.size)
        return 0

    def refuse_without_room(self, files: list[RemoteFile]) -> None:
        """Raises: Problem when the missing bytes do not fit on the disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lacking = sum(file.size - self.present(file) for file in files)
        free = shutil.disk_usage(self.folder).free
        if lacking + SPARE_BYTES > free:
            raise download_failed(
                f"{quoted(self.model_id)} needs {lacking} more bytes and {self.folder} has {free} free: make room"
            )

    def fetch(self, commit: str, file: RemoteFile, watch: Callable[[Path | None], None]) -> None:
        """Complete the blob of a file. watch: called with the file that grows, and with None at the end.

        Raises: Problem.
        """
        with hub_errors_as_problems(self.model_id):
            blob, partial = self.blob(file), self.partial(file)
            blob.parent.mkdir(parents=True, exist_ok=True)
            with self.lock(file.digest):  # the library's own
                if blob.exists() and digest_of(blob, file) == file.digest:
                    return
                blob.unlink(missing_ok=True)
                if partial.exists() and partial.stat().st_size > file.size:
                    partial.unlink()
                watch(partial)
                try:
                    self.grow(commit, file, partial)
                finally:
                    watch(None)
                os.replace(partial, blob)

    def lock(self, name: str) -> FileLock:
        """What other processes with this cache wait for, on this machine and, where the disk is shared, on others."""
        lock = self.folder.parent / ".locks" / self.folder.name / f"{name}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(lock)

    def grow(self, commit: str, file: RemoteFile, partial: Path) -> None:
        """Download the rest of a file. Raises: Problem when the content is not the listed one; then it is deleted."""
        url = hf_hub_url(self.model_id, file.name, revision=commit, endpoint=constants.ENDPOINT)
        with partial.open("ab") as growing:
            try:
                http_get(
                    url,
                    growing,
                    resume_size=growing.tell(),
                    headers=build_hf_headers(),  # the client does not send the token to a host that it is redirected to
                    expected_size=file.size,
                    tqdm_class=SilentProgress,
                )
            except OSError as error:
                if error.errno is None and "Consistency check" in str(error):  # the library's, for a wrong length
                    growing.flush()
                    raise self.discard(file, partial) from error
                raise
            growing.flush()
            os.fsync(growing.fileno())
        if digest_of(partial, file) != file.digest:
            raise self.discard(file, partial)

    def discard(self, file: RemoteFile, partial: Path) -> Problem:
        """Delete a downloaded file that differs from the listed one; returns the Problem to raise."""
        digest, size = digest_of(partial, file), partial.stat().st_size
        partial.unlink()
        return download_failed(
            f"{quoted(file.name)} of {quoted(self.model_id)} came with {size} bytes and digest {digest}, where "
            f"{constants.ENDPOINT} lists {file.size} bytes and {file.digest}: it was thrown away; try again"
        )

    def publish(self, revision: str, commit: str, files: list[RemoteFile]) -> Path:
        """Link the files into the snapshot of this commit, and write the commit to the revision's ref, so that a power
        cut takes nothing of it away.

        Returns the snapshot.
        """
        snapshot = self.folder / "snapshots" / commit
        for file in files:
            link = snapshot / file.name
            link.parent.mkdir(parents=True, exist_ok=True)
            target = os.path.relpath(self.blob(file), link.parent)
            if not link.is_symlink() or os.readlink(link) != target:
                link.unlink(missing_ok=True)
                link.symlink_to(target)
        named = [path for file in files for path in (self.blob(file), snapshot / file.name)]
        sync_names(named, self.folder.parent)
        if not COMMIT.fullmatch(revision):
            reference = self.folder / "refs" / revision
            reference.parent.mkdir(parents=True, exist_ok=True)
            replace_file(reference, commit, durable=True)
        return snapshot


class SilentProgress:
    """Replaces the library's progress bar: this process has no terminal."""

    def __init__(self, *_: object, **__: object) -> None:
        self.n = 0

    def update(self, count: int = 1) -> None:
        self.n += count

    def __enter__(self) -> SilentProgress:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


def digest_of(path: Path, file: RemoteFile) -> str:
    """The digest of a file, of the kind that the hub lists for it."""
    return sha256_of(path) if len(file.digest) == 64 else git_blob_of(path)
