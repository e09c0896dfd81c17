"""Cached embeddings in Qdrant: those of a fingerprint are a collection, as far as Qdrant keeps them bit for bit.

Numbers travel as text. What is not a finite float32, or too small to be a normal one, may come back as another number:
it is not stored. So are sparse answers, whose indices look like such numbers. Each point has its entry's header with
the checksum: what came back changed is taken for absent. No text and no index is stored, and a dot product leaves
vectors as they are. Each width has a collection of its own: `tei-1-FINGERPRINT-WIDTH`.
"""

from __future__ import annotations

import base64
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import UUID

import httpx
import numpy as np
from pydantic import ValidationError
from qdrant_client import QdrantClient, models
from qdrant_client.common.client_exceptions import QdrantException
from qdrant_client.http.exceptions import ApiException, ResponseHandlingException, UnexpectedResponse

from appliance.core.breaker import Breaker
from appliance.core.cachekey import HEADER, KEY_BYTES, Damaged, unpacked
from appliance.core.cachestore import Failure, StoreFailed, StoreStats

PREFIX = "tei-1-"
ROWS_PER_SEC = 1000  # a batch has so much longer: some 10 KB of text a row
NUMBERS_AT_ONCE = 500_000  # of one request, some 10 MB: Qdrant takes 32 MB
IDS_AT_ONCE = 1000
WIDEST = 65_535  # numbers of a vector
MOST_WIDTHS = 8  # of one fingerprint; entries of further ones are not stored
LOOK_SECS = 30.0  # how often a process looks which collections others have made
STEP_SECS = 30.0  # of what walks through a collection, or makes one
CONNECTIONS = 32
SMALLEST = float(np.finfo(np.float32).tiny)
FAULTS = (ApiException, QdrantException, httpx.HTTPError, OSError, ValueError, RuntimeError)
SLIPS = (AssertionError, AttributeError, LookupError, TypeError)  # of the client, at an answer that is not Qdrant's
BROKEN = (Failure.AWAY, Failure.SLOW, Failure.REFUSED)


class QdrantStore:
    """where: http:// or https://, with a key as in https://:KEY@HOST:6333; else a folder, for tests: Qdrant's library
    keeps the points itself there, for one process."""

    def __init__(self, where: str, deadline_secs: float = 0.25) -> None:
        self.evicted = 0
        self.deadline_secs = deadline_secs
        self.deadline = TimeOfCall()
        self.lock = threading.Lock()
        self.breaker = Breaker()
        self.known: dict[str, set[int]] = {}
        self.looked_at = float("-inf")
        self.remote = where.startswith(("http://", "https://"))
        # The library is not made for threads where it keeps the points itself.
        self.alone = nullcontext() if self.remote else threading.RLock()
        self.place, self.secret = where, ""
        try:
            self.client = (
                self.connected() if self.remote else QdrantClient(path=where, force_disable_check_same_thread=True)
            )
        except (RuntimeError, OSError) as error:
            raise StoreFailed(Failure.AWAY, f"{where}: {error}") from None
        except ValueError:  # its words may quote what is a part of the key
            raise StoreFailed(Failure.REFUSED, "the address cannot be read: http://HOST:6333") from None

    def connected(self) -> QdrantClient:
        """Connects to nothing yet."""
        parsed = urlsplit(self.place)
        self.secret = unquote(parsed.password or parsed.username or "")
        host = f"[{parsed.hostname}]" if ":" in (parsed.hostname or "") else parsed.hostname
        self.place = f"{parsed.scheme}://{host}:{parsed.port or 6333}{parsed.path.rstrip('/')}"
        return QdrantClient(
            url=self.place,
            headers={"api-key": self.secret} if self.secret else None,
            check_compatibility=False,
            transport=TimedTransport(self.deadline),
        )

    def get_many(self, fingerprint: str, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        with self.asking(self.deadline_secs + len(keys) / ROWS_PER_SEC):
            for width in sorted(self.widths(fingerprint)):
                missing = {str(id_of(key)): key for key in keys if key not in found}
                ids = iter(missing)
                while some := list(islice(ids, max(1, min(IDS_AT_ONCE, NUMBERS_AT_ONCE // width)))):
                    for record in self.records(name_of(fingerprint, width), some):
                        key = missing[str(UUID(str(record.id)))]
                        if value := value_of(key, record):
                            found[key] = value
        return found

    def records(self, name: str, ids: Sequence[str]) -> list[models.Record]:
        try:
            return self.client.retrieve(name, ids, with_payload=["head"], with_vectors=True)
        except (UnexpectedResponse, ValueError) as error:
            if not is_absent(error):
                raise
            self.looked_at = float("-inf")
            return []

    def put_many(self, fingerprint: str, values: Mapping[bytes, bytes]) -> None:
        by_width: dict[int, list[models.PointStruct]] = defaultdict(list)
        for key, value in values.items():
            if point := point_of(key, value):
                by_width[(len(value) - HEADER.size) // 4].append(point)
        with self.asking(self.deadline_secs + len(values) / ROWS_PER_SEC):
            for width, points in by_width.items():
                if not self.has(fingerprint, width):
                    continue
                rest = iter(points)
                while some := list(islice(rest, max(1, NUMBERS_AT_ONCE // width))):
                    self.upsert(name_of(fingerprint, width), some)

    def upsert(self, name: str, points: list[models.PointStruct]) -> None:
        try:
            self.client.upsert(name, points, wait=True)
        except (UnexpectedResponse, ValueError) as error:
            if not is_absent(error):
                raise
            self.looked_at = float("-inf")  # somebody deletes it: the next call makes it again

    def purge(self, fingerprint: str, since_ms: int, until_ms: int) -> int:
        deleted = 0
        self.looked_at = float("-inf")
        with self.asking(STEP_SECS):
            known = {each: set(widths) for each, widths in self.present().items() if fingerprint in ("", each)}
        chosen = models.Filter(
            must=[models.FieldCondition(key="at_ms", range=models.Range(gte=since_ms, lte=until_ms))]
        )
        for name in (name_of(each, width) for each, widths in known.items() for width in widths):
            with self.asking(STEP_SECS):
                everything = self.client.count(name, exact=True).count
                count = self.client.count(name, count_filter=chosen, exact=True).count
                if count == everything:
                    self.client.delete_collection(name)
                elif count:
                    self.client.delete(name, models.FilterSelector(filter=chosen), wait=True)
            deleted += count
        self.looked_at = float("-inf")
        return deleted

    def stats(self) -> StoreStats:
        """What Qdrant's collections take it does not tell. The counts are its estimates."""
        with self.asking(self.deadline_secs):
            names = [name_of(each, width) for each, widths in self.present().items() for width in widths]
            return StoreStats(sum(self.client.count(name, exact=False).count for name in names), None)

    def close(self) -> None:
        with self.alone:
            self.client.close()

    # -- collections --------------------------------------------------------------------------------------------------

    def present(self) -> dict[str, set[int]]:
        """The widths of each fingerprint, as they were seen a moment ago."""
        if time.monotonic() - self.looked_at > LOOK_SECS:
            known: dict[str, set[int]] = defaultdict(set)
            for collection in self.client.get_collections().collections:
                fingerprint, _, width = collection.name.removeprefix(PREFIX).rpartition("-")
                if collection.name.startswith(PREFIX) and fingerprint and width.isdecimal():
                    known[fingerprint].add(int(width))
            self.known, self.looked_at = dict(known), time.monotonic()
        return self.known

    def widths(self, fingerprint: str) -> set[int]:
        return self.present().get(fingerprint, set())

    def has(self, fingerprint: str, width: int) -> bool:
        """Whether there is a collection for it; made where it is not. False: the fingerprint has too many widths."""
        known = self.widths(fingerprint)
        if width in known:
            return True
        if len(known) >= MOST_WIDTHS:
            return False
        with self.deadline.longer(STEP_SECS):  # once, and by one that writes
            try:
                self.client.create_collection(
                    name_of(fingerprint, width),
                    vectors_config=models.VectorParams(size=width, distance=models.Distance.DOT, on_disk=True),
                    hnsw_config=models.HnswConfigDiff(m=0),
                    optimizers_config=models.OptimizersConfigDiff(indexing_threshold=0),
                    on_disk_payload=True,
                )
            except (UnexpectedResponse, ValueError) as error:
                if "already exists" not in str(error):
                    raise
        self.looked_at = float("-inf")
        self.known = {**self.known, fingerprint: {*known, width}}
        return True

    # -- faults -------------------------------------------------------------------------------------------------------

    @contextmanager
    def asking(self, secs: float) -> Iterator[None]:
        """Requests take until ``secs`` from now at most. Raises: StoreFailed."""
        with self.lock:
            if not self.breaker.admits(time.monotonic()):
                raise StoreFailed(Failure.AWAY, f"not asked again yet: {self.breaker.words}")
        try:
            with self.alone, self.deadline.within(secs):
                yield
        except (*FAULTS, *SLIPS) as error:
            cause = error.source if isinstance(error, ResponseHandlingException) else error
            failure, words = failure_of(cause), self.masked(cause)
            with self.lock:
                if failure in BROKEN and not isinstance(cause, httpx.PoolTimeout):
                    self.breaker.failed(time.monotonic(), words)
                else:
                    self.breaker.succeeded()
            raise StoreFailed(failure, words) from None
        with self.lock:
            self.breaker.succeeded()

    def masked(self, error: Exception) -> str:
        words = f"{self.place}: {str(error) or type(error).__name__}"
        return words.replace(self.secret, "***") if self.secret else words


class TimeOfCall(threading.local):
    """Until when the call of this thread may take, on the monotonic clock."""

    until = float("inf")

    @contextmanager
    def within(self, secs: float) -> Iterator[None]:
        self.until = time.monotonic() + secs
        try:
            yield
        finally:
            self.until = float("inf")

    @contextmanager
    def longer(self, secs: float) -> Iterator[None]:
        """What is done now does not count."""
        begun, until = time.monotonic(), self.until
        self.until = begun + secs
        try:
            yield
        finally:
            self.until = until + time.monotonic() - begun


class TimedTransport(httpx.HTTPTransport):
    """Each request has what is left of the call's time: qdrant-client knows whole seconds only."""

    def __init__(self, deadline: TimeOfCall) -> None:
        super().__init__(limits=httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS))
        self.deadline = deadline

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        left = self.deadline.until - time.monotonic()
        if left <= 0:
            raise httpx.ReadTimeout("the deadline is over", request=request)
        request.extensions = {
            **request.extensions,
            "timeout": dict.fromkeys(("connect", "read", "write", "pool"), left),
        }
        return super().handle_request(request)


def name_of(fingerprint: str, width: int) -> str:
    return f"{PREFIX}{fingerprint}-{width}"


def id_of(key: bytes) -> UUID:
    return UUID(bytes=key[:16])


def point_of(key: bytes, value: bytes) -> models.PointStruct | None:
    """None: Qdrant would not give it back bit for bit."""
    rest = len(value) - HEADER.size
    if rest <= 0 or rest % 4 or rest // 4 > WIDEST or len(key) != KEY_BYTES:
        return None
    numbers = np.frombuffer(value, np.dtype("<f4"), offset=HEADER.size)
    sizes = np.abs(numbers)
    if not np.all((sizes == 0) | ((sizes >= SMALLEST) & np.isfinite(sizes))):
        return None
    _, _, _, at_ms, chars, tokens = HEADER.unpack_from(value)
    head = base64.b64encode(value[: HEADER.size]).decode()
    payload: dict[str, Any] = {"key": key.hex(), "at_ms": at_ms, "chars": chars, "tokens": tokens, "head": head}
    return models.PointStruct(id=str(id_of(key)), vector=numbers.tolist(), payload=payload)


def value_of(key: bytes, record: models.Record) -> bytes:
    """Empty: it is not the entry of this key, bit for bit."""
    try:
        head = base64.b64decode((record.payload or {})["head"], validate=True)
        value = head + np.asarray(record.vector, np.dtype("<f4")).tobytes()
        unpacked(key, value)
    except (Damaged, KeyError, TypeError, ValueError):
        return b""
    return value


def is_absent(error: Exception) -> bool:
    return getattr(error, "status_code", None) == 404 or "not found" in str(error)


def failure_of(error: Exception) -> Failure:
    """What an error of Qdrant or of the way to it means."""
    words = str(error).lower()
    status = getattr(error, "status_code", 0) or 0
    if isinstance(error, httpx.TimeoutException) or status in (408, 429, 504):
        return Failure.SLOW
    if status == 507 or any(each in words for each in ("no space left", "disk space", "out of memory", "quota")):
        return Failure.FULL
    if "read-only" in words or "read only" in words:
        return Failure.READ_ONLY
    if isinstance(error, ValidationError) or 400 <= status < 500:
        return Failure.AWAY if status == 404 else Failure.REFUSED
    return Failure.REFUSED if isinstance(error, ValueError) else Failure.AWAY
