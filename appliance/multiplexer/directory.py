"""Where the table of replicas comes from: the state file. Nothing else in the multiplexer knows."""

from __future__ import annotations

import logging
import os

from appliance.core.problems import Problem
from appliance.core.program import LOOPBACK
from appliance.core.routing import Table, table_of
from appliance.drivers.statefile import StateFile

log = logging.getLogger(__name__)


class Directory:
    """Follows the state file; `table` is replaced as a whole and never changed."""

    def __init__(self, state: StateFile) -> None:
        self.state = state
        self.table = Table()
        self.seen: tuple[int, int, int] | None = None

    def refresh(self) -> bool:
        """Look at the file again; True when the table is a new one. An unreadable file keeps the previous table."""
        try:
            found = os.stat(self.state.path)
        except OSError:
            return False
        signature = (found.st_ino, found.st_mtime_ns, found.st_size)
        if signature == self.seen:
            return False
        try:
            table = table_of(self.state.read(), LOOPBACK)
        except Problem as problem:
            log.error("Keeping the previous routes: %s", problem.message)
            return False
        self.seen = signature
        changed = table != self.table
        self.table = table
        return changed
