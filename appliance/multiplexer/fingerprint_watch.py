"""Which fingerprint the vectors of an instance have at this moment, as this process sees its replicas.

An instance is looked at when it is asked, at most twice a second; and at once when a replica has come since the last
look, because it may have loaded other files.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from appliance.core.program import marker
from appliance.core.routing import Replica, Route
from appliance.core.state import Instance
from appliance.drivers import processes
from appliance.drivers.processes import Started
from appliance.multiplexer.replica_pool import ReplicaPool
from appliance.node.fingerprints import Fingerprints, Known, known_of_listed

log = logging.getLogger(__name__)
LOOK_SECS = 0.5
QUICK_SECS = 0.005  # that a look takes at unchanged files on a disk that answers
AHEAD_SECS, LASTING_SECS = 1.0, 30.0  # between two looks at instances that nobody has asked yet, or that have none
CHANGE_SLACK_MS = 1000
MOST_LAUNCHES = 16
GONE = Known(None, "it is not there any more")


class FingerprintLook(NamedTuple):
    """comings: of its replicas before the look. at: when it ended, of time.monotonic; took: seconds."""

    known: Known
    comings: tuple[tuple[int, int], ...]
    at: float
    took: float

    @property
    def secs(self) -> float:
        """How long it holds, unless a replica comes. What is awaited is seen at once."""
        return 0.0 if self.known.pending else LOOK_SECS


class Established(NamedTuple):
    """known: as there was a fingerprint last; of: what the instance was then. Other files of another model, or of
    another spec, are no change of these."""

    known: Known
    of: tuple[Any, ...]


class FingerprintWatch:
    """Thread-safe. on_change(fingerprint, since_ms): called when files have changed under an instance's processes."""

    def __init__(self, pool: ReplicaPool, fingerprints: Fingerprints, on_change: Callable[[str, int], None]) -> None:
        self.pool = pool
        self.fingerprints = fingerprints
        self.on_change = on_change
        self.looks: dict[str, FingerprintLook] = {}
        self.established: dict[str, Established] = {}
        self.launches: dict[str, dict[int, str]] = {}  # of the last launches of an instance: their fingerprint
        self.locks: dict[str, threading.Lock] = {}  # by instance
        self.lock = threading.Lock()

    def current(self, route: Route) -> Known:
        """What is known of an instance; 2 us, and some 300 where it is looked at."""
        comings = self.comings(route)
        if look := self.present_look(route, comings):
            return look.known
        return self.look(route, comings)

    def is_quick(self, route: Route) -> bool:
        """Whether `current` gives an answer in a moment: it need not look, or the last look took no longer."""
        look, comings = self.looks.get(route.name), self.comings(route)
        if look is None or look.comings != comings or look.known.pending:
            return False
        return look.took < QUICK_SECS or self.present_look(route, comings) is not None

    def present_look(self, route: Route, comings: tuple[tuple[int, int], ...]) -> FingerprintLook | None:
        look = self.looks.get(route.name)
        holds = look and look.comings == comings and time.monotonic() - look.at < look.secs
        return look if holds else None

    def start(self) -> None:
        threading.Thread(target=self.look_ahead, name="fingerprints", daemon=True).start()

    def look_ahead(self) -> None:
        """The files of a model are read before the first call asks for their digests."""
        while True:
            time.sleep(AHEAD_SECS)
            routes = self.pool.directory.table.all
            self.keep_only({route.name for route in routes})
            for route in routes:
                look = self.looks.get(route.name)
                is_known = look and (look.known.fingerprint or time.monotonic() - look.at < LASTING_SECS)
                if is_known and look and not look.known.pending:
                    continue
                try:
                    self.look(route, self.comings(route))
                except (OSError, RuntimeError) as error:  # no thread can be started to read in
                    log.warning("Cannot look at the files of %s: %s", route.name, error)

    def keep_only(self, names: Collection[str]) -> None:
        """Forget instances that are gone."""
        with self.lock:
            for known in (self.looks, self.established, self.launches, self.locks):
                for name in known.keys() - names:
                    known.pop(name, None)  # a call may have been quicker

    def comings(self, route: Route) -> tuple[tuple[int, int], ...]:
        """How often each replica became ready; another tuple as soon as one comes, or belongs to another launch."""
        backends = self.pool.backends
        return tuple(
            (replica.launch, backends[replica].comings if replica in backends else 0) for replica in route.replicas
        )

    def look(self, route: Route, comings: tuple[tuple[int, int], ...]) -> Known:
        with self.lock_of(route.name):
            began = time.monotonic()
            try:
                known = self.known(route)
            except OSError as error:
                known = Known(None, f"its files cannot be looked at: {error}")
            self.note_change(route, known)
            self.note_launches(route, known)
            now = time.monotonic()
            self.looks[route.name] = FingerprintLook(known, comings, now, now - began)
            return known

    def lock_of(self, name: str) -> threading.Lock:
        """Each instance has one: a disk that does not answer holds up those alone whose model lies there."""
        with self.lock:
            return self.locks.setdefault(name, threading.Lock())

    def known(self, route: Route) -> Known:
        """Raises: OSError."""
        content = self.pool.directory.content
        if listed := content.listed.get(route.name):
            backends = [self.pool.backends.get(replica) for replica in route.replicas]
            infos = [each.info for each in backends if each and each.ready]
            return known_of_listed(listed, infos, any(replica.is_peer for replica in route.replicas))
        instance = content.state.instances.get(route.name)
        return self.fingerprints.of(instance, self.processes(instance)) if instance else GONE

    def note_change(self, route: Route, known: Known) -> None:
        """Tell of files that have become others since the instance had a fingerprint."""
        name, of = route.name, (route.model_id, route.space, route.generation)
        established = self.established.get(name)
        before = established.known if established and established.of == of else GONE
        if before.digest and known.changed_ns > before.changed_ns and known.digest != before.digest:
            try:
                self.on_change(before.digest, known.changed_ns // 1_000_000 - CHANGE_SLACK_MS)
            except OSError as error:  # no call fails for it; it is told again at the next look
                log.error("The files of %s have changed, which cannot be noted: %s", name, error)
                return
            self.established.pop(name, None)
        if known.digest:
            self.established[name] = Established(known, of)

    def note_launches(self, route: Route, known: Known) -> None:
        """A replica that was replaced may go on answering a stream for a while."""
        launches = self.launches.setdefault(route.name, {})
        for launch in {replica.launch for replica in route.replicas}:
            launches.pop(launch, None)
            if known.digest:
                launches[launch] = known.digest
        while len(launches) > MOST_LAUNCHES:
            launches.pop(next(iter(launches)))

    def of_replica(self, replica: Replica) -> str | None:
        """The fingerprint of what a replica answers, also of one that was replaced a while ago; None: not known."""
        return self.launches.get(replica.instance, {}).get(replica.launch)

    def processes(self, instance: Instance) -> list[Started]:
        """Those of its replicas that listen."""
        node_link = self.pool.node_link
        table = node_link.node.listening()
        found = []
        for replica, port in enumerate(instance.ports):
            own = marker(node_link.node_id, instance.name, replica, instance.launch)
            pid = node_link.node.listeners.owner(port, own, table)
            if pid and (began := processes.started(pid)):
                found.append(began)
        return found
