"""Prometheus metrics of all processes of the appliance: each process counts into files of its own in one folder.

The files have the number of a slot, which a process holds as long as it lives, and not its pid: so a restarted process
continues the files of its predecessor, counters never decrease, and files do not accumulate.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import struct
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, values
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

from appliance.core.events import Cause, Event
from appliance.core.series import Counts

log = logging.getLogger(__name__)
PREFIX = "tei_manager_"
HISTORY = (f"{PREFIX}instances_created", f"{PREFIX}instances_deleted")  # deleted instances have these, too
MOST_SLOTS = 256
MAPPED = ("counter", "histogram", "gauge_livesum")  # prometheus_client's files of one process
MAPPED_BYTES = 1024 * 1024  # at first: some 7,000 series in each
USED = struct.Struct("i")  # how many bytes of a file count: it begins with that
ROOM_AGAIN_SECS = 10.0  # between two looks whether a full disk has room again
DURATIONS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
OVERHEADS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)


class CacheMeters(NamedTuple):
    """outcome: hit, miss or bypass; failure: a `cachestore.Failure`."""

    lookups: Counter
    joins: Counter
    saved: Counter
    failures: Counter
    evicted: Counter
    reads: Histogram


class Meters:
    """The metrics of this process. Each process makes one, after any fork.

    Labels: method is one of the API's, code one of gRPC's; instance is the name of an existing one, or empty.
    Events, and the series of `begin`, are exported from 0 on: Prometheus' `increase` does not count an event with which
    a series begins.
    """

    def __init__(self, folder: Path, program: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.slot = acquire_slot(folder, program)
        for stale in folder.glob(f"gauge_*_{self.slot.name}.db"):  # the predecessor's queue ended with it
            stale.unlink()
        if reserve(folder, self.slot.name):
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
            values.MmapedDict = AllocatedDict  # type: ignore[attr-defined]
            values.ValueClass = values.MultiProcessValue(lambda: self.slot.name)
        self.registry = CollectorRegistry()
        self.created = self.counter("instances_created", "Instances created", "instance", "model")
        self.deleted = self.counter("instances_deleted", "Instances deleted", "instance")
        self.restarts = self.counter("instance_restarts", "Replicas started again", "instance", "reason")
        self.wakes = self.counter("instance_wakes", "How often the instance was woken", "instance")
        self.sleeps = self.counter("instance_sleeps", "How often the instance was put to sleep", "instance")
        # None loads in less than half a second.
        self.loads = self.histogram("load_seconds", "Replicas from start to first answer", DURATIONS[8:], "instance")
        self.failures = self.counter("health_check_failures", "Probes missed or answered wrongly", "instance")
        self.events = self.counter("events", "Events of the journal", "event")
        self.calls = self.counter("grpc_requests", "gRPC calls", "method", "instance", "code")
        self.texts = self.counter("texts", "Texts answered", "instance", "method")
        self.durations = self.histogram(
            "grpc_request_duration_seconds", "gRPC calls, whole", DURATIONS, "method", "instance"
        )
        self.overheads = self.histogram("grpc_overhead_seconds", "gRPC calls without the replica", OVERHEADS, "method")
        self.waits = self.histogram("queue_wait_seconds", "Single texts in the queue", DURATIONS)
        self.queue = Gauge(
            f"{PREFIX}queue_size",
            "Waiting: single texts, and slices of batches",
            ("instance", "lane"),
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self.http = self.counter("http_requests", "Requests of the gateway", "route", "code")
        self.http_durations = self.histogram("http_request_duration_seconds", "Requests, whole", DURATIONS, "route")
        for event in Event:
            self.events.labels(event)

    def cache(self) -> CacheMeters:
        """What the cache of embeddings counts, in the process that has it."""
        return CacheMeters(
            lookups=self.counter("cache_lookups", "Texts looked up, by outcome", "instance", "outcome"),
            joins=self.counter("cache_joins", "Calls that waited for another call's computation", "instance"),
            saved=self.counter("cache_saved_seconds", "Seconds that hits would have taken to compute", "instance"),
            failures=self.counter("cache_failures", "What the store could not do", "failure"),
            evicted=self.counter("cache_evicted", "Entries dropped to make room"),
            reads=self.histogram("cache_read_seconds", "Lookups in the store, of a text or a batch", OVERHEADS),
        )

    def counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, about, labels, registry=self.registry)

    def histogram(self, name: str, about: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(PREFIX + name, about, labels, registry=self.registry, buckets=tuple(buckets))

    def begin(self, instance: str) -> None:
        """Export the restarts and failures of an existing instance from 0 on."""
        for counter in (self.failures, self.wakes, self.sleeps):
            counter.labels(instance)
        for cause in Cause:
            self.restarts.labels(instance, cause)

    def event(self, event: str, instance: str | None, details: dict[str, Any]) -> None:
        """Count an event of the journal."""
        self.events.labels(event).inc()
        if event == Event.CREATED:
            self.created.labels(instance, details.get("model", "")).inc()
        elif event == Event.DELETED:
            self.deleted.labels(instance).inc()
        elif event == Event.WOKEN:
            self.wakes.labels(instance).inc()
        elif event == Event.SLEPT:
            self.sleeps.labels(instance).inc()
        elif event in (Event.RESTARTED, Event.DIED):
            self.restarts.labels(instance, details.get("cause", Cause.CRASH)).inc()


class AllocatedDict(MmapedDict):
    """One of the library's files. It grows by what the disk really has: a write to a page of it for which a full disk
    has no block ends the process (SIGBUS).

    A series that finds no room is left out until there is some; whoever counts it keeps its value until then.
    """

    look_at = float("-inf")

    def read_value(self, key: str) -> tuple[float, float]:
        return super().read_value(key) if self.has_room(key) else (0.0, 0.0)

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        if self.has_room(key):
            super().write_value(key, value, timestamp)

    def has_room(self, key: str) -> bool:
        if key in self._positions:
            return True
        while self._used + len(key.encode()) + 32 > self._capacity:  # with its length, what fills it up, and the value
            if not self.grow():
                return False
        return True

    def grow(self) -> bool:
        now = time.monotonic()
        if now < self.look_at:
            return False
        try:
            os.posix_fallocate(self._f.fileno(), 0, 2 * self._capacity)
            self._m = mmap.mmap(self._f.fileno(), 2 * self._capacity)
        except OSError as error:
            self.look_at = now + ROOM_AGAIN_SECS
            log.error("New series are left out of %s until there is room for them: %s", self._fname, error)
            return False
        self._capacity *= 2
        return True


def reserve(folder: Path, slot: str) -> bool:
    """Allocate the files that are mapped into memory, as far as they have grown.

    False when there is no space: then this process counts in its own memory until it is restarted.
    """
    try:
        for kind in MAPPED:
            with (folder / f"{kind}_{slot}.db").open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, max(MAPPED_BYTES, file.tell()))
    except OSError as error:
        log.error("The metrics of %s are left out until it is started again: %s", slot, error)
        return False
    return True


class Slot:
    """A number of one program, held by a lock that the kernel releases with the process."""

    def __init__(self, name: str, lock: FileLock) -> None:
        self.name = name
        self.lock = lock


def acquire_slot(folder: Path, program: str) -> Slot:
    """The first free slot of a program. Raises: OSError when there is none."""
    for number in range(MOST_SLOTS):
        lock = FileLock(folder / f"{program}-{number}.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            continue
        return Slot(f"{program}-{number}", lock)
    raise OSError(f"{MOST_SLOTS} processes of {program} count in {folder} already")


def merged(folder: Path, instances: Collection[str] | None, others: Sequence[Metric] = ()) -> str:
    """The counts of all processes as Prometheus text, without the gauges of processes that have ended.

    instances: those that exist; of others only HISTORY is exported. None: all are exported. others: more samples of
    families that our processes have, or such families.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("gauge_*.db"):
        slot = path.stem.rsplit("_", 1)[1]
        lock = FileLock(folder / f"{slot}.lock", timeout=0)
        try:
            with lock:
                path.unlink(missing_ok=True)
        except OSError:
            continue  # its process lives; or the disk takes no lock, and better a gauge too many than no page
    families = joined([*collected(folder), *others])
    for family in families:
        if instances is not None and family.name not in HISTORY:
            labelled = [(sample, sample.labels.get("instance")) for sample in family.samples]
            family.samples = [sample for sample, instance in labelled if not instance or instance in instances]
    return exposition(families)


def totals(folder: Path, prefix: str) -> dict[tuple[str, str], float]:
    """What all processes have counted in the counters whose names begin so, without the prefix of all: by name and by
    the label ``outcome`` (empty where a counter has none), over all other labels."""
    counted: dict[tuple[str, str], float] = {}
    for family in collected(folder):
        if family.type == "counter" and family.name.startswith(PREFIX + prefix):
            for sample in family.samples:
                key = (family.name.removeprefix(PREFIX), sample.labels.get("outcome", ""))
                counted[key] = counted.get(key, 0.0) + sample.value
    return counted


def collected(folder: Path) -> list[Metric]:
    """What the processes count in their files. A disk without room leaves some with less than they say, or empty."""
    return list(MultiProcessCollector.merge([str(path) for path in folder.glob("*.db") if is_whole(path)]))


def is_whole(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return int(*USED.unpack(file.read(USED.size))) <= os.fstat(file.fileno()).st_size
    except (OSError, struct.error):
        return False


COUNTED = tuple(
    f'["{PREFIX}{name}"'
    for name in ("texts", "grpc_requests", "grpc_request_duration_seconds", "queue_size", "cache_lookups")
)
WELL = ("OK", "CANCELLED")  # codes of gRPC with which nothing went wrong here


def counts_by_instance(folder: Path) -> dict[str, Counts]:
    """What all multiplexer processes have counted of each instance. Only the few series that this takes are read: all,
    merged, would take ten times as long."""
    texts, calls, errors, hits, queue = (defaultdict[str, float](float) for _ in range(5))
    within: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for path in folder.glob("*_multiplexer-*.db"):
        for key, value in values_in(path):
            if not key.startswith(COUNTED):
                continue
            _, name, labels, *_ = json.loads(key)
            instance = labels.get("instance", "")
            if name.endswith("_bucket"):
                within[instance][float(labels["le"])] += value
            elif name == f"{PREFIX}texts_total":
                texts[instance] += value
            elif name == f"{PREFIX}grpc_requests_total":
                calls[instance] += value
                errors[instance] += value * (labels["code"] not in WELL)
            elif name == f"{PREFIX}cache_lookups_total":
                hits[instance] += value * (labels["outcome"] == "hit")
            elif name == f"{PREFIX}queue_size":
                queue[instance] += value
    names = {*texts, *calls, *queue, *within}
    return {
        each: Counts(texts[each], calls[each], errors[each], hits[each], queue[each], cumulated(within[each]))
        for each in names
    }


def values_in(path: Path) -> list[tuple[str, float]]:
    """Of a file that is just begun, was cut by a full disk, or has gone: nothing."""
    try:
        return [(key, value) for key, value, _, _ in MmapedDict.read_all_values_from_file(path)]
    except (OSError, ValueError, RuntimeError, struct.error):
        return []


def cumulated(within: Mapping[float, float]) -> dict[float, float]:
    """Files have the calls of each bucket alone."""
    bounds = sorted(within)
    return dict(zip(bounds, accumulate(within[bound] for bound in bounds), strict=True))


def joined(families: Iterable[Metric]) -> list[Metric]:
    """One family of each name, with the samples of all."""
    by_name: dict[str, Metric] = {}
    for family in families:
        if family.name in by_name:
            by_name[family.name].samples = [*by_name[family.name].samples, *family.samples]
        else:
            by_name[family.name] = family
    return list(by_name.values())


class MeasuredGauge(NamedTuple):
    """A gauge as measured now. samples: (values of the labels, value)."""

    name: str
    about: str
    labels: tuple[str, ...]
    samples: Iterable[tuple[tuple[str, ...], float]]


def gauges(measured: Iterable[MeasuredGauge]) -> str:
    """Gauges as Prometheus text."""
    families = []
    for gauge in measured:
        family = GaugeMetricFamily(PREFIX + gauge.name, gauge.about, labels=gauge.labels)
        for label_values, value in gauge.samples:
            family.add_metric(label_values, value)
        families.append(family)
    return exposition(families)


def exposition(families: Iterable[Metric]) -> str:
    """Prometheus text."""

    class Families:
        def collect(self) -> Iterable[Metric]:
            return families

    registry = CollectorRegistry()
    registry.register(Families())
    return str(generate_latest(registry).decode())
