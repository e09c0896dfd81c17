"""The resources of health, instances, GPUs and events: each reads a request, calls a verb, and writes what it returns.

Which route each serves stands in `routes`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import falcon

from appliance import __version__
from appliance.control.errors import known_parameters
from appliance.core.generations import STRATEGIES
from appliance.core.problems import Problem, invalid, quoted
from appliance.core.views import InstanceView
from appliance.drivers.controlsocket import WAITING_SINCE
from appliance.drivers.logs import LogWindow
from appliance.node import cache_overview, doctor, gpus, overview, series
from appliance.node.authentication import Authenticator
from appliance.node.context import Node, now
from appliance.node.doctor import Finding
from appliance.operations import instances, replacement, restarts, sleep

BODY_LIMIT = 2 * 1024 * 1024
SERIES_MINUTES = 60
EXAMINED_SECS = 3.0
LINES_AT_ONCE = 1000


def reply(response: falcon.Response, value: Any, status: int = 200) -> None:
    response.status = status
    response.content_type = falcon.MEDIA_JSON
    response.text = json.dumps(value)


def json_body(request: falcon.Request) -> Any:
    """The parsed body. Raises: falcon's 400, 413 and 415, to which `errors` gives our shape."""
    if (request.content_type or "").partition(";")[0].strip().lower() != falcon.MEDIA_JSON:
        raise falcon.HTTPUnsupportedMediaType
    if (request.content_length or 0) > BODY_LIMIT:
        raise too_large()
    raw = part_of(request, BODY_LIMIT + 1)
    if len(raw) > BODY_LIMIT:
        raise too_large()
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=refuse_constant)
    except UnicodeDecodeError:
        raise bad_request("The body is not UTF-8") from None
    except RecursionError:
        raise bad_request("The body is nested too deeply") from None
    except ValueError as error:
        raise bad_request(f"The body is not JSON: {str(error)[:200]}") from None


def part_of(request: falcon.Request, size: int) -> bytes:
    """The next bytes of the body. Raises: falcon's 400."""
    try:
        return request.stream.read(size)  # not bounded_stream: that takes a chunked body for an empty one
    except Exception as error:  # the WSGI server's own, which have no common base
        # What follows on this connection cannot be told from the body.
        raise falcon.HTTPBadRequest(
            description=f"The body cannot be read: {type(error).__name__}", headers={"Connection": "close"}
        ) from None


def too_large() -> falcon.HTTPError:
    return falcon.HTTPContentTooLarge(description=f"The body is over {BODY_LIMIT // 1024 // 1024} MiB")


def bad_request(message: str) -> falcon.HTTPError:
    return falcon.HTTPBadRequest(description=message)


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def whole(request: falcon.Request, name: str, default: int | None) -> int | None:
    """A query parameter that is a whole number, negative ones included."""
    value = request.get_param(name)
    if value is None:
        return default
    digits = value.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
        raise invalid(f"Query parameter {name} must be a whole number, not {quoted(value)}")
    return int(value)


def boolean(request: falcon.Request, name: str, default: bool = False) -> bool:
    value = request.get_param(name, default=str(default).lower())
    if value not in ("true", "false"):
        raise invalid(f"Query parameter {name} must be true or false, not {quoted(value)}")
    return value == "true"


def strategy_of(request: falcon.Request) -> str | None:
    value: str | None = request.get_param("strategy")
    if value not in (None, *STRATEGIES):
        raise invalid(f"Query parameter strategy must be one of {', '.join(STRATEGIES)}, not {quoted(value)}")
    return value


class NodeResource:
    """What all resources keep: the node that they show or change, and who may change it."""

    def __init__(self, node: Node, authenticator: Authenticator) -> None:
        self.node = node
        self.authenticator = authenticator


class HealthResource(NodeResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        health = overview.health(self.node)
        if request.context.stranger:
            reply(response, {"status": health.status, "timestamp": now()})
            return
        answer = {
            "status": health.status,
            "version": __version__,
            "instances": {"running": health.running, "total": health.total},
            "timestamp": now(),
        }
        reply(response, answer | ({"reason": health.reason} if health.reason else {}))


class ReadyResource(NodeResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        try:
            self.require()
        except Problem as problem:
            if request.context.stranger:
                raise Problem(problem.kind, "NOT_READY", "Not ready; who shows a key is told why") from None
            raise
        reply(response, {"status": "ready", "timestamp": now()})

    def require(self) -> None:
        self.node.supervisor.require()
        try:
            self.node.state.read()
        except Problem as problem:
            if problem.code != "STATE_UNREADABLE":  # a restart, to which a refusal leads, would end what runs
                raise


class InstancesResource(NodeResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        reply(response, [instance.mapping() for instance in overview.show_all(self.node)])

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        known_parameters(request, "dry_run")
        if boolean(request, "dry_run"):
            reply(response, instances.create(self.node, json_body(request), dry_run=True).mapping())
            return
        created = instances.create(self.node, json_body(request))
        response.location = f"/instances/{created.name}"
        reply(response, created.mapping(), 201)


class InstanceResource(NodeResource):
    def on_get(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        known = cache_overview.known_of(self.node, self.node.state.read().get(name))
        told = {"fingerprint": known.digest, "why_no_fingerprint": known.why or None}
        reply(response, {**overview.show(self.node, name).mapping(), **told})

    def on_patch(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        self.set_fields(request, response, name, whole=False)

    def on_put(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        self.set_fields(request, response, name, whole=True)

    def set_fields(self, request: falcon.Request, response: falcon.Response, name: str, whole: bool) -> None:
        known_parameters(request, "dry_run", "allow_incompatible", "strategy")
        flags = {flag: boolean(request, flag) for flag in ("dry_run", "allow_incompatible")}
        body, strategy = json_body(request), strategy_of(request)
        view = replacement.set_fields(self.node, name, body, whole, **flags, strategy=strategy)
        reply(response, view.mapping())

    def on_delete(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        known_parameters(request)
        reply(response, instances.delete(self.node, name).mapping())


class LifecycleResource(NodeResource):
    """POST of a verb that takes nothing but the instance's name."""

    def __init__(self, verb: Callable[[Node, str], InstanceView], node: Node, authenticator: Authenticator) -> None:
        super().__init__(node, authenticator)
        self.verb = verb

    def on_post(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        known_parameters(request)
        reply(response, self.verb(self.node, name).mapping())


class WakeResource(NodeResource):
    """A multiplexer, which comes through the socket of this machine, tells since when a call waits."""

    def on_post(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        known_parameters(request)
        told = "" if request.remote_addr else request.get_header(WAITING_SINCE, default="")
        reply(response, sleep.wake(self.node, name, float(told) if told else None).mapping())


class RestartResource(NodeResource):
    def on_post(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        known_parameters(request, "rolling")
        rolling = boolean(request, "rolling") if request.has_param("rolling") else None
        reply(response, restarts.restart(self.node, name, rolling).mapping())


class UndoResource(NodeResource):
    def on_post(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        known_parameters(request, "strategy")
        reply(response, replacement.undo(self.node, name, strategy_of(request)).mapping())


class LogsResource(NodeResource):
    def on_get(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        known_parameters(request, "start", "end", "replica")
        start, end = whole(request, "start", None), whole(request, "end", None)
        replica = whole(request, "replica", 0) or 0
        response.content_type = falcon.MEDIA_JSON
        response.stream = log_document(overview.log_window(self.node, name, replica, start, end))


def log_document(window: LogWindow) -> Iterator[bytes]:
    """A log as JSON, some lines at a time: a replica's may have hundreds of MB."""
    yield b'{"lines": ['
    separator = ""
    while lines := list(islice(window.lines, LINES_AT_ONCE)):
        yield f"{separator}{json.dumps(lines)[1:-1]}".encode()
        separator = ", "
    bounds = {"start": window.start, "end": window.end, "total_lines": window.total}
    yield f"], {json.dumps(bounds)[1:]}".encode()


class SeriesResource(NodeResource):
    def on_get(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        known_parameters(request, "minutes")
        minutes = whole(request, "minutes", SERIES_MINUTES) or 0
        reply(response, series.show(self.node, name, minutes).mapping())


class GpusResource(NodeResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        reply(response, [gpu.mapping() for gpu in gpus.show(self.node)])


class Examined:
    """What the doctor found, one examination at a time: it looks at every process, and asks other machines."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.at = float("-inf")  # of time.monotonic
        self.of = ""  # the id of the node
        self.findings: list[Finding] = []

    def recent(self, node: Node) -> list[Finding]:
        with self.lock:
            if self.of != node.id or time.monotonic() - self.at >= EXAMINED_SECS:
                self.findings, self.of, self.at = doctor.examine(node), node.id, time.monotonic()
            return self.findings


EXAMINED = Examined()


class DoctorResource(NodeResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        known_parameters(request)
        reply(response, [finding.mapping() for finding in EXAMINED.recent(self.node)])


class EventsResource(NodeResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        known_parameters(request, "since")
        reply(response, self.node.journal.since(whole(request, "since", 0) or 0))
