"""The appliance's gateway, as its users ask it: OpenAI's embeddings and Cohere's ranks over HTTP."""

import base64
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import requests

from examples.code_search.problems import Busy, Problem

TIMEOUT = (5, 300)  # seconds to connect, and for an answer
LONGEST_WAIT = 60.0  # of one Retry-After; a longer one is no answer to somebody who waits at a page
CACHE_HEADER = "x-tei-cache"


class Reply(NamedTuple):
    """vectors: one for each text, float32. cache: what the header said, None where there was none."""

    vectors: np.ndarray
    cache: str | None
    seconds: float


class Gateway:
    """model, reranker: names of instances. key: an API key, where the appliance asks for one."""

    def __init__(self, url: str, model: str, reranker: str = "", key: str = "") -> None:
        self.url, self.model, self.reranker = url.rstrip("/"), model, reranker
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy for the web knows no gateway of this machine

    def embed(self, texts: Sequence[str]) -> Reply:
        body = {"model": self.model, "input": list(texts), "encoding_format": "base64"}
        begun = time.monotonic()
        found, headers = self._post("/v1/embeddings", body)
        seconds = time.monotonic() - begun
        try:
            rows = {row["index"]: np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in found["data"]}
            vectors = np.array([rows[at] for at in range(len(texts))])
        except (KeyError, TypeError, ValueError) as error:
            raise Problem(f"{self.url} answers, but not as OpenAI's embeddings do ({error!r}).") from error
        if len(rows) != len(texts) or vectors.ndim != 2 or not np.isfinite(vectors).all():
            raise Problem(f"{self.url} gave {len(rows)} vectors for {len(texts)} texts, or some that are none.")
        return Reply(vectors, headers.get(CACHE_HEADER), seconds)

    def rerank(self, query: str, texts: Sequence[str]) -> list[float]:
        """A score for each text, the higher the better."""
        body = {"model": self.reranker, "query": query, "documents": list(texts)}
        found, _ = self._post("/v1/rerank", body)
        try:
            scores = {row["index"]: float(row["relevance_score"]) for row in found["results"]}
            return [scores[at] for at in range(len(texts))]
        except (KeyError, TypeError, ValueError) as error:
            raise Problem(f"{self.url} answers, but not as Cohere's rerank does ({error!r}).") from error

    def _post(self, path: str, body: object) -> tuple[Any, Mapping[str, str]]:
        try:
            reply = self._session.post(
                self.url + path, json=body, headers=self._headers, timeout=TIMEOUT, allow_redirects=False
            )
        except requests.Timeout:
            raise Problem(f"The gateway {self.url} did not answer in time: is the appliance overloaded?") from None
        except requests.RequestException:
            raise Problem(f"No gateway answers at {self.url}: start the appliance, or give its --gateway.") from None
        said = _message(reply)
        if reply.status_code in (429, 503) and (wait := _seconds(reply.headers.get("Retry-After"))) is not None:
            raise Busy(wait, f"The gateway is busy: {said}")
        if reply.status_code == 404:
            raise Problem(f"The appliance has no such model: {said} Give one by --model or --reranker.")
        if reply.status_code in (401, 403):
            raise Problem(f"The gateway wants another key: {said} Put one into TEI_APPLIANCE_KEY.")
        if reply.status_code != 200:
            raise Problem(f"The gateway refused ({reply.status_code}): {said}")
        try:
            return reply.json(), reply.headers
        except ValueError:
            raise Problem(f"What answers at {self.url} is no gateway: {reply.text[:100]!r}") from None


def _message(reply: requests.Response) -> str:
    """The reason that an error gives, in any of the gateway's dialects."""
    if reply.ok:
        return ""
    try:
        found = reply.json()
        inner = found["error"]["message"] if isinstance(found.get("error"), dict) else found.get("message")
        return str(inner or found)[:500]
    except (ValueError, KeyError, AttributeError):
        return reply.text[:200] or reply.reason


def _seconds(retry_after: str | None) -> float | None:
    """None where the header says nothing that can be waited for."""
    try:
        wait = float(retry_after or "")
    except ValueError:
        return None
    return wait if 0 <= wait <= LONGEST_WAIT else None
