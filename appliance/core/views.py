"""What is told of instances and models: values from floor to floor, and mappings where JSON is written.

The order of the keys of a mapping is that of the JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from appliance.core.instance import Gpu
from appliance.core.placement import Device
from appliance.core.state import Instance
from appliance.core.status import instance_status


@dataclass(frozen=True)
class JobProgress:
    """How far a job is. bytes_per_sec and eta_secs: None until they are known."""

    bytes_done: int = 0
    bytes_total: int | None = None
    bytes_per_sec: float | None = None
    eta_secs: float | None = None
    step: str = "starting"

    def mapping(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ReplicaView:
    index: int
    address: str | None  # where it takes calls; None until that is known
    port: int
    prometheus_port: int
    gpu_id: Gpu | None
    pid: int | None
    status: str
    exit_status: int | None
    uptime_secs: int | None

    def gone(self) -> ReplicaView:
        """The same after its process was stopped."""
        return replace(self, status="stopped", pid=None, uptime_secs=None)

    def mapping(self) -> dict[str, Any]:
        return dict(vars(self))  # asdict copies each value as well, which took a fifth of a list of 100 instances


@dataclass(frozen=True)
class ReplacementView:
    """What is about to take over from a generation, or would. needs: bytes by place. status: None where nothing has
    begun."""

    strategy: str
    generation: int
    changes: tuple[str, ...]
    needs: Mapping[str, int]
    status: str | None = None
    replicas_ready: int = 0

    def mapping(self) -> dict[str, Any]:
        return {**asdict(self), "changes": list(self.changes)}


@dataclass(frozen=True)
class UndoView:
    """What an undo goes back to. ready_until: its processes are there so long, RFC 3339 UTC; None: they are not."""

    changes: tuple[str, ...]
    ready_until: str | None

    def mapping(self) -> dict[str, Any]:
        return {**asdict(self), "changes": list(self.changes)}


@dataclass(frozen=True)
class InstanceView:
    """An instance with what is true of it at one moment."""

    instance: Instance
    engine: str
    startup_timeout_secs: int
    replicas: tuple[ReplicaView, ...]  # at least one
    health_check_failures: int = 0
    last_health_check: str | None = None
    last_error: str | None = None
    progress: JobProgress | None = None  # of its model's download
    load_secs: float | None = None  # what a replica took to load, when it was started last
    replacement: ReplacementView | None = None
    undo: UndoView | None = None

    @property
    def name(self) -> str:
        return self.instance.name

    @property
    def model_id(self) -> str:
        return self.instance.spec.model_id

    @property
    def status(self) -> str:
        return instance_status([replica.status for replica in self.replicas])

    @property
    def replicas_ready(self) -> int:
        return sum(replica.status == "running" for replica in self.replicas)

    @property
    def first_process(self) -> ReplicaView:
        """The first replica that has a process, else the first."""
        return next((replica for replica in self.replicas if replica.pid), self.replicas[0])

    def gone(self) -> InstanceView:
        """The same after it was deleted."""
        return replace(self, replicas=tuple(replica.gone() for replica in self.replicas))

    def mapping(self) -> dict[str, Any]:
        instance, first = self.instance, self.first_process
        return {
            **instance.spec.mapping(),
            "port": self.replicas[0].port,
            "prometheus_port": 0 if instance.spec.metrics_off else self.replicas[0].prometheus_port,
            "engine": self.engine,
            "startup_timeout_secs": self.startup_timeout_secs,
            "status": self.status,
            "pid": first.pid,
            "created_at": instance.created_at,
            "uptime_secs": first.uptime_secs,
            "generation": instance.generation,
            "restarts": instance.restarts,
            "health_check_failures": self.health_check_failures,
            "last_health_check": self.last_health_check,
            "last_error": self.last_error,
            "progress": self.progress and self.progress.mapping(),
            "load_secs": self.load_secs,
            "rolling": sorted(instance.rolling),
            "replacement": self.replacement and self.replacement.mapping(),
            "undo": self.undo and self.undo.mapping(),
            "replicas_ready": self.replicas_ready,
            "replica_list": [replica.mapping() for replica in self.replicas],
        }


@dataclass(frozen=True)
class HealthView:
    """The whole appliance in one word, and the instances that run and that exist. reason: empty when healthy."""

    status: str
    running: int = 0
    total: int = 0
    reason: str = ""


@dataclass(frozen=True)
class GpuReplicaView:
    """A replica on a GPU. memory_used: bytes that its processes hold there; None while they hold none."""

    instance: str
    replica: int
    memory_used: int | None


@dataclass(frozen=True)
class GpuView:
    """A GPU with our replicas on it."""

    device: Device
    replicas: tuple[GpuReplicaView, ...]

    def mapping(self) -> dict[str, Any]:
        return {**asdict(self.device), "replicas": [asdict(replica) for replica in self.replicas]}


@dataclass(frozen=True)
class FileView:
    """A file of a model. sha256: as far as it was taken."""

    name: str
    size: int
    sha256: str | None


@dataclass(frozen=True)
class VerificationView:
    """What a successful load measured."""

    dimensions: int | None
    load_secs: float
    memory_bytes: int
    gpu_memory_bytes: int | None


@dataclass(frozen=True)
class ModelView:
    """A model with what is true of it at one moment. metadata: what its folder says of it."""

    model_id: str
    revision: str | None
    commit: str | None
    source: str | None
    status: str
    downloaded: bool
    cache_path: str | None
    cache_size_bytes: int | None
    files: tuple[FileView, ...]
    progress: JobProgress | None
    metadata: Mapping[str, Any] | None
    last_verified: str | None
    verification_error: str | None
    verification: VerificationView | None
    download_error: str | None
    added_at: str

    def gone(self) -> ModelView:
        """The same after it was deleted."""
        return replace(self, status="available", downloaded=False)

    def mapping(self) -> dict[str, Any]:
        return {**asdict(self), "files": [asdict(file) for file in self.files]}
