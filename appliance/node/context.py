"""Node: one appliance on this machine, its settings and the drivers to its files and its supervisord."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from appliance.core.events import Event
from appliance.core.layout import Layout, is_number
from appliance.core.program import MARKER, marker
from appliance.core.settings import Settings
from appliance.core.state import Instance
from appliance.core.status import ALIVE, Process
from appliance.drivers import logs
from appliance.drivers.healthfile import HealthFile
from appliance.drivers.journal import Count, Journal, uncounted
from appliance.drivers.listeners import Listeners, ListenerTable, Owner, listening, marker_of
from appliance.drivers.needsfile import NeedsFile
from appliance.drivers.statefile import ModelsFile, StateFile
from appliance.drivers.supervisord import Supervisor
from appliance.node.fingerprints import Fingerprints
from appliance.node.waiting_line import WaitingLine


def now() -> str:
    return rfc3339(time.time())


def now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def rfc3339(seconds: float) -> str:
    """seconds: since 1970, UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def node_id(data_dir: str) -> str:
    """A short id of a data folder, so that two appliances on one machine know their own processes."""
    return hashlib.sha256(os.path.realpath(data_dir).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Node:
    """One appliance on this machine: its settings and the drivers to its files and its supervisord."""

    settings: Settings
    state: StateFile
    models: ModelsFile
    supervisor: Supervisor
    journal: Journal[Event]
    audit: Journal[str]
    turned_away: Journal[str]  # changing calls without a known key: apart, or they would push the others out
    health: HealthFile
    needs: NeedsFile[int]  # bytes of GPU memory
    memory_needs: NeedsFile[int]  # bytes
    load_times: NeedsFile[float]  # seconds
    listeners: Listeners
    line: WaitingLine = field(default_factory=WaitingLine)  # for room, of those who asked this process

    @classmethod
    def at(cls, settings: Settings, count: Count = uncounted) -> Node:
        """count: called with each event of the journal."""
        layout = settings.layout
        journal = Journal[Event](layout.events, now, count)

        def repaired(message: str) -> None:
            journal.record(Event.STATE_REPAIRED, None, message)

        return cls(
            settings=settings,
            state=StateFile(settings.state_file, now, repaired),
            models=ModelsFile(layout.models, now, repaired),
            supervisor=Supervisor(layout.supervisor_socket),
            journal=journal,
            audit=Journal(layout.audit, now),
            turned_away=Journal(layout.audit_of_strangers, now),
            health=HealthFile(layout.health),
            needs=NeedsFile(layout.gpu_needs),
            memory_needs=NeedsFile(layout.memory_needs),
            load_times=NeedsFile(layout.load_times),
            listeners=Listeners(MARKER),
        )

    @property
    def layout(self) -> Layout:
        return self.settings.layout

    @property
    def folder(self) -> Path:
        return Path(self.settings.data_dir)

    @cached_property
    def id(self) -> str:
        return node_id(self.settings.data_dir)

    @cached_property
    def fingerprints(self) -> Fingerprints:
        return Fingerprints(self.settings)

    def marker(self, instance: Instance, replica: int) -> str:
        """What the processes of this launch of a replica bear."""
        return marker(self.id, instance.name, replica, instance.launch)

    def proved(self, instance: Instance, replica: int, table: ListenerTable | None = None) -> bool:
        """Whether the replica itself listens on its port: a process of its present launch, and no other. table: as for
        `Listeners.proved`."""
        return self.listeners.proved(instance.ports[replica], self.marker(instance, replica), table)

    def stranger(self, instance: Instance, replica: int, table: ListenerTable | None = None) -> Owner | None:
        """Who else listens on the replica's port."""
        return self.listeners.stranger(instance.ports[replica], f"{self.id}:{instance.name}:", table)

    def listening(self) -> ListenerTable:
        """Who listens at this moment: read once where many replicas are looked at. Nobody, where it cannot be read."""
        try:
            return listening()
        except OSError:  # no free file descriptor
            return ListenerTable({})

    def of_this_launch(self, instance: Instance, replica: int, process: Process | None) -> Process | None:
        """The process, unless it is a predecessor that is about to be replaced: start and restart change the state a
        moment before the processes."""
        if process is None or process.state not in ALIVE or process.pid is None:
            return process
        return process if marker_of(process.pid, MARKER) == self.marker(instance, replica) else None

    def log_path(self, instance: Instance, replica: int) -> Path:
        return Path(self.layout.log(instance.process(replica)))

    def set_logs_aside(self, instance: Instance) -> None:
        """The logs of a generation that is gone, out of the way of the next one of its name; also of replicas that it
        had before it was given fewer."""
        for path in self.log_path(instance, 0).parent.glob(f"{instance.stem}-*.log"):
            if is_number(path.stem.removeprefix(f"{instance.stem}-")):
                logs.set_aside(path, Path(self.layout.deleted_logs))
