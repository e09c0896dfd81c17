"""Asking a Prometheus for values over time (its HTTP API, `/api/v1/query_range`)."""

from __future__ import annotations

import math
from typing import Any
from urllib.parse import urlsplit

from appliance.core.problems import Kind, Problem

TIMEOUT_SECS = 3.0


class Prometheus:
    """The one at ``url``, which may hold a user and a password."""

    def __init__(self, url: str) -> None:
        import requests  # only now: it takes 8 MB, and few boxes have a Prometheus that we ask

        self.url = url.rstrip("/")
        self.session = requests.Session()
        self.session.trust_env = False
        self.errors = requests.RequestException

    @property
    def name(self) -> str:
        """Without what is secret in the URL."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def values(self, query: str, since: float, until: float, step: int) -> list[float]:
        """A value for each ``step`` seconds after ``since``, up to ``until`` (seconds since 1970); NaN where there is
        none. query: one with a single series. Raises: Problem."""
        asked: dict[str, str | float] = {"query": query, "start": since + step, "end": until, "step": step}
        try:
            answer = self.session.get(f"{self.url}/api/v1/query_range", params=asked, timeout=TIMEOUT_SECS)
            told = answer.json()
        except self.errors as error:
            raise self.unavailable(f"does not answer: {type(error).__name__}") from error
        if told.get("status") != "success":
            raise self.unavailable(f"refused {query!r}: {str(told.get('error'))[:200]}")
        found = [math.nan] * round((until - since) / step)
        for at, value in series_in(told):
            place = round((at - since) / step) - 1
            if 0 <= place < len(found):
                found[place] = float(value)
        return found

    def unavailable(self, what: str) -> Problem:
        return Problem(Kind.UNAVAILABLE, "PROMETHEUS", f"Prometheus at {self.name} {what}")


def series_in(told: dict[str, Any]) -> list[tuple[float, str]]:
    """The (time, value) pairs of the only series; empty without one."""
    result = told["data"]["result"]
    return [(float(at), value) for at, value in result[0]["values"]] if result else []
