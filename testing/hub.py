"""A hub on loopback: what the real `huggingface_hub` client needs to list and fetch models, and ways to misbehave.

Written against huggingface_hub 2.4.0, which asks for

    GET  /api/models/{id}[/revision/{rev}][?blobs=true]   `HfApi.model_info`, `snapshot_download` of a branch or tag
    GET  /api/models/{id}/tree/{rev}[/{folder}]           `HfApi.list_repo_tree`, `snapshot_download`
    HEAD /{id}/resolve/{rev}/{file}                       commit, ETag and size of every file, `get_hf_file_metadata`
    GET  /{id}/resolve/{rev}/{file}                       its bytes, or wherever the HEAD pointed

Commits and ETags follow from the content: the SHA-1 of git for small files, SHA-256 for files in LFS. A second port
plays the content network: another origin, where the client must not bring its token.
"""

import hashlib
import json
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import numpy as np

LFS = (".safetensors", ".onnx", ".onnx_data", ".bin", ".pt")
STEP_SECS = 0.05  # how often a slow or silent answer looks whether anyone still waits for it
PIECE = 64 * 1024


@dataclass(frozen=True)
class File:
    """One file of a commit. ``oid`` is git's name of the blob, which for a file in LFS is that of its pointer."""

    content: bytes = field(repr=False)
    oid: str
    sha256: str | None
    pointer_size: int = 0

    @property
    def etag(self) -> str:
        return self.sha256 or self.oid

    @staticmethod
    def of(content: bytes, lfs: bool) -> "File":
        if not lfs:
            return File(content, _git_sha1(content), None)
        sha256 = hashlib.sha256(content).hexdigest()
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(content)}\n".encode()
        return File(content, _git_sha1(pointer), sha256, len(pointer))


def _git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@dataclass
class Repo:
    """One model: commits by their hash, and branches and tags that name them."""

    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    private: bool = False

    def commit(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


@dataclass
class Fault:
    """What goes wrong with the requests that match; see `Hub.misbehave`."""

    target: str
    methods: tuple[str, ...]
    left: int | None  # requests still to spoil; None: all
    what: dict[str, Any]


@dataclass(frozen=True)
class Request:
    """One request as it came: ``path`` with its query, header names in lower case, ``at`` in monotonic seconds."""

    method: str
    path: str
    headers: dict[str, str]
    at: float
    cdn: bool

    @property
    def range(self) -> str | None:
        return self.headers.get("range")


class Hub:
    """The server. Use as a context manager; ``url`` is what HF_ENDPOINT should say."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.renamed: dict[str, str] = {}
        self.requests: list[Request] = []
        self.closing = threading.Event()
        self.connections: set[socket.socket] = set()
        self.broken: list[Exception] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._servers = [_Server(self, cdn) for cdn in (False, True)]
        self.url, self.cdn_url = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)
        self._threads = [threading.Thread(target=server.serve_forever, args=(0.05,)) for server in self._servers]

    def __enter__(self) -> "Hub":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.closing.set()
        for server in self._servers:
            server.shutdown()
        for connection in list(self.connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the client was faster
        for server, thread in zip(self._servers, self._threads):
            server.server_close()
            thread.join()
        if self.broken and error is None:
            raise self.broken[0]

    def add(self, model_id: str, files: dict[str, bytes], revision: str = "main", lfs: set[str] | None = None) -> str:
        """The commit that the branch or tag ``revision`` now names; earlier commits stay. ``lfs``: default by name."""
        big = {name for name in files if name.endswith(LFS)} if lfs is None else lfs
        tree = {name: File.of(content, name in big) for name, content in sorted(files.items())}
        listing = "\n".join(f"{file.oid} {name}" for name, file in tree.items())
        commit = hashlib.sha1(listing.encode(), usedforsecurity=False).hexdigest()
        repo = self.repos.setdefault(model_id, Repo())
        repo.commits[commit] = tree
        repo.refs[revision] = commit
        return commit

    def require_token(self, model_id: str, token: str, private: bool = False) -> None:
        """Gated: anyone sees the listing, the files need ``token``. Private: without it there is no such model."""
        self.repos[model_id].token = token
        self.repos[model_id].private = private

    def rename(self, old: str, new: str) -> None:
        """The model is now called ``new``; requests for the old name are redirected on the hub itself."""
        self.repos[new] = self.repos.pop(old)
        self.renamed[old] = new

    def misbehave(
        self,
        target: str,
        *,
        methods: tuple[str, ...] = ("HEAD", "GET"),
        times: int | None = None,
        **what: Any,
    ) -> None:
        """Spoil the (first ``times``) requests whose model is ``target`` or whose path ends with it.

        Several faults of one request add up. Those of bodies spoil GET only, whatever ``methods`` says.

        slow=n        body of n bytes per second
        silent=True   takes the request and never answers
        hang=n        n bytes of the body, then nothing, the connection stays
        truncated=n   Content-Length of the whole, closes after n bytes
        reset=n       the same, with a TCP reset
        short=n       a file of n bytes that agrees with its own headers; the listings keep the true size
        flipped=n     one bit of byte n changed, in files that have one
        ranges=False  answers 200 with the whole file where a range is asked for
        status=n      with code= for X-Error-Code, message=, retry_after= seconds
        redirect=True 302 to the content network, with X-Linked-Etag and X-Linked-Size
        headers={}    more headers of the answer
        """
        if what.keys() & {"slow", "hang", "truncated", "reset", "flipped", "ranges"}:
            methods = ("GET",)
        with self._lock:
            self._faults.append(Fault(target, methods, times, what))

    def behave(self) -> None:
        """No faults from here on; answers under way keep theirs."""
        with self._lock:
            self._faults.clear()

    def seen(self, method: str, suffix: str = "") -> list[Request]:
        """Requests so far with this method whose path, without the query, ends with ``suffix``."""
        with self._lock:
            return [r for r in self.requests if r.method == method and unquote(r.path.split("?")[0]).endswith(suffix)]

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """For a client in a process of its own: this hub, a cache in ``home``, and nothing of ours shining through."""
        theirs = ("HF_", "HUGGING", "TRANSFORMERS_", "XDG_CACHE_")
        kept = {k: v for k, v in os.environ.items() if not (k.startswith(theirs) or k.lower().endswith("_proxy"))}
        ours = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        return {**kept, **ours, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **more}

    def record(self, request: Request, model_id: str | None) -> dict[str, Any]:
        """What shall go wrong with this request."""
        path = unquote(request.path.split("?")[0])
        wrong: dict[str, Any] = {}
        with self._lock:
            self.requests.append(request)
            for fault in self._faults:
                if request.method not in fault.methods or fault.left == 0 or (request.cdn and "redirect" in fault.what):
                    continue
                if fault.target != model_id and not path.endswith(fault.target):
                    continue
                if fault.left is not None:
                    fault.left -= 1
                wrong.update(fault.what)
        return wrong


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # so that closing waits for them
    request_queue_size = 64

    def __init__(self, hub: Hub, cdn: bool) -> None:
        self.hub = hub
        self.cdn = cdn
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed or give up are what this server is for; mistakes of its own fail the test."""
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, OSError):
            self.hub.broken.append(error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.hub.connections.add(self.connection)
        if self.server.hub.closing.is_set():
            self.connection.shutdown(socket.SHUT_RDWR)

    def finish(self) -> None:
        self.server.hub.connections.discard(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        hub = self.server.hub
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.split("/")[1:]]
        api = parts[:2] == ["api", "models"]
        parts = parts[2:] if api else parts[1:] if self.server.cdn else parts
        verb, at = next(((p, i) for i, p in enumerate(parts) if i and p in ("revision", "tree", "resolve")), (None, -1))
        model_id = "/".join(parts if verb is None else parts[:at])
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers, time.monotonic(), self.server.cdn)
        self.wrong = hub.record(request, model_id)
        if self.wrong.get("silent"):
            return self.wait()
        if "status" in self.wrong:
            return self.refuse(self.wrong["status"], self.wrong.get("code"), self.wrong.get("message", "Spoiled."))
        if model_id in hub.renamed:
            return self.redirect(self.path.replace(model_id, hub.renamed[model_id], 1), 307, {})
        repo = hub.repos.get(model_id)
        sent = headers.get("authorization")
        allowed = repo is not None and repo.token in (None, (sent or "").removeprefix("Bearer "))
        if repo is None or not (api or verb) or (repo.private and not allowed and not self.server.cdn):
            return self.refuse(404 if sent else 401, "RepoNotFound", "Repository not found")
        revision = parts[at + 1] if verb else "main"
        commit = repo.commit(revision)
        if commit is None:
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        rest = "/".join(parts[at + 2 :])
        query = parse_qs(url.query)
        if api and verb == "tree":
            recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
            return self.json(list(_tree(repo.commits[commit], rest, recursive)))
        if api:
            return self.json(_info(model_id, repo, commit, "blobs" in query))
        about = {"X-Repo-Commit": commit}
        if not (allowed or self.server.cdn):
            message = f"Access to model {model_id} is restricted."
            return self.refuse(403 if sent else 401, "GatedRepo", message, about)
        file = repo.commits[commit].get(rest)
        if file is None:
            return self.refuse(404, "EntryNotFound", "Entry not found", about)
        if self.server.cdn:
            return self.file(file, {"ETag": f'"{hashlib.md5(file.content, usedforsecurity=False).hexdigest()}"'})
        if self.wrong.get("redirect"):
            linked = {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(len(file.content))}
            location = f"{hub.cdn_url}/cdn/{model_id}/resolve/{commit}/{quote(rest)}"
            return self.redirect(location, 302, {**about, **linked})
        return self.file(file, {**about, "ETag": f'"{file.etag}"'})

    def file(self, file: File, headers: dict[str, str]) -> None:
        content = file.content
        at = self.wrong.get("flipped", len(content))
        if at < len(content):
            content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        content = content[: self.wrong.get("short", len(content))]
        asked = self.headers.get("Range", "") if self.wrong.get("ranges", True) else ""
        if not asked.startswith("bytes="):
            return self.send(200, {**headers, "Accept-Ranges": "bytes"}, content)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(content)), len(content) - 1)
        if start > end:
            return self.send(416, {**headers, "Content-Range": f"bytes */{len(content)}"}, b"")
        span = {"Content-Range": f"bytes {start}-{end}/{len(content)}", "Accept-Ranges": "bytes"}
        return self.send(206, {**headers, **span}, content[start : end + 1])

    def json(self, value: Any) -> None:
        self.send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def redirect(self, location: str, status: int, headers: dict[str, str]) -> None:
        self.send(status, {**headers, "Location": location}, b"")

    def refuse(self, status: int, code: str | None, message: str, headers: dict[str, str] | None = None) -> None:
        line = "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in message)
        answer = {"Content-Type": "application/json", "X-Error-Message": line, **(headers or {})}
        if code is not None:
            answer["X-Error-Code"] = code
        if "retry_after" in self.wrong:
            answer["Retry-After"] = str(self.wrong["retry_after"])
        self.send(status, answer, json.dumps({"error": message}).encode())

    def send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body)), **self.wrong.get("headers", {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = min((self.wrong[kind] for kind in ("hang", "truncated", "reset") if kind in self.wrong), default=None)
        whole, body = len(body), body[:cut]
        step = int(self.wrong["slow"] * STEP_SECS) or 1 if "slow" in self.wrong else PIECE
        for start in range(0, len(body), step):
            self.wfile.write(body[start : start + step])
            if "slow" in self.wrong and self.server.hub.closing.wait(STEP_SECS):
                break
        if len(body) == whole:
            return
        if "hang" in self.wrong:
            self.wait()
        if "reset" in self.wrong:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            time.sleep(STEP_SECS)  # a reset overtakes bytes that the client has not read
            self.connection.close()
        self.close_connection = True

    def wait(self) -> None:
        """Until the client or the hub ends the connection."""
        self.close_connection = True
        while not self.server.hub.closing.wait(STEP_SECS):
            if select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, socket.MSG_PEEK):
                return


def _tree(files: dict[str, File], folder: str, recursive: bool) -> Iterator[dict[str, Any]]:
    folders: set[str] = set()
    inside = f"{folder}/" if folder else ""
    for name, file in files.items():
        if not name.startswith(inside):
            continue
        steps = name.removeprefix(inside).split("/")
        for depth in range(1, len(steps) if recursive else min(len(steps), 2)):
            path = inside + "/".join(steps[:depth])
            if path not in folders:
                folders.add(path)
                yield {"type": "directory", "oid": _git_sha1(path.encode()), "size": 0, "path": path}
        if recursive or len(steps) == 1:
            entry: dict[str, Any] = {"type": "file", "oid": file.oid, "size": len(file.content), "path": name}
            if file.sha256:
                entry["lfs"] = {"oid": file.sha256, "size": len(file.content), "pointerSize": file.pointer_size}
            yield entry


def _info(model_id: str, repo: Repo, commit: str, blobs: bool) -> dict[str, Any]:
    siblings: list[dict[str, Any]] = []
    for name, file in repo.commits[commit].items():
        sibling: dict[str, Any] = {"rfilename": name}
        if blobs:
            sibling |= {"size": len(file.content), "blobId": file.oid}
            if file.sha256:
                lfs = {"sha256": file.sha256, "size": len(file.content), "pointerSize": file.pointer_size}
                sibling["lfs"] = lfs
        siblings.append(sibling)
    return {
        "_id": hashlib.md5(model_id.encode(), usedforsecurity=False).hexdigest()[:24],
        "id": model_id,
        "modelId": model_id,
        "sha": commit,
        "private": repo.private,
        "gated": "manual" if repo.token and not repo.private else False,
        "disabled": False,
        "lastModified": "2024-01-01T00:00:00.000Z",
        "createdAt": "2024-01-01T00:00:00.000Z",
        "tags": [],
        "siblings": siblings,
    }


def small_model(floats: int = 20_000, shards: int = 2, seed: int = 0) -> dict[str, bytes]:
    """Files of an embedding model: real safetensors, ``shards`` of them with ``floats`` numbers each, no meaning."""
    names = [f"model-{n:05}-of-{shards:05}.safetensors" for n in range(1, shards + 1)]
    config = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 384, "vocab_size": 30522}
    files = {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": json.dumps({"version": "1.0", "seed": seed}).encode(),
        "modules.json": b"[]",
        "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
        "README.md": b"# Small\n",
        "model.safetensors.index.json": json.dumps(
            {"metadata": {"total_size": 4 * floats * shards}, "weight_map": {f"w{n}": n for n in names}}
        ).encode(),
    }
    for number, name in enumerate(names):
        values = np.random.default_rng(seed + number).standard_normal(floats, dtype=np.float32).tobytes()
        tensor = {f"w{name}": {"dtype": "F32", "shape": [floats], "data_offsets": [0, len(values)]}}
        header = json.dumps(tensor).encode()
        header += b" " * (-len(header) % 8)
        files[name] = struct.pack("<Q", len(header)) + header + values
    return files
