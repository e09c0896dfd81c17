"""The calls that were convicted of having ended replicas, as the multiplexer has journalled them."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

from filelock import Timeout

from appliance.core import health
from appliance.core.events import Event
from appliance.core.state import Instance
from appliance.drivers.journal import Journal

log = logging.getLogger("appliance.monitor")


class Convictions:
    """Those of the time that counts. The journal is read again when it has grown."""

    def __init__(self, journal: Journal[Event]) -> None:
        self.journal = journal
        self.read_at: tuple[int, int] | None = None
        self.convicted: list[dict[str, Any]] = []

    def of(self, instance: Instance, index: int) -> int:
        """Deaths of this launch of a replica, in the time that counts, for which a call was convicted."""
        mark = self.journal.mark()
        if mark != self.read_at:
            since = (datetime.now(UTC) - timedelta(seconds=health.DEATHS_SECS)).isoformat()
            try:
                events = self.journal.since(0)
            except (OSError, Timeout) as error:  # what was read before counts
                log.error("Cannot read the journal: %s", error)
                events = self.convicted
            else:
                self.read_at = mark
            self.convicted = [each for each in events if each["event"] == Event.CONVICTED and each["time"] > since]
        mine = [
            event
            for event in self.convicted
            if (event["instance"], event["launch"]) == (instance.name, instance.launch)
        ]
        return sum(event["died"].count(index) for event in mine)
