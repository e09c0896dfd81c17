"""The routes of models. An id is one path segment: its slash is written %2F, and it is decoded exactly once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import IO, Any, cast
from urllib.parse import quote, unquote

import falcon

from appliance.control.errors import known_parameters
from appliance.control.resources import NodeResource, boolean, json_body, part_of, reply
from appliance.core.models import Job
from appliance.core.problems import Kind, Problem, invalid, quoted
from appliance.node import model_overview
from appliance.operations import model_archives, models

WAITERS = 8  # threads of a worker that may wait for jobs; further callers get 202 at once
BINARY = "application/octet-stream"
LONGEST_WAIT_SECS = 3600.0

App = Callable[[dict[str, Any], Any], Iterable[bytes]]


def undecoded(app: App) -> App:
    """WSGI decodes a path before it is routed; below /models the router gets it as it was sent."""

    def serve(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ.get("RAW_URI", "").partition("?")[0]
        if path.startswith("/models/"):
            environ["PATH_INFO"] = path
        return app(environ, start_response)

    return serve


def decoded(segment: str) -> str:
    try:
        return unquote(segment, errors="strict")
    except UnicodeDecodeError:
        raise invalid(f"The model id {quoted(segment)} is not UTF-8 when decoded") from None


class ModelsResource(NodeResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        reply(response, [model.mapping() for model in model_overview.show_all(self.node)])

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        known_parameters(request)
        model, new = models.add(self.node, json_body(request))
        response.location = location(model.model_id)
        reply(response, model.mapping(), 201 if new else 200)


class ModelResource(NodeResource):
    def on_get(self, request: falcon.Request, response: falcon.Response, model_id: str) -> None:
        reply(response, model_overview.show(self.node, decoded(model_id)).mapping())

    def on_delete(self, request: falcon.Request, response: falcon.Response, model_id: str) -> None:
        known_parameters(request, "keep_files")
        keep_files = boolean(request, "keep_files")
        reply(response, models.remove(self.node, decoded(model_id), keep_files).mapping())


class CancelResource(NodeResource):
    def on_post(self, request: falcon.Request, response: falcon.Response, model_id: str) -> None:
        reply(response, models.cancel(self.node, decoded(model_id)).mapping())


class JobResource(NodeResource):
    """A route that begins a job and, unless ``wait=false``, waits for its end."""

    waiting = threading.BoundedSemaphore(WAITERS)

    def begin(self, request: falcon.Request, model_id: str) -> Job | None:
        raise NotImplementedError

    def on_post(self, request: falcon.Request, response: falcon.Response, model_id: str) -> None:
        known_parameters(request, "wait")
        model_id = decoded(model_id)
        patient = boolean(request, "wait", default=True)
        job = self.begin(request, model_id)
        ended = job is None or (patient and self.waited(model_id, job))
        model = model_overview.show(self.node, model_id)
        if ended and job and job.kind == "download" and model.download_error:
            raise Problem(Kind.INTERNAL, "MODEL_DOWNLOAD_FAILED", model.download_error)
        if not ended:
            response.location = location(model_id)
        reply(response, model.mapping(), 200 if ended else 202)

    def waited(self, model_id: str, job: Job) -> bool:
        if not self.waiting.acquire(blocking=False):
            return False
        try:
            return models.wait(self.node, job, time.monotonic() + LONGEST_WAIT_SECS)
        finally:
            self.waiting.release()


class ArchiveResource(NodeResource):
    """A model as one file, to be carried to a machine without a hub."""

    def on_get(self, request: falcon.Request, response: falcon.Response, model_id: str) -> None:
        archive = model_archives.export(self.node, decoded(model_id))
        response.content_type = BINARY
        response.content_length = archive.length  # a caller who gets less, because a file has changed, knows it
        response.stream = archive.parts


class BodyFile:
    """The body of a request, as a file that can be read."""

    def __init__(self, request: falcon.Request) -> None:
        self.request = request

    def read(self, size: int) -> bytes:
        return part_of(self.request, size)


class ArchivesResource(NodeResource):
    """Such a file is the body; nothing of it is kept in memory."""

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        known_parameters(request, "as")
        as_id = request.get_param("as")
        body = cast(IO[bytes], BodyFile(request))
        model = model_archives.take_in(self.node, body, "The archive", as_id, lambda done, total: None)
        response.location = location(model.model_id)
        reply(response, model.mapping(), 201)


class DownloadResource(JobResource):
    def begin(self, request: falcon.Request, model_id: str) -> Job | None:
        return models.download(self.node, model_id)


class LoadResource(JobResource):
    def begin(self, request: falcon.Request, model_id: str) -> Job | None:
        options = json_body(request) if request.content_length or request.content_type else None
        return models.load(self.node, model_id, options)


def location(model_id: str) -> str:
    return f"/models/{quote(model_id, safe='')}"
