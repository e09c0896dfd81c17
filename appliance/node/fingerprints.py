"""The fingerprint of an instance: what its processes have loaded, as far as that can be known.

Files are known by their digests. A process has loaded the files that are there now if none of them changed after it
began. Where one did, nobody knows what its vectors are of, and nothing of the instance is cached until all its
processes are younger than its files. A change that leaves the content as it was counts for nothing: the digests say so.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

from appliance import __version__
from appliance.core.cachekey import Fingerprint
from appliance.core.fingerprint import fingerprint, parts_of_spec, pinned_fingerprint
from appliance.core.listing import Listed
from appliance.core.program import engine_of
from appliance.core.settings import Settings
from appliance.core.state import Instance
from appliance.drivers import hub, modelfiles
from appliance.drivers.digestfile import Digest, DigestFile, FileState, state_of
from appliance.drivers.processes import Started
from appliance.node.integrity import CACHE_FLAG

if TYPE_CHECKING:
    from appliance.wire.tei.v1.tei_pb2 import InfoResponse

log = logging.getLogger(__name__)
SLACK_NS = 50_000_000  # a process reads no model in its first moments, and its age is known to a hundredth of a second
MOST_LINKS = 40  # on one way, as the kernel allows
WITH_RUNTIMES = {"torch": ("transformers",)}  # packages that compute beside a runtime of that name


@dataclass(frozen=True)
class Known:
    """What is known of an instance. fingerprint: None where nothing of it may be cached; why: then, in words.

    changed_ns: the latest change of a file, since 1970. pending: it will be known as soon as its files are read.
    """

    fingerprint: Fingerprint | None
    why: str = ""
    changed_ns: int = 0
    pending: bool = False

    @property
    def digest(self) -> str | None:
        return self.fingerprint.digest if self.fingerprint else None


@dataclass
class Loaded:
    """What was proved to be in the processes of an instance: the files' digests while all were older than these."""

    fingerprint: Fingerprint
    started: frozenset[Started] = frozenset()  # the processes


def known_of_listed(listed: Listed, infos: Sequence[InfoResponse | None], of_peers: bool = False) -> Known:
    """Of an instance whose replicas run elsewhere: as the listing says, or they themselves.

    infos: of those that are ready; None for one that was not asked yet. of_peers: they are appliances. Such a one loads
    another model without the end of any connection to it, so nobody here knows what the next vector will be of.
    """
    if of_peers:
        return Known(None, "a peer computes its vectors, and keeps them in a cache of its own")
    if listed.fingerprint:
        return Known(listed.fingerprint)
    if not infos or None in infos:
        return Known(None, "its replicas have not said yet what they serve", pending=True)
    loaded = {(info.version, info.docker_label, info.model_sha, info.model_dtype) for info in infos if info}
    if len(loaded) > 1:
        return Known(None, "its replicas have loaded different revisions, or are of different versions")
    version, label, revision, dtype = loaded.pop()
    if not hub.COMMIT.fullmatch(revision):  # TEI tells what it was asked for, and a branch is another model tomorrow
        return Known(
            None, "its replicas do not say which commit of the model they have; `fingerprint` in the listing would"
        )
    parts = {"files": f"{listed.spec.model_id}@{revision}", "loaded_dtype": dtype}
    engine = f"{version} {label}".strip()
    return Known(Fingerprint(tuple(sorted({**parts, **parts_of_spec(listed.spec, engine, "remote")}.items()))))


class Fingerprints:
    """Of the instances of one node. Thread-safe; files whose digest nobody has are read by a thread of its own."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.digests = DigestFile(Path(settings.layout.digests))
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="digests")
        self.reading: dict[FileState, Future[Digest | None]] = {}
        self.loaded: dict[tuple[str, int], Loaded] = {}
        self.lock = threading.Lock()

    def of(self, instance: Instance, processes: Iterable[Started]) -> Known:
        """processes: those of the instance that answer now."""
        spec = instance.spec
        place = hub.locate(spec.model_id, spec.revision, spec.flag(CACHE_FLAG))
        engine, device = engine_of(instance, self.settings), "cpu" if instance.gpu_of(0) is None else "gpu"
        if place is None:
            if engine == "tei" and spec.revision and hub.COMMIT.fullmatch(spec.revision):
                return self.pinned(instance, engine, device, processes)
            return Known(None, "its files are not on this machine, and no commit of the hub is pinned as its revision")
        files = [(each.name, place.folder / each.name) for each in modelfiles.serving_files(place.folder)]
        binaries = self.binaries(engine, instance)
        try:
            states = [(name, path, state_of(path)) for name, path in (*files, *binaries)]
            placed_ns = max(placed(place.folder), *(linked_ns(path) for _, path, _ in states))
        except OSError as error:
            return Known(None, f"a file of it cannot be read: {error}")
        digests: dict[str, Digest] = {}
        for name, path, state in states:
            digest = self.digest(path, state)
            if digest is None:
                return Known(None, "its files are being read for the first time", pending=True)
            digests[name] = digest
        named = {name: digests[name].sha256 for name, _ in files}
        engine_words = " ".join([engine, *(f"{name}={digests[name].sha256}" for name, _ in binaries)])
        present = fingerprint(spec, named, self.version(engine) + engine_words, device)
        changed_ns = max(placed_ns, *(digest.since_ns for digest in digests.values()))
        return self.judge(instance, present, changed_ns, frozenset(processes))

    def pinned(self, instance: Instance, engine: str, device: str, processes: Iterable[Started]) -> Known:
        ((name, path),) = self.binaries(engine, instance)
        try:
            state = state_of(path)
        except OSError as error:
            return Known(None, f"the TEI binary cannot be read: {error}")
        digest = self.digest(path, state)
        if digest is None:
            return Known(None, "the TEI binary is being read for the first time", pending=True)
        present = pinned_fingerprint(instance.spec, f"{engine} {name}={digest.sha256}", device)
        return self.judge(instance, present, digest.since_ns, frozenset(processes))

    def judge(self, instance: Instance, present: Fingerprint, changed_ns: int, started: frozenset[Started]) -> Known:
        """Whether what is on the disk is what the processes have loaded."""
        key = (instance.name, instance.launch)
        with self.lock:
            before = self.loaded.get(key)
            if before and before.fingerprint == present and started <= before.started:
                return Known(present, changed_ns=changed_ns)
            proved = before.started if before and before.fingerprint == present else frozenset[Started]()
            is_other = before is not None and before.fingerprint != present and started & before.started
            if is_other or any(each.at_ns + SLACK_NS < changed_ns for each in started - proved):
                why = "its files have changed since its processes began: restart it"
                return Known(None, why, changed_ns)
            if started:
                self.loaded = {each: loaded for each, loaded in self.loaded.items() if each[0] != instance.name}
                self.loaded[key] = Loaded(present, started)
            return Known(present, changed_ns=changed_ns)

    def digest(self, path: Path, state: FileState) -> Digest | None:
        """None until somebody has read the file."""
        if digest := self.digests.get(state):
            return digest
        with self.lock:
            if state not in self.reading or self.reading[state].done():
                self.reading = {each: work for each, work in self.reading.items() if not work.done()}
                self.reading[state] = self.reader.submit(self.read, path)
        return None

    def read(self, path: Path) -> Digest | None:
        try:
            return self.digests.read(path)
        except OSError as error:
            log.warning("Cannot read %s: %s", path, error)
            return None

    def binaries(self, engine: str, instance: Instance) -> Sequence[tuple[str, Path]]:
        """The files of what computes, by name."""
        if engine == "tei":
            return [("text-embeddings-router", Path(self.settings.tei_binary_path))]
        runtime = instance.spec.flag("--runtime") or "onnxruntime"
        packages = ("tokenizers", runtime, *WITH_RUNTIMES.get(runtime, ()))
        return [(package, path) for package in packages if (path := package_file(package))]

    def version(self, engine: str) -> str:
        return "" if engine == "tei" else f"{__version__} "


def linked_ns(path: Path) -> int:
    """When this link was made, since 1970; 0 for a file itself. Raises: OSError."""
    return path.lstat().st_ctime_ns if path.is_symlink() else 0


def placed(path: Path) -> int:
    """When this folder came to its place, since 1970, as far as it and the links on the way to it tell: one that is put
    in the place of another leaves the times of its files as they were. Raises: OSError."""
    latest = path.stat().st_ctime_ns
    for _ in range(MOST_LINKS):
        link = next((each for each in (path, *path.parents) if each.is_symlink()), None)
        if link is None:
            break
        latest = max(latest, link.lstat().st_ctime_ns)
        path = link.parent / os.readlink(link) / path.relative_to(link)
    return latest


@cache
def package_file(package: str) -> Path | None:
    """The file that is another one for each version of a package."""
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        return None
    metadata = (file for file in files if file.name == "METADATA")
    return next((Path(str(file.locate())) for file in metadata), None)
