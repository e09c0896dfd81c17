"""What of the cache may be wrong: all that was computed since a replica's golden answers were last right."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from appliance.core.health import ProbeResult
from appliance.core.problems import Problem
from appliance.core.state import Instance
from appliance.files.replacement import replace_file
from appliance.node import cache_overview
from appliance.node.context import Node, now_ms
from appliance.operations import cache

log = logging.getLogger(__name__)
WRITE_SECS = 10.0
EJECTION_MS = 5000  # within which a replica that strays gets no traffic any more
UNKNOWN_MS = 600_000  # so far back, where no comparison was ever right


class OfProcess(NamedTuple):
    """What is known of the fingerprint of a process, which never changes: it keeps its model. digest: empty while it is
    not known; pending: it will be as soon as the files of the model are read."""

    launch: int
    pid: int | None
    digest: str
    pending: bool


class Good(NamedTuple):
    """The last comparison of a replica that was right. fingerprint: empty until it is known. at_ms: when it began,
    since 1970."""

    fingerprint: str
    at_ms: int


class CacheGuard:
    """Remembers it in one file, for the next monitor. Thread-safe."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.path = Path(node.layout.golden_times)
        self.lock = threading.Lock()
        self.good = self.read()
        self.known: dict[str, OfProcess] = {}
        self.written_at = 0.0

    def read(self) -> dict[str, Good]:
        try:
            entries = json.loads(self.path.read_text()).items()
            return {str(name): Good(str(digest), int(at)) for name, (digest, at) in entries}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def noting(
        self,
        instance: Instance,
        replica: int,
        pid: int | None,
        began_ms: int,
        compare: Callable[[], tuple[ProbeResult, str]],
    ) -> tuple[ProbeResult, str]:
        """What a comparison with the golden answers gave; a wrong one has been dealt with before it is returned.
        began_ms: since 1970, before the first of these answers."""
        result, detail = compare()
        if result is ProbeResult.ANSWERED:
            self.note(instance, replica, Good(self.of_process(instance, replica, pid).digest, began_ms))
        elif result is ProbeResult.WRONG:
            self.forget_since_right(instance, replica)
        return result, detail

    def note_fingerprint(self, instance: Instance, replica: int, pid: int | None) -> None:
        """Of a comparison that was right before the files of the model had been read."""
        good = self.good.get(instance.process(replica))
        if not good or not self.awaits_fingerprint(instance, replica, pid):
            return
        if digest := self.of_process(instance, replica, pid).digest:
            self.note(instance, replica, Good(digest, good.at_ms))

    def awaits_fingerprint(self, instance: Instance, replica: int, pid: int | None) -> bool:
        key = instance.process(replica)
        good, known = self.good.get(key), self.known.get(key)
        return bool(good and not good.fingerprint) and not (known and known.pid == pid and not known.pending)

    def of_process(self, instance: Instance, replica: int, pid: int | None) -> OfProcess:
        """Asks supervisord and looks at every file of the model, as long as the fingerprint is not known."""
        key = instance.process(replica)
        known = self.known.get(key)
        if known is None or (known.launch, known.pid) != (instance.launch, pid) or not known.digest:
            now = cache_overview.known_of(self.node, instance)
            known = self.known[key] = OfProcess(instance.launch, pid, now.digest or "", now.pending)
        return known

    def digest(self, instance: Instance) -> str:
        """The fingerprint of the instance now; empty while nobody knows it."""
        return cache_overview.known_of(self.node, instance).digest or ""

    def note(self, instance: Instance, replica: int, good: Good) -> None:
        key, now = instance.process(replica), time.monotonic()
        with self.lock:
            is_news = key not in self.good or self.good[key].fingerprint != good.fingerprint
            self.good[key] = good
            if not is_news and now - self.written_at < WRITE_SECS:
                return
            self.written_at = now
            try:
                self.path.parent.mkdir(mode=0o700, exist_ok=True)
                replace_file(self.path, json.dumps(self.good), durable=False)
            except OSError as error:
                log.error("Cannot write %s: %s", self.path, error)

    def forget_since_right(self, instance: Instance, replica: int) -> None:
        """A replica strays from its golden answers: who knows since when. Where it is not known under which fingerprint
        its vectors are kept, those of all instances are forgotten that were computed since then."""
        with self.lock:
            good = self.good.get(instance.process(replica))
        digest = self.digest(instance)
        since_ms = good.at_ms if good else now_ms() - UNKNOWN_MS
        for fingerprint in {digest, good.fingerprint if good else digest}:
            has_own_time = good is not None and good.fingerprint == fingerprint
            try:
                why = f'replica {replica} of "{instance.name}" strayed from its golden answers'
                own_since_ms = since_ms if has_own_time or not fingerprint else 0
                cache.purge(self.node, fingerprint, own_since_ms, why, instance.name, EJECTION_MS)
            except Problem as problem:
                log.error("%s", problem.message)

    def forget_others(self, stems: Collection[str]) -> None:
        """stems: of the generations that are there."""
        with self.lock:
            self.good = {key: good for key, good in self.good.items() if key.rpartition("-")[0] in stems}
            self.known = {key: known for key, known in self.known.copy().items() if key.rpartition("-")[0] in stems}
