"""`GET /events/stream`: what happens, as it happens, in server-sent events that may be resumed."""

from __future__ import annotations

import time
from collections.abc import Callable

import falcon

from appliance.control.errors import known_parameters
from appliance.control.resources import NodeResource, whole
from appliance.core import fields as check
from appliance.core.access import Need
from appliance.core.events import Event
from appliance.core.problems import invalid, quoted
from appliance.drivers import eventstream
from appliance.drivers.eventstream import MOST_AT_ONCE, STREAMS, Source
from appliance.drivers.journal import Journal, after, recent

ADMITTED_SECS = 5.0  # after which a reader is asked again whether he still may


class Admission:
    """Whether who reads a stream still may: a key that is revoked ends it. judge: raises Problem."""

    def __init__(self, judge: Callable[[], object]) -> None:
        self.judge = judge
        self.judged_at = time.monotonic()

    def check(self) -> None:
        """Raises: Problem."""
        now = time.monotonic()
        if now - self.judged_at >= ADMITTED_SECS:
            self.judge()
            self.judged_at = now


class JournalSource:
    """The events after number ``last``, each once."""

    def __init__(self, journal: Journal[Event], last: int, admission: Admission) -> None:
        self.journal, self.last, self.admission = journal, last, admission
        self.mark: object = ()

    def __call__(self) -> str:
        self.admission.check()
        mark = self.journal.mark()
        if mark == self.mark:
            return ""
        texts, size = list[str](), 0
        for entry in after(recent(self.journal, mark), self.last):
            if size > MOST_AT_ONCE:
                return "".join(texts)  # the rest when this was read
            texts.append(eventstream.event(entry, number=entry["seq"]))
            self.last, size = entry["seq"], size + len(texts[-1])
        self.mark = mark
        return "".join(texts)


class EventStreamResource(NodeResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        known_parameters(request, "since")

        def judge() -> None:
            self.authenticator.authorize(self.authenticator.identify(request.env), Need.READ)

        stream(request, response, JournalSource(self.node.journal, self.begin(request), Admission(judge)))

    def begin(self, request: falcon.Request) -> int:
        """The number of the event after which it begins. A journal that was begun anew is told from its beginning."""
        known = recent(self.node.journal, self.node.journal.mark())
        newest: int = known[-1]["seq"] if known else 0
        since = last_event_id(request)
        since = whole(request, "since", newest) if since is None else since
        return since if since is not None and since <= newest else 0


def last_event_id(request: falcon.Request) -> int | None:
    sent = request.get_header("Last-Event-ID")
    if not sent:
        return None
    if (number := check.decimal(sent)) is None:
        raise invalid(f"Last-Event-ID must be the seq of an event, not {quoted(sent)}")
    return number


def stream(request: falcon.Request, response: falcon.Response, source: Source) -> None:
    """Answer with what the source has, for as long as the caller listens. Raises: Problem."""
    response.content_type = eventstream.MEDIA_TYPE
    response.cache_control = ["no-store"]
    response.set_header("X-Accel-Buffering", "no")  # nginx would keep events until it has 4 kB of them
    if request.method != "HEAD":
        response.stream = STREAMS.body(request.env, source)
