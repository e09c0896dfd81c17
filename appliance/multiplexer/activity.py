"""When this process used each instance last, told to those who put idle ones to sleep."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from appliance.core.routing import Replica
from appliance.core.state import Instance
from appliance.drivers.activityfile import ActivityFile, LastUse
from appliance.drivers.tei import Backend

log = logging.getLogger(__name__)
WRITE_SECS = 0.25  # between two writings of what has changed
AGAIN_SECS = 5.0  # and of what has not, so that it is known that we live


class Activity:
    """Thread-safe. waiting: the instances for which calls wait that have no replica yet."""

    def __init__(self, file: ActivityFile, waiting: Callable[[], Collection[str]]) -> None:
        self.file = file
        self.waiting = waiting
        self.lock = threading.Lock()
        self.counted: Counter[str] = Counter()  # calls so far, by instance
        self.uses: dict[str, LastUse] = {}
        self.written: dict[str, LastUse] = {}
        self.written_at = float("-inf")
        self.named: tuple[Mapping[str, Instance], Collection[str]] = {}, ()  # instances, and which of them matter here

    def note(self, instances: Mapping[str, Instance], backends: Mapping[Replica, Backend], at_once: bool) -> None:
        """Look at what was used since the last time. at_once: write it now."""
        known, names = self.named
        if instances is not known:
            names = names_of(instances)
            self.named = instances, names
        if not names and not self.written:
            return
        with self.lock:
            self.look(names, backends)
            now = time.monotonic()
            elapsed = now - self.written_at
            if at_once or elapsed > AGAIN_SECS or (elapsed > WRITE_SECS and self.uses != self.written):
                try:
                    self.file.write(self.uses)
                except OSError as error:
                    log.error("Cannot write %s: %s", self.file.path, error)
                self.written, self.written_at = dict(self.uses), now

    def look(self, names: Collection[str], backends: Mapping[Replica, Backend]) -> None:
        """Under the lock."""
        counted, busy = Counter[str](), set(self.waiting())
        for replica, backend in list(backends.items()):
            if replica.instance in names:
                counted[replica.instance] += backend.taken
                if backend.outstanding:
                    busy.add(replica.instance)
        used = {name for name in names if name in busy or counted[name] != self.counted[name]}
        now = time.time()
        self.uses = {
            name: LastUse(now if name in used else self.uses[name].last, name in busy)
            for name in names
            if name in used or name in self.uses
        }
        self.counted = counted


def names_of(instances: Mapping[str, Instance]) -> Collection[str]:
    """Of those that sleep when nobody uses them."""
    return {name for name, each in instances.items() if each.spec.is_on_demand or each.spec.idle_unload_secs}
