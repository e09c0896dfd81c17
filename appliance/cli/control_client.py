"""A client of control's public REST interface."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import quote

import requests
from requests.adapters import HTTPAdapter

from appliance.cli.connection import Identity, reachable_host
from appliance.core.addresses import address
from appliance.core.problems import Kind, Problem
from appliance.core.settings import Settings
from appliance.drivers.unixhttp import UnixSocketAdapter
from appliance.files.sockets import answers

TIMEOUT_SECS = 120
RESTART_SECS, POLL_SECS = 10.0, 0.2  # control that ended is back after two or three
PART_BYTES = 1024 * 1024


class ModelArchive(NamedTuple):
    """A model's archive on its way. Reading its parts raises Problem when not all of it comes."""

    size: int
    parts: Iterator[bytes]


class ControlClient:
    """The REST API at ``url``, or through control's socket. A refusal becomes a Problem with the server's own words."""

    def __init__(self, url: str, identity: Identity) -> None:
        self.url = self.endpoint = url
        self.has_answered = False
        self.session = requests.Session()
        self.session.trust_env = False  # a proxy of the environment has no business with a loopback port
        if identity.key:
            self.session.headers["Authorization"] = f"Bearer {identity.key}"
        if identity.ca:
            self.session.mount("https://", TlsAdapter(identity.ssl_context()))
            self.session.verify = identity.ca  # else requests adds the public authorities to our context

    @classmethod
    def from_settings(cls, settings: Settings) -> ControlClient:
        return cls.on_port(settings, settings.api_port, Identity.from_environment(settings))

    @classmethod
    def on_port(cls, settings: Settings, port: int, identity: Identity) -> ControlClient:
        scheme = "https" if settings.tls.on else "http"
        return cls(f"{scheme}://{address(reachable_host(settings.bind), port)}", identity)

    @classmethod
    def nearest(cls, settings: Settings) -> ControlClient:
        """Through the socket in the data folder where this user may open it, which needs no key; else on the port."""
        path = Path(settings.layout.control_socket)
        try:
            return cls.through_socket(path) if answers(path) else cls.from_settings(settings)
        except PermissionError:
            return cls.from_settings(settings)

    @classmethod
    def through_socket(cls, path: Path) -> ControlClient:
        client = cls("http://localhost", Identity())
        client.session.mount("http://", UnixSocketAdapter(path))
        client.endpoint = str(path)
        return client

    def call(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """The answer's JSON."""
        return self.send(method, path, json=body, params=query).json()

    def send(self, method: str, path: str, **options: Any) -> requests.Response:
        """options: of `requests`. Raises: Problem.

        A command that looks again and again goes on when control was away for a moment.
        """
        until = time.monotonic() + (RESTART_SECS if method == "GET" and self.has_answered else 0)
        while True:
            try:
                response = self.session.request(method, self.url + path, timeout=TIMEOUT_SECS, **options)
                break
            except requests.RequestException as error:
                if time.monotonic() >= until or not isinstance(error, requests.ConnectionError):
                    why = f"No answer from {self.endpoint}: is the appliance up? ({cause_of(error)})"
                    raise Problem(Kind.UNAVAILABLE, "UNREACHABLE", why) from error
            time.sleep(POLL_SECS)
        self.has_answered = True
        if response.ok:
            return response
        try:
            answer = response.json()
            raise Problem(Kind.INVALID, answer["code"], answer["error"])
        except (ValueError, KeyError):
            raise Problem(
                Kind.INTERNAL, "UNEXPECTED", f"{self.endpoint} answered {response.status_code}: {response.text[:200]}"
            ) from None

    def instances(self) -> list[dict[str, Any]]:
        instances: list[dict[str, Any]] = self.call("GET", "/instances")
        return instances

    def instance(self, name: str, verb: str = "", method: str = "GET", **query: str) -> dict[str, Any]:
        path = f"/instances/{quote(name, safe='')}{verb and '/' + verb}"
        instance: dict[str, Any] = self.call(method, path, **query)
        return instance

    def create(self, fields: dict[str, Any], dry_run: bool = False) -> dict[str, Any]:
        query = {"dry_run": "true"} if dry_run else {}
        instance: dict[str, Any] = self.call("POST", "/instances", fields, **query)
        return instance

    def change(self, name: str, fields: dict[str, Any], **query: str) -> dict[str, Any]:
        instance: dict[str, Any] = self.call("PATCH", f"/instances/{quote(name, safe='')}", fields, **query)
        return instance

    def models(self) -> list[dict[str, Any]]:
        models: list[dict[str, Any]] = self.call("GET", "/models")
        return models

    def model(
        self, model_id: str, verb: str = "", method: str = "GET", body: Any = None, **query: str
    ) -> dict[str, Any]:
        path = f"/models/{quote(model_id, safe='')}{verb and '/' + verb}"
        model: dict[str, Any] = self.call(method, path, body, **query)
        return model

    def add_model(self, model_id: str, revision: str | None) -> dict[str, Any]:
        fields = {"model_id": model_id} | ({"revision": revision} if revision else {})
        model: dict[str, Any] = self.call("POST", "/models", fields)
        return model

    @contextmanager
    def export_model(self, model_id: str) -> Iterator[ModelArchive]:
        """Raises: Problem."""
        with self.send("GET", f"/models/{quote(model_id, safe='')}/archive", stream=True) as answer:
            yield ModelArchive(int(answer.headers["Content-Length"]), parts_of(answer))

    def import_model(self, archive: IO[bytes], as_id: str | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/octet-stream"}
        query = {"as": as_id} if as_id else {}
        model: dict[str, Any] = self.send("POST", "/archives", data=archive, params=query, headers=headers).json()
        return model

    def log_window(self, name: str, replica: int, start: int) -> dict[str, Any]:
        path = f"/instances/{quote(name, safe='')}/logs"
        window: dict[str, Any] = self.call("GET", path, replica=replica, start=start)
        return window

    def events(self, since: int) -> list[dict[str, Any]]:
        """Those with a higher ``seq``, oldest first."""
        events: list[dict[str, Any]] = self.call("GET", "/events", since=since)
        return events

    def metrics(self) -> str:
        """Prometheus text."""
        return self.send("GET", "/metrics").text

    def gpus(self) -> list[dict[str, Any]]:
        gpus: list[dict[str, Any]] = self.call("GET", "/gpus")
        return gpus


def cause_of(error: BaseException) -> str:
    """What the system said, without what three libraries have wrapped around it."""
    while within := error.__cause__ or error.__context__:
        error = within
    return str(error) or type(error).__name__


def parts_of(answer: requests.Response) -> Iterator[bytes]:
    try:
        yield from answer.iter_content(PART_BYTES)
    except requests.RequestException as error:
        words = (
            "The archive broke off: a file has changed since it was verified, or the appliance ended. Verify the model"
        )
        raise Problem(Kind.INTERNAL, "EXPORT_FAILED", words) from error


class TlsAdapter(HTTPAdapter):
    def __init__(self, context: ssl.SSLContext) -> None:
        self.context = context
        super().__init__()

    def init_poolmanager(self, *positional: Any, **named: Any) -> None:
        by_name = None if self.context.check_hostname else False  # None: the host of the request
        super().init_poolmanager(*positional, ssl_context=self.context, assert_hostname=by_name, **named)
