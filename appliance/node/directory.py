"""Where the instances and the table of replicas come from: the state file. Nothing else in a data path knows."""

from __future__ import annotations

import logging

from appliance.core.problems import Problem
from appliance.core.program import LOOPBACK
from appliance.core.routing import Table, table_of
from appliance.core.state import State
from appliance.drivers.statefile import StateFile
from appliance.files.signature import Signature, signature

log = logging.getLogger(__name__)


class Directory:
    """Follows the state file; `state` and `table` are replaced as a whole and never changed.

    engine: of instances that ask for none.
    """

    def __init__(self, file: StateFile, engine: str) -> None:
        self.file = file
        self.engine = engine
        self.state = State()
        self.table = Table()
        self.signature_read: Signature | None = None
        self.problem: Problem | None = None  # why the file could not be read at the last look

    def require(self) -> None:
        """Raises: Problem while there is a file that could never be read: what it would say is unknown, not nothing."""
        if self.problem and self.signature_read is None:
            raise Problem(self.problem.kind, self.problem.code, self.problem.message)

    def refresh(self) -> None:
        """Look at the file again. An unreadable file keeps the previous state and table. Thread-safe."""
        try:
            present = signature(self.file.path)
        except OSError:
            return
        if present is None or present == self.signature_read:
            return
        try:
            state = self.file.read()
            table = table_of(state, LOOPBACK, self.engine)
        except Problem as problem:
            if self.problem is None or problem.message != self.problem.message:
                log.error("Keeping the previous routes: %s", problem.message)
            self.problem = problem
            return
        self.problem = None
        self.signature_read = present
        self.state = state
        if table != self.table:
            self.table = table
