"""Ray Serve: its REST on the head (2.60), and the directory that runs on it. Ray itself is not needed here.

The standard library's client is enough for three requests. Most programs that import this never make one, and start
without `requests` (`tests/test_imports.py`).
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from appliance.core.addresses import Address
from appliance.core.cluster import REPLICAS_PATH, WAKE_PATH
from appliance.core.problems import Kind, Problem, invalid

PATH = "/api/serve/applications/"
SERVE_SECS = 10.0  # a deployment of 100 applications is accepted in 2 s
DIRECTORY_SECS = 5.0
TOLD = 500  # characters of a refusal


class ServeApi:
    """Serve's REST, which is a part of Ray's dashboard. token_file: with Ray's token; empty: it needs none."""

    def __init__(self, place: Address, token_file: str = "") -> None:
        self.place = place
        self.token_file = token_file

    def applications(self) -> Any:
        """What is deployed, and how it fares. Raises: Problem unavailable."""
        return parsed(self.ask("GET"), self.place)

    def deploy(self, configuration: Mapping[str, Any]) -> None:
        """All that is wanted; what is not in it ends. Raises: Problem unavailable, or invalid with Serve's words."""
        self.ask("PUT", json.dumps(configuration))

    def ask(self, method: str, body: str | None = None) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.token_file:
            headers["Authorization"] = f"Bearer {token(self.token_file)}"
        return answered(self.place, method, PATH, SERVE_SECS, body, headers)


class ServeDirectory:
    """The directory of a cluster, over Serve's own HTTP port."""

    def __init__(self, place: Address) -> None:
        self.place = place

    def replicas(self) -> Any:
        """As `core.cluster.directory_answer` reads it. Raises: Problem unavailable."""
        return parsed(answered(self.place, "GET", REPLICAS_PATH, DIRECTORY_SECS), self.place)

    def wake(self, instance: str, secs: float) -> bool:
        """Returns when the instance has a replica, or after a while; False where there is none of that name.

        Raises: Problem unavailable.
        """
        path = f"{WAKE_PATH}?{urlencode({'instance': instance})}"
        told = parsed(answered(self.place, "POST", path, secs), self.place)
        return isinstance(told, dict) and bool(told.get("begun"))


def answered(
    place: Address,
    method: str,
    path: str,
    secs: float,
    body: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """The body of a reply that is none of an error. secs: of connecting, and of each read. Raises: Problem."""
    connection = http.client.HTTPConnection(place.host, place.port, timeout=secs)
    try:
        connection.request(method, path, body, dict(headers or {}))
        response = connection.getresponse()
        told = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise unavailable(f"Nobody of the cluster answers on {place}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if response.status == HTTPStatus.OK:
        return told
    said = f"{response.status} {response.reason}: {told[:TOLD].decode(errors='replace').strip()}"
    if response.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise unavailable(f"Ray wants its token (ray_token_file), or another one: {said}")
    if response.status == HTTPStatus.BAD_REQUEST:
        raise invalid(f"Ray Serve refuses the configuration: {said}", "CLUSTER_REFUSES")
    raise unavailable(f"Ray Serve on {place} answers {said}")


def parsed(body: bytes, place: Address) -> Any:
    """Raises: Problem unavailable for what is no JSON."""
    try:
        return json.loads(body)
    except ValueError as error:
        raise unavailable(f"What answers on {place} is not the cluster: {error}") from error


def unavailable(words: str) -> Problem:
    return Problem(Kind.UNAVAILABLE, "CLUSTER_UNAVAILABLE", words)


def token(file: str) -> str:
    """Raises: Problem."""
    try:
        return Path(file).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise invalid(f"ray_token_file {file}: {error}") from error
