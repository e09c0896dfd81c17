"""What keeps the pages true: a stream that says when to ask again, and parts that are made once for many who ask.

A page that nobody sees has no stream. A page that is seen is told that something has changed, and asks for its parts.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Hashable
from pathlib import Path

import falcon
from markupsafe import Markup

from appliance.control.console.rendering import render
from appliance.control.console.resource import ConsoleResource
from appliance.control.resources import whole
from appliance.control.streaming import Admission, stream
from appliance.drivers import eventstream
from appliance.files.signature import Signature, signature_or_none
from appliance.node.context import Node

TICK, LOG = "tick", "log"  # what the pages listen to
AFTERWARDS_SECS = (0.0, 1.0, 3.0)  # after a change: what follows from it stands in no file, as the end of a process
EVERY_SECS = 10.0  # what is measured is written as often
SHORTEST_SECS = 1.0  # between two ticks
TAG_PLACE = "the tag of this part"
Seen = tuple[Signature | None, ...]


def signatures(node: Node) -> Seen:
    """Of the files that change with what the pages show."""
    paths = [node.settings.state_file, node.layout.events, node.layout.models, node.layout.keys]
    for folder in (node.layout.jobs, node.layout.benchmarks):
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        paths += [f"{folder}/{name}" for name in names]
    return tuple(map(signature_or_none, paths))


class PageSource:
    """A tick when what a page shows may be other than before. find_log: of the log that it shows, which is another one
    for each generation."""

    def __init__(self, node: Node, find_log: Callable[[], Path | None], admission: Admission) -> None:
        self.node, self.find_log, self.admission = node, find_log, admission
        self.seen: Seen | None = None
        self.log = find_log()
        self.log_seen = signature_or_none(self.log) if self.log else None
        self.due: list[float] = []
        self.ticked_at = self.logged_at = float("-inf")

    def __call__(self) -> str:
        self.admission.check()
        now = time.monotonic()
        return self.tick(now) or self.tick_of_log(now)

    def tick(self, now: float) -> str:
        if (seen := signatures(self.node)) != self.seen:
            self.seen, self.due = seen, [now + secs for secs in AFTERWARDS_SECS]
            self.log = self.find_log()
        is_due = bool(self.due) and self.due[0] <= now and now - self.ticked_at >= SHORTEST_SECS
        if not is_due and now - self.ticked_at < EVERY_SECS:
            return ""
        self.due = [at for at in self.due if at > now]
        self.ticked_at = now
        return eventstream.event(TICK, TICK)

    def tick_of_log(self, now: float) -> str:
        if self.log is None or now - self.logged_at < SHORTEST_SECS:
            return ""
        if (seen := signature_or_none(self.log)) == self.log_seen:
            return ""
        self.log_seen, self.logged_at = seen, now
        return eventstream.event(LOG, LOG)


class PageStream(ConsoleResource):
    """`instance`, `replica`: whose log the page shows."""

    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        name, replica = request.get_param("instance"), whole(request, "replica", 0) or 0

        def find_log() -> Path | None:
            instance = self.node.state.read().instances.get(name or "")
            return self.node.log_path(instance, replica) if instance else None

        stream(request, response, PageSource(self.node, find_log, Admission(request.context.judge)))


class SharedPart:
    """A part of a page, made once a second for all who ask for the same."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: dict[Hashable, tuple[Hashable, Markup]] = {}

    def get(self, node: Node, key: Hashable, make: Callable[[], Markup]) -> Markup:
        """key: of those who see the same."""
        with self.lock:
            moment = (signatures(node), int(time.monotonic()))
            before, part = self.made.get((node.id, key), (None, Markup()))
            if before != moment:
                part = make()
                self.made[node.id, key] = (moment, part)
            return part


def part(template: str, **values: object) -> Markup:
    """A part of a page that is asked for again and again. It has a tag of what it says, which it sends when it asks."""
    text = render(template, tag=TAG_PLACE, **values)
    return Markup(text.replace(TAG_PLACE, tag_of(text), 1))


def tag_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def answer_part(request: falcon.Request, response: falcon.Response, found: Markup) -> None:
    """204 as long as it is what the page has."""
    tag = request.get_param("tag")
    if tag and f"tag={tag}" in found[: found.find(">")]:
        response.status = falcon.HTTP_204
        return
    response.content_type = falcon.MEDIA_HTML
    response.text = str(found)
