"""`appliance status --watch`: what each instance does right now, from two looks at the metrics."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from appliance.cli.terminal import duration, size, table
from appliance.core.series import between, quantile

COLUMNS = ("name", "status", "ready", "texts/s", "p95", "queue", "memory", "up", "last event")
TEXTS, LATENCY, QUEUE = "tei_manager_texts_total", "tei_manager_grpc_request_duration_seconds", "tei_manager_queue_size"


@dataclass
class Snapshot:
    """The metrics at one moment, by instance. at: by time.monotonic; texts: answered so far; queue: waiting now."""

    at: float
    texts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, dict[float, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    queue: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @classmethod
    def at_page(cls, page: str, at: float) -> Snapshot:
        """page: Prometheus text, as `GET /metrics` of control has it."""
        from prometheus_client.parser import text_string_to_metric_families  # only now: it takes 30 ms

        look = cls(at)
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                name = sample.labels.get("instance", "")
                if sample.name == TEXTS:
                    look.texts[name] += sample.value
                elif sample.name == QUEUE:
                    look.queue[name] += sample.value
                elif sample.name == f"{LATENCY}_bucket":
                    look.calls[name][float(sample.labels["le"])] += sample.value
        return look


def rate(name: str, before: Snapshot, now: Snapshot) -> float | None:
    """Texts a second between the two looks; None without a time between them."""
    secs = now.at - before.at
    return max(0.0, now.texts[name] - before.texts[name]) / secs if secs > 0 else None


def rows(
    instances: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], before: Snapshot, now: Snapshot
) -> Iterator[dict[str, Any]]:
    """The table's rows. instances, events: as REST tells them, the oldest event first."""
    last = {event["instance"]: event for event in events}
    for instance in instances:
        name = instance["name"]
        texts, p95 = rate(name, before, now), quantile(0.95, between(before.calls[name], now.calls[name]))
        event = last.get(name)
        yield {
            "name": name,
            "status": instance["status"],
            "ready": f"{instance['replicas_ready']}/{instance['replicas']}",
            "texts/s": None if texts is None else f"{texts:,.0f}",
            "p95": None if p95 is None else f"{p95 * 1000:.3g} ms",
            "queue": f"{now.queue[name]:.0f}",
            "memory": size(memory(replica["pid"] for replica in instance["replica_list"])),
            "up": duration(instance["uptime_secs"]),
            "last event": event and f"{event['event']}, {duration(since(event['time']))} ago",
        }


def table_of(
    instances: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], before: Snapshot, now: Snapshot
) -> str:
    return table(list(rows(instances, events, before, now)), COLUMNS)


def memory(pids: Iterator[int | None]) -> int | None:
    """Resident bytes of these processes; None where none of them can be seen from here."""
    import psutil

    sizes = []
    for pid in pids:
        try:
            sizes += [psutil.Process(pid).memory_info().rss] if pid else []
        except psutil.Error:
            continue  # it has ended, or runs in a container of its own
    return sum(sizes) if sizes else None


def since(moment: str) -> float:
    """Seconds from a time of REST until now."""
    return max(0.0, time.time() - datetime.fromisoformat(moment).timestamp())
