"""Prove that a model loads: compare every digest, start the backend as its instance would, ask it once, measure.

The backend gets ports of its own from the kernel, never one of an instance. One load at a time for each GPU.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil
from filelock import FileLock

from appliance.core import models as registry
from appliance.core import placement, program
from appliance.core.events import Event
from appliance.core.instance import InstanceSpec
from appliance.core.log_lines import readable
from appliance.core.models import Job, Model, Verification
from appliance.core.problems import Kind, Problem, quoted
from appliance.core.program import LOOPBACK, MARKER, Program
from appliance.core.state import Instance
from appliance.drivers import hub, logs, manifests, modelfiles, nvml, ports, processes
from appliance.drivers.manifests import Entry, Manifest
from appliance.jobs.progress import ProgressFile
from appliance.node import gpus, integrity, model_overview
from appliance.node.context import Node, now
from appliance.node.probe import Late, ProbeTarget, ServedModel, answer
from appliance.node.servable import vectors_of
from appliance.wire.calls import CallFailed

log = logging.getLogger(__name__)
POLL_SECS = 0.1
ANSWER_SECS = 60.0
LAST_LINES = 15
GRACE_SECS = 10.0


@dataclass
class MemoryPeak:
    """The most memory that the backend and its children held, in bytes."""

    memory: int = 0
    gpu_memory: int = 0


def load(node: Node, model: Model, job: Job) -> None:
    """Raises: Problem when the files are not those of the manifest, or no GPU is free. All else is a verification."""
    spec = InstanceSpec.parse(json.loads(job.fields))
    with ProgressFile(model_overview.progress_path(node, job), "verifying") as progress:
        manifest = verify_files(node, model, progress)
        progress.step = "waiting for other loads"
        instance = placed_instance(node, spec)
        gpu = instance.gpu_of(0)
        with FileLock(node.layout.load_lock("cpu" if gpu is None else str(gpu))):
            progress.step = "loading"
            verification = verify_load(node, job, instance, manifest.fingerprint)
    node.models.update(partial(registry.end, number=job.number, verification=verification))
    event = Event.MODEL_FAILED if verification.error else Event.MODEL_VERIFIED
    message = verification.error or f"Model {model.model_id} loads in {verification.load_secs:.1f} s and answers"
    node.journal.record(event, None, message, model=model.model_id)


def verify_files(node: Node, model: Model, progress: ProgressFile) -> Manifest:
    """The manifest, after every file was read and is what it says; for files of no manifest a first one."""
    place = hub.locate(model.model_id, model.revision or None)
    lacking = modelfiles.missing(place.folder) if place else ["everything"]
    if place is None or lacking:
        raise Problem(Kind.INTERNAL, "MODEL_LOAD_FAILED", f"Of {quoted(model.model_id)} is missing: {lacking[0]}")
    earlier = model_overview.manifest_of(node, model.model_id, model.revision, place)
    sums = {entry.name: entry.sha256 for entry in earlier.files} if earlier else {}
    names = list(sums) if earlier else [file.name for file in modelfiles.serving_files(place.folder)]
    progress.total = sum((place.folder / name).stat().st_size for name in names if (place.folder / name).exists())
    entries = [read_file(model, place.folder, name, progress) for name in names]
    for entry in entries:
        if sums.get(entry.name, entry.sha256) != entry.sha256:
            raise changed(model, entry.name, "has another content than when it was verified")
    for name in integrity.added(earlier, place.folder) if earlier else ():
        raise changed(model, name, integrity.WAS_ADDED, integrity.ADVICE_ADDED)
    others = earlier.others if earlier else ()
    if others is None:  # an older release did not write them down
        others = tuple(file.name for file in modelfiles.serving_files(place.folder) if file.name not in sums)
    manifest = Manifest(model.model_id, model.revision, place.commit, tuple(entries), others)
    manifests.keep(node.layout, manifest)
    return manifest


def read_file(model: Model, folder: Path, name: str, progress: ProgressFile) -> Entry:
    """One file, all of it read. A file of the hub's cache bears its digest in the name of its blob, and must have it.

    Raises: Problem MODEL_CHANGED.
    """

    def count(size: int) -> None:
        progress.done += size

    try:
        entry = manifests.entry(folder, name, count)
    except OSError as error:
        raise changed(model, name, f"cannot be read: {error.strerror}") from error
    blob = manifests.hub_digest(folder / name)
    if blob and blob.expected not in (entry.sha256, blob.computed()):
        raise changed(model, name, "is not what the hub had: its digest is not the name of its blob")
    return entry


def changed(model: Model, name: str, why: str, advice: str = integrity.ADVICE) -> Problem:
    return Problem(
        Kind.CONFLICT,
        "MODEL_CHANGED",
        f"{name} of {quoted(model.model_id)} {why}. {advice}",
    )


def placed_instance(node: Node, spec: InstanceSpec) -> Instance:
    """An instance of one replica on ports that the kernel chose, on its GPU. Raises: Problem."""
    placement.refuse_unknown(spec, nvml.devices())
    state = node.state.read()
    placed = placement.place_beside(state.generations, spec, gpus.occupancy(node, state, spec))
    port, prometheus_port = ports.unused(LOOPBACK, 2)
    return Instance(replace(spec, replicas=1), (port,), (prometheus_port,), created_at=now(), placed=placed[:1])


def verify_load(node: Node, job: Job, instance: Instance, fingerprint: str) -> Verification:
    """Start, wait, ask, stop."""
    (backend,) = program.programs_of(instance, node.settings, sys.executable, node.id)
    began, peak, path = time.monotonic(), MemoryPeak(), Path(node.layout.backend_log(job.number))
    failure, dimensions, ready = "", 0, 0.0
    try:
        with running(node, job, backend, path) as process:
            replica = ProbeTarget(
                instance.ports[0],
                instance.prometheus_ports[0],
                proved=lambda port: node.listeners.proved(port, mark(node, job)),
                model=ServedModel(vectors=vectors_of(instance.spec)),
            )
            wait_ready(node, process, instance, replica, peak)
            ready = time.monotonic() - began
            dimensions = ask(replica)
            raise_peak(process, peak)
    except LoadFailed as failed:
        tail = "\n".join(readable(logs.tail(path, LAST_LINES)))
        failure = f"{failed}. Last log lines:\n{tail}"
    finally:
        path.unlink(missing_ok=True)
    if peak.gpu_memory:
        node.needs.raise_to({placement.workload(instance.spec): peak.gpu_memory})
    return Verification(now(), fingerprint, failure, dimensions, ready, peak.memory, peak.gpu_memory)


class LoadFailed(Exception):
    """The backend does not serve the model; the words say why."""


def mark(node: Node, job: Job) -> str:
    """What the backend of a job bears."""
    return f"{node.id}:{job.program}:0:backend"


@contextmanager
def running(node: Node, job: Job, backend: Program, log_file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The backend as a child, ended afterwards in any case; one that a killed job left behind is ended first."""
    prefix = f"{node.id}:{job.program}:"
    left = [process for process, _ in processes.marked(MARKER, prefix, except_under=(os.getppid(),))]
    processes.end(left, GRACE_SECS)
    environ = {**os.environ, **backend.environment, MARKER: mark(node, job)}
    with log_file.open("wb") as output:
        child = subprocess.Popen(backend.argv, env=environ, stdout=output, stderr=output)

    def stop(number: int, frame: object) -> None:
        child.kill()
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield child
    finally:
        processes.end([psutil.Process(child.pid)] if child.poll() is None else [], GRACE_SECS)
        child.wait()


def wait_ready(
    node: Node, child: subprocess.Popen[bytes], instance: Instance, replica: ProbeTarget, peak: MemoryPeak
) -> None:
    """Until it listens on its port. Raises: LoadFailed."""
    longest = program.startup_timeout(instance, node.settings)
    until = time.monotonic() + longest
    while not replica.proved(replica.port):
        if child.poll() is not None:
            raise LoadFailed(f"The backend ended with status {child.returncode} while it loaded")
        if time.monotonic() > until:
            raise LoadFailed(f"The backend did not open its port within {longest} s (startup_timeout_secs)")
        raise_peak(child, peak)
        time.sleep(POLL_SECS)


def ask(replica: ProbeTarget) -> int:
    """One real request of the model's task; how many numbers the answer has. Raises: LoadFailed."""
    try:
        numbers = answer(replica, "a test", time.monotonic() + ANSWER_SECS)
    except (Late, CallFailed, OSError, ValueError) as error:
        raise LoadFailed(
            f"The backend does not answer: {getattr(error, 'details', '') or error or 'too late'}"
        ) from error
    if any(value != value for value in numbers.values()):
        raise LoadFailed("The backend answers with numbers that are none (NaN)")
    return len(numbers)


def raise_peak(child: subprocess.Popen[bytes], peak: MemoryPeak) -> None:
    """Raise the peak to what the backend holds now."""
    try:
        family = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
        peak.memory = max(peak.memory, sum(process.memory_info().rss for process in family))
        pids = {process.pid for process in family}
    except psutil.Error:
        return  # it has just ended
    taken = sum(each for _, pid, each in nvml.memory_by_process() if pid in pids)
    peak.gpu_memory = max(peak.gpu_memory, taken)
