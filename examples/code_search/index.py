"""The chunks and their vectors in Qdrant: in a folder by the client's local mode, or in a server by its URL."""

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePosixPath
from threading import RLock
from typing import NamedTuple

import numpy as np
from qdrant_client import QdrantClient, models
from qdrant_client.http.exceptions import ApiException

from examples.code_search.cutting import Chunk
from examples.code_search.problems import Problem

PAGE = 4096  # points a request
warnings.filterwarnings("ignore", "Local mode is not recommended", UserWarning)  # the page says it


class Entry(NamedTuple):
    """A chunk in its file."""

    path: str
    language: str
    chunk: Chunk

    @property
    def key(self) -> str:
        return self.chunk.key(self.path)

    @property
    def text(self) -> str:
        """What is embedded: the path is part of what a chunk is about."""
        return f"{self.path}\n{self.chunk.text}"


class Hit(NamedTuple):
    entry: Entry
    score: float


class Index:
    """place: a folder, or the URL of a Qdrant. One collection for each source and model."""

    def __init__(self, place: str) -> None:
        # The page asks from several threads, and the local mode is made for one.
        self._lock = RLock()
        try:
            if "://" in place:
                self._client = QdrantClient(url=place, timeout=60)
                self._client.get_collections()
            else:
                Path(place).mkdir(parents=True, exist_ok=True)
                self._client = QdrantClient(path=place, force_disable_check_same_thread=True)
        except RuntimeError:
            raise Problem(f"Another process has the index in {place}: end it, or give another folder.") from None
        except (ApiException, OSError) as error:
            raise Problem(f"The index {place} cannot be opened: {error}") from None

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except ApiException as error:
            raise Problem(f"Qdrant did not answer as it should: {error}") from None

    @staticmethod
    def collection(source: str, model: str) -> str:
        return "code-" + hashlib.sha256(f"{source}\0{model}".encode()).hexdigest()[:24]

    def keys(self, collection: str) -> set[str]:
        """Of all chunks that are there."""
        found: set[str] = set()
        with self._asked():
            if not self._client.collection_exists(collection):
                return found
            offset = None
            while True:
                points, offset = self._client.scroll(
                    collection, limit=PAGE, offset=offset, with_payload=False, with_vectors=False
                )
                found.update(str(point.id) for point in points)
                if offset is None:
                    return found

    def write(self, collection: str, entries: Sequence[Entry], vectors: np.ndarray) -> None:
        """All of them or, where a process ends within, some: each is whole."""
        width = int(vectors.shape[1])
        with self._asked():
            if not self._client.collection_exists(collection):
                size = models.VectorParams(size=width, distance=models.Distance.COSINE)
                self._client.create_collection(collection, vectors_config=size)
                if self._is_server:
                    for field in ("under", "language"):
                        self._client.create_payload_index(collection, field, models.PayloadSchemaType.KEYWORD)
            elif (there := self._width(collection)) != width:
                raise Problem(
                    f"The index has vectors of {there} numbers, and the model gives {width}: it is another model now. "
                    "Rebuild the index."
                )
            self._client.upsert(
                collection,
                models.Batch(
                    ids=[entry.key for entry in entries],
                    vectors=vectors.tolist(),
                    payloads=[_payload(entry) for entry in entries],
                ),
                wait=True,
            )

    def fits(self, collection: str, width: int) -> bool:
        with self._asked():
            return not self._client.collection_exists(collection) or self._width(collection) == width

    def drop(self, collection: str) -> None:
        with self._asked():
            self._client.delete_collection(collection)

    def delete(self, collection: str, keys: Iterable[str]) -> None:
        left = iter(sorted(keys))
        while some := list(islice(left, PAGE)):
            with self._asked():
                self._client.delete(collection, models.PointIdsList(points=list(some)), wait=True)

    def languages(self, collection: str) -> list[str]:
        """Those of the chunks, the most frequent first."""
        counts: dict[str, int] = {}
        with self._asked():
            if not self._client.collection_exists(collection):
                return []
            offset = None
            while True:
                points, offset = self._client.scroll(
                    collection, limit=PAGE, offset=offset, with_payload=["language"], with_vectors=False
                )
                for point in points:
                    language = str((point.payload or {})["language"])
                    counts[language] = counts.get(language, 0) + 1
                if offset is None:
                    return sorted(counts, key=lambda name: (-counts[name], name))

    def search(self, collection: str, vector: np.ndarray, limit: int, path: str = "", language: str = "") -> list[Hit]:
        """The most similar first. path: a file, or a folder with all that is below it."""
        wanted = {"under": path.strip().strip("/"), "language": language}
        conditions: list[models.Condition] = [
            models.FieldCondition(key=key, match=models.MatchValue(value=value))
            for key, value in wanted.items()
            if value
        ]
        with self._asked():
            if not self._client.collection_exists(collection):
                raise Problem("Nothing of this source is indexed for this model so far: index it first.")
            if self._width(collection) != len(vector):
                raise Problem("The model gives vectors of another width than the index has. Rebuild the index.")
            found = self._client.query_points(
                collection,
                query=vector.tolist(),
                query_filter=models.Filter(must=conditions),
                limit=limit,
                with_payload=True,
            )
        return [Hit(_entry(point.payload or {}), point.score) for point in found.points]

    @property
    def _is_server(self) -> bool:
        return self._client.init_options.get("url") is not None

    def _width(self, collection: str) -> int:
        size = self._client.get_collection(collection).config.params.vectors
        assert isinstance(size, models.VectorParams)  # as written above
        return int(size.size)


def _payload(entry: Entry) -> dict[str, object]:
    path = PurePosixPath(entry.path)
    under = [entry.path, *(parent.as_posix() for parent in path.parents if parent.name)]
    return {"path": entry.path, "under": under, "language": entry.language, **entry.chunk._asdict()}


def _entry(payload: dict[str, object]) -> Entry:
    chunk = Chunk(*(payload[name] for name in Chunk._fields))  # type: ignore[arg-type]  # as written above
    return Entry(str(payload["path"]), str(payload["language"]), chunk)
