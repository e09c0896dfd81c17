"""What the management API answers about the machine and what was measured on it, as JSON Schema."""

from __future__ import annotations

from appliance.control.schema_parts import COUNT, NUMBER, STRING, TIME, array, maybe, record, told
from appliance.core import series
from appliance.core.fields import Schema
from appliance.node.benchmarks import STATUSES
from appliance.node.doctor import VERDICTS

OF_GPU = {
    "index": "its number on the PCI bus, as nvidia-smi has it",
    "uuid": "its UUID, GPU-...",
    "name": "its model",
    "memory_total": "bytes",
    "memory_used": "bytes in use, by whomever",
    "memory_free": "bytes",
    "utilization": "how busy it is, 0 to 1",
    "temperature": "degrees Celsius",
    "error": "why the driver does not tell its memory",
    "replicas": "ours on it, each with the memory that it has there",
}
BYTES = maybe(COUNT)
GPU: dict[str, Schema] = {
    "index": COUNT,
    "uuid": STRING,
    "name": maybe(STRING),
    "memory_total": BYTES,
    "memory_used": BYTES,
    "memory_free": BYTES,
    "utilization": maybe(NUMBER),
    "temperature": maybe({"type": "integer"}),
    "error": maybe(STRING),
    "replicas": array(record(("instance", "replica"), instance=STRING, replica=COUNT, memory_used=BYTES)),
}
SERIES: dict[str, Schema] = {
    "step_secs": COUNT,
    "since": TIME,
    "until": TIME,
    "source": STRING,
    "problem": maybe(STRING),
    **{name: array(maybe(NUMBER)) for name in series.NAMES},
}
OF_SERIES = {
    "step_secs": "from one value to the next, so that 300 values do: at least 10, and 300 for more than a day",
    "since": "when the first value begins",
    "until": "when the last one ends",
    "source": "who has measured: monitor, or the URL of the Prometheus that was asked",
    "problem": "why that is not the Prometheus of the configuration",
    "texts": "answered in a second",
    "calls": "ended in a second, on all ways",
    "errors": "of these, with another code than OK",
    "hits": "texts from the cache in a second",
    "p50_ms": "milliseconds that half of the calls did not exceed; null without a call",
    "p95_ms": "the same of 95 in 100",
    "queue": "waiting at that moment",
    "memory_mib": "resident, of all its replicas",
    "gpu_mib": "of GPU memory, of all its replicas; null where they hold none",
    "ready": "replicas that answered",
    "golden_distance": "of an answer to its golden one, 1 minus their cosine: the most of all its replicas",
}
EVENT: dict[str, Schema] = {"seq": COUNT, "time": TIME, "event": STRING, "instance": maybe(STRING), "message": STRING}
STEP = record(
    ("concurrency", "texts_per_sec", "p50_ms", "p95_ms", "requests", "failed", "first_error"),
    concurrency=COUNT,
    texts_per_sec=NUMBER,
    p50_ms=NUMBER,
    p95_ms=NUMBER,
    requests=COUNT,
    failed=COUNT,
    first_error=maybe(STRING),
)
BENCHMARK: dict[str, Schema] = {
    "instance": STRING,
    "status": {"enum": list(STATUSES)},
    "started_at": TIME,
    "step_secs": NUMBER,
    "steps": array(STEP),
    "saturation": maybe(COUNT),
    "error": maybe(STRING),
}
OF_BENCHMARK = {
    "instance": "that was measured",
    "status": "running: steps are added",
    "started_at": "when it began",
    "step_secs": "how long each step takes",
    "steps": "with 1, 2, 4 … 64 requests in flight, each of one text",
    "saturation": "the fewest requests in flight that reach 95 % of the best throughput; null until it is done",
    "error": "why it failed",
}
FINDING: dict[str, Schema] = {"verdict": {"enum": list(VERDICTS)}, "what": STRING, "found": STRING, "fix": STRING}
OF_FINDING = {
    "verdict": "wrong: something does not work; warning: it will not, or not for everybody",
    "what": "was examined",
    "found": "in words",
    "fix": "what to do; empty where nothing is to be done",
}
OF_EVENT = {
    "seq": "its number; each event has a higher one",
    "time": "when it was recorded",
    "event": "its word: docs/operations.md has them all",
    "instance": "whose it is; null for one of the whole appliance",
    "message": "what happened, for people",
}
MACHINE_SCHEMAS: dict[str, Schema] = {
    "Gpu": record(tuple(name for name in GPU if name != "replicas"), **told(OF_GPU, GPU)),
    "Series": record(tuple(SERIES), **told(OF_SERIES, SERIES)),
    "Benchmark": record(tuple(BENCHMARK), **told(OF_BENCHMARK, BENCHMARK)),
    "Finding": record(tuple(FINDING), **told(OF_FINDING, FINDING)),
    "Event": record(tuple(EVENT), **told(OF_EVENT, EVENT)),
}
