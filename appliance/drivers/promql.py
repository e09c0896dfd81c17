"""Asking a Prometheus for values over time (its HTTP API, `/api/v1/query_range`)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from appliance.core.problems import Kind, Problem

TOGETHER_SECS = 4.0  # for all queries of a picture
RESTS_SECS = 30.0  # so long one that has failed is not asked again: pages ask every ten seconds
resting: dict[str, tuple[float, Problem]] = {}  # by URL: until when, of time.monotonic, and why


class Prometheus:
    """The one at ``url``, which may hold a user and a password."""

    def __init__(self, url: str) -> None:
        import requests  # only now: it takes 8 MB, and few boxes have a Prometheus that we ask

        self.url = url.rstrip("/")
        self.session = requests.Session()
        self.session.trust_env = False
        self.errors = requests.RequestException

    def all_values(self, queries: Mapping[str, str], since: float, until: float, step: int) -> dict[str, list[float]]:
        """Of each query, as `values`, all together within TOGETHER_SECS. Raises: Problem."""
        rests_until, why = resting.get(self.url, (0.0, None))
        if why and time.monotonic() < rests_until:
            raise why
        deadline = time.monotonic() + TOGETHER_SECS
        try:
            return {name: self.values(query, since, until, step, deadline) for name, query in queries.items()}
        except Problem as problem:
            resting[self.url] = (time.monotonic() + RESTS_SECS, problem)
            raise

    @property
    def name(self) -> str:
        """Without what is secret in the URL."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def values(self, query: str, since: float, until: float, step: int, deadline: float) -> list[float]:
        """A value for each ``step`` seconds after ``since``, up to ``until`` (seconds since 1970); NaN where there is
        none. query: one with a single series. deadline: of time.monotonic. Raises: Problem."""
        asked: dict[str, str | float] = {"query": query, "start": since + step, "end": until, "step": step}
        left = max(0.01, deadline - time.monotonic())
        try:
            told = self.session.get(f"{self.url}/api/v1/query_range", params=asked, timeout=left).json()
            if told.get("status") != "success":
                raise self.unavailable(f"refused {query!r}: {str(told.get('error'))[:200]}")
            found = [math.nan] * round((until - since) / step)
            for at, value in series_in(told):
                place = round((at - since) / step) - 1
                if 0 <= place < len(found):
                    found[place] = float(value)
        except self.errors as error:
            raise self.unavailable(f"does not answer: {type(error).__name__}") from error
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise self.unavailable("does not answer as a Prometheus does") from error
        return found

    def unavailable(self, what: str) -> Problem:
        return Problem(Kind.UNAVAILABLE, "PROMETHEUS", f"Prometheus at {self.name} {what}")


def series_in(told: dict[str, Any]) -> list[tuple[float, str]]:
    """The (time, value) pairs of the only series; empty without one."""
    result = told["data"]["result"]
    return [(float(at), value) for at, value in result[0]["values"]] if result else []
