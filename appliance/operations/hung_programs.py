"""Programs of ours that hang are killed, and supervisord starts them again: `core.hanging` decides.

The monitor looks after those that serve others, and control after the monitor. A kill loses what the program has in
work, which nobody would have got.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from appliance.core.events import Event
from appliance.core.hanging import BUSY_SECS, IDLE_SECS, Silence, silent, why_hung
from appliance.core.layout import multiplexer_process
from appliance.core.problems import Problem
from appliance.core.program import MARKER
from appliance.core.status import ALIVE
from appliance.drivers import processes
from appliance.files.heartbeat import Heartbeat, last_beat
from appliance.node.context import Node

log = logging.getLogger(__name__)
LOOK_SECS = 5.0  # between two looks, and so long a program may be without a heartbeat


class WatchedProgram(NamedTuple):
    """A program of supervisord. patience_secs: how long it may do nothing."""

    group: str
    process: str
    patience_secs: float = IDLE_SECS


# It waits for supervisord now and then, which may take a minute to end a process.
MONITOR = WatchedProgram("monitor", "monitor", BUSY_SECS)


def serving(multiplexers: int) -> list[WatchedProgram]:
    """Those that serve others."""
    numbered = [WatchedProgram("multiplexer", multiplexer_process(number)) for number in range(multiplexers)]
    return [WatchedProgram("control", "control"), WatchedProgram("gateway", "gateway"), *numbered]


class ProgramWatch:
    """Used by one thread. name: of the program that watches."""

    def __init__(self, node: Node, name: str, programs: Sequence[WatchedProgram]) -> None:
        self.node = node
        self.programs = programs
        self.silences: dict[WatchedProgram, Silence] = {}
        self.trial = Heartbeat(Path(node.layout.heartbeat(f"{name}-watch")))

    def start(self) -> None:
        threading.Thread(target=self.run, name="programs", daemon=True).start()

    def run(self) -> None:
        while True:
            time.sleep(LOOK_SECS)
            if not self.trial.beat_now():  # the disk that takes none of ours takes none of others
                self.silences.clear()
                continue
            for program in self.programs:
                try:
                    self.look(program)
                except (Problem, OSError) as problem:
                    log.error("Whether %s hangs is not known: %s", program.process, problem)

    def look(self, program: WatchedProgram) -> None:
        """Kill a program that hangs. Raises: Problem when supervisord does not answer; OSError."""
        before = self.silences.pop(program, None)
        beat = last_beat(Path(self.node.layout.heartbeat(program.process)))
        if beat is None or time.monotonic() - beat.at < LOOK_SECS:
            return
        process = self.node.supervisor.process(program.group, program.process)
        if process is None or process.pid != beat.pid or process.state not in ALIVE:
            return  # it ends, and supervisord knows; or it starts, and has had none yet
        activity, now = processes.activity(beat.pid), time.monotonic()
        silence = silent(before, beat.pid, activity, now, beat.at)
        if why := why_hung(silence, activity, now, program.patience_secs):
            self.kill(program, beat.pid, why)
        else:
            self.silences[program] = silence

    def kill(self, program: WatchedProgram, pid: int, why: str) -> None:
        """With its children, which hold its port. Raises: OSError."""
        if processes.kill_group(pid, MARKER, f"{self.node.id}:"):
            message = f"{program.process} (process {pid}) {why}: it was killed, and supervisord starts it again"
            self.node.journal.record(Event.PROGRAM_HUNG, None, message, program=program.process)
