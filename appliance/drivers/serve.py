"""Ray Serve: its REST on the head (2.60), and the directory that runs on it. Ray itself is not needed here.

Neither goes through a proxy of the environment: both are in the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests

from appliance.core.addresses import Address, address
from appliance.core.cluster import REPLICAS_PATH, WAKE_PATH
from appliance.core.problems import Kind, Problem, invalid

PATH = "/api/serve/applications/"
CONNECT_SECS = 2.0
ANSWER_SECS = 10.0  # of Serve: a deployment of 100 applications is accepted in 2 s
DIRECTORY_SECS = 5.0
TOLD = 500  # characters of a refusal


class ServeApi:
    """Serve's REST, which is a part of Ray's dashboard. token_file: with Ray's token; empty: it needs none."""

    def __init__(self, host: str, port: int, token_file: str = "") -> None:
        self.place = address(host, port)
        self.token_file = token_file
        self.session = session()

    def applications(self) -> Any:
        """What is deployed, and how it fares. Raises: Problem unavailable."""
        return answered(self.ask("GET")).json()

    def deploy(self, configuration: Mapping[str, Any]) -> None:
        """All that is wanted; what is not in it ends. Raises: Problem unavailable, or invalid with Serve's words."""
        answered(self.ask("PUT", configuration))

    def ask(self, method: str, body: Any = None) -> requests.Response:
        headers = {"Authorization": f"Bearer {token(self.token_file)}"} if self.token_file else {}
        try:
            return self.session.request(
                method, f"http://{self.place}{PATH}", json=body, headers=headers, timeout=(CONNECT_SECS, ANSWER_SECS)
            )
        except requests.RequestException as error:
            raise away(f"Ray Serve does not answer on {self.place}", error) from error


class ServeDirectory:
    """The directory of a cluster, over Serve's own HTTP port."""

    def __init__(self, place: Address) -> None:
        self.place = str(place)
        self.session = session()

    def replicas(self) -> Any:
        """As `core.cluster.directory_answer` reads it. Raises: Problem unavailable."""
        return self.ask("GET", REPLICAS_PATH, DIRECTORY_SECS)

    def wake(self, instance: str, secs: float) -> bool:
        """Returns when the instance has a replica; False where there is none of that name. Raises: Problem unavailable
        while it has none."""
        return bool(self.ask("POST", WAKE_PATH, secs, instance=instance)["begun"])

    def ask(self, method: str, path: str, secs: float, **parameters: str) -> Any:
        url = f"http://{self.place}{path}"
        try:
            response = self.session.request(method, url, params=parameters, timeout=(CONNECT_SECS, secs))
            return answered(response).json()
        except requests.RequestException as error:  # a body that is no JSON is one, too
            raise away(f"The directory of the cluster does not answer on {self.place}", error) from error


def session() -> requests.Session:
    made = requests.Session()
    made.trust_env = False
    return made


def answered(response: requests.Response) -> requests.Response:
    """Raises: Problem with what was said."""
    if response.ok:
        return response
    said = f"{response.status_code} {response.reason}: {response.text[:TOLD].strip()}"
    if response.status_code in (401, 403):
        raise Problem(
            Kind.UNAVAILABLE, "CLUSTER_UNAVAILABLE", f"Ray wants its token (ray_token_file), or another one: {said}"
        )
    if response.status_code == 400:
        raise invalid(f"Ray Serve refuses the configuration: {said}", "CLUSTER_REFUSES")
    raise Problem(Kind.UNAVAILABLE, "CLUSTER_UNAVAILABLE", f"Ray Serve answers {said}")


def away(words: str, error: Exception) -> Problem:
    return Problem(Kind.UNAVAILABLE, "CLUSTER_UNAVAILABLE", f"{words}: {type(error).__name__}: {error}")


def token(file: str) -> str:
    """Raises: Problem."""
    try:
        return Path(file).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise invalid(f"ray_token_file {file}: {error}") from error
