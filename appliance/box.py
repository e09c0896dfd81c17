"""Appliance: one appliance on this machine, its settings and the drivers to its files and its supervisord."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from appliance.core.events import Event
from appliance.core.settings import Settings
from appliance.drivers.healthfile import HealthFile
from appliance.drivers.journal import Count, Journal, uncounted
from appliance.drivers.needsfile import NeedsFile
from appliance.drivers.statefile import ModelsFile, StateFile
from appliance.drivers.supervisord import Supervisor


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def id_of(data_dir: str) -> str:
    """A short id of a data folder, so that two appliances on one machine know their own processes."""
    return hashlib.sha256(os.path.realpath(data_dir).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Appliance:
    """One appliance on this machine: its settings and the drivers to its files and its supervisord."""

    settings: Settings
    state: StateFile
    models: ModelsFile
    supervisor: Supervisor
    journal: Journal[Event]
    audit: Journal[str]
    turned_away: Journal[str]  # changing calls of nobody we know: of their own, or they would push the others out
    health: HealthFile
    needs: NeedsFile

    @classmethod
    def at(cls, settings: Settings, count: Count = uncounted) -> Appliance:
        """count: called with each event of the journal."""
        folder = Path(settings.data_dir)
        journal = Journal[Event](folder / "events.jsonl", now, count)

        def repaired(message: str) -> None:
            journal.record("state_repaired", None, message)

        return cls(
            settings=settings,
            state=StateFile(settings.state_file, now, repaired),
            models=ModelsFile(folder / "models.toml", now, repaired),
            supervisor=Supervisor(folder / "supervisor.sock"),
            journal=journal,
            audit=Journal(folder / "audit.jsonl", now),
            turned_away=Journal(folder / "audit-401.jsonl", now),
            health=HealthFile(folder / "health.json"),
            needs=NeedsFile(folder / "gpu_needs.json"),
        )

    @property
    def folder(self) -> Path:
        return Path(self.settings.data_dir)

    @property
    def box(self) -> str:
        return id_of(self.settings.data_dir)

    def log_path(self, name: str, replica: int) -> Path:
        return Path(self.settings.log_dir) / f"{name}-{replica}.log"
