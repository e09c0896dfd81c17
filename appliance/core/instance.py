"""InstanceSpec: what a caller asked for. One validator for REST bodies, TOML seeds, the CLI and the state file.

``model_id`` is a hub id or a local folder; ports are TCP ports on this machine; replica i listens on ``port + i`` and
``prometheus_port + i`` where these are asked for, and runs on ``gpu_ids[i % n]``; a GPU is its number or its UUID.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from appliance.core import fields as check
from appliance.core.layout import CLUSTER, EXPRESS, JOB_PREFIX
from appliance.core.model_names import served_id, served_revision
from appliance.core.problems import invalid, quoted

NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
UUID = re.compile(r"GPU-[0-9A-Za-z-]{1,100}")
Gpu = int | str  # its number on the PCI bus, or its UUID
AUTO: tuple[Gpu, ...] = ("auto",)  # gpu_ids: the appliance places the replicas
CAST = ("control", "multiplexer", "gateway", "monitor")  # what etc/supervisord.conf starts
PROGRAMS = (*CAST, EXPRESS, CLUSTER)
# Set by the appliance for every replica: a second spelling in extra_args would win or be refused by TEI, by chance.
OWNED_FLAGS = (
    "--model-id",
    "--revision",
    "--port",
    "-p",
    "--hostname",
    "--prometheus-port",
    "--max-batch-tokens",
    "--max-concurrent-requests",
    "--pooling",
    "--dtype",
    "--uds-path",
    "--json-output",
    "--api-key",
)


@check.with_schema(
    {
        "type": "string",
        "pattern": f"^{NAME.pattern}$",
        "description": f"not {', '.join(PROGRAMS)}, and not beginning with {JOB_PREFIX}",
    }
)
def name(value: Any) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueError(
            f"must begin with a letter and have at most 64 letters, digits, '.', '_' and '-', not {check.shown(value)}"
        )
    if value in PROGRAMS or value.startswith(JOB_PREFIX):
        raise ValueError(f"must not be {quoted(value)}: that is a program of the appliance itself")
    return value


argument = check.text(shortest=0)


@check.with_schema(argument.schema)
def extra_arg(value: Any) -> str:
    text: str = argument(value)
    flag = text.partition("=")[0]
    if flag in OWNED_FLAGS or (flag.startswith("-p") and flag[2:].isdigit()):
        raise ValueError(f"must not set {quoted(flag)}: the appliance sets it; use the field of that name")
    return text


gpu_number = check.whole(0, 2**31 - 1)


@check.with_schema({"anyOf": [gpu_number.schema, {"type": "string", "pattern": f"^{UUID.pattern}$"}]})
def gpu(value: Any) -> Gpu:
    if isinstance(value, str):
        if not UUID.fullmatch(value):
            raise ValueError(f'must be a GPU\'s number or its UUID ("GPU-..."), not {check.shown(value)}')
        return value
    number: int = gpu_number(value)
    return number


gpu_list = check.sequence_of(gpu, 64)


@check.with_schema({"anyOf": [gpu_list.schema, {"const": "auto"}]})
def gpus(value: Any) -> tuple[Gpu, ...]:
    if value == "auto":
        return AUTO
    if isinstance(value, str):
        raise ValueError(f'must be a list of GPUs or "auto", not {check.shown(value)}')
    numbers: tuple[Gpu, ...] = gpu_list(value)
    return numbers


PORT = check.whole(1024, 65535)


@check.with_schema({"anyOf": [{"const": 0}, PORT.schema]})
def port_or_zero(value: Any) -> int:
    """0 is what other managers have for a port that nobody asks for."""
    number: int = value if value == 0 and type(value) is int else PORT(value)
    return number


MOST_REPLICAS = 64
LABEL_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
LABEL = re.compile(rf"(?:{LABEL_PART}/)?{LABEL_PART}={LABEL_PART}")  # as Ray (2.60) has them


@check.with_schema({"type": "string", "pattern": f"^{LABEL.pattern}$"})
def node_label(value: Any) -> str:
    if not isinstance(value, str) or not LABEL.fullmatch(value):
        words = "must be KEY=VALUE of letters, digits, '.', '_', '-', with a letter or digit at each end"
        raise ValueError(f"{words} and at most one '/' in KEY, not {check.shown(value)}")
    return value


CHECKS: dict[str, check.Check] = {
    "name": name,
    "model_id": served_id,
    "revision": served_revision,
    "port": check.Check(lambda value: port_or_zero(value) or None, port_or_zero.schema),  # 0: automatic
    "gpu_id": gpu,
    "gpu_ids": gpus,
    "replicas": check.whole(1, MOST_REPLICAS),
    "max_batch_tokens": check.whole(1, 2**31 - 1),
    "max_concurrent_requests": check.whole(1, 1_000_000),
    "pooling": check.one_of("cls", "mean", "splade", "last-token"),
    "dtype": check.one_of("float16", "float32", "bfloat16", "int8"),
    "prometheus_port": port_or_zero,  # 0: off
    "startup_timeout_secs": check.whole(1, 86400),
    "engine": check.one_of("tei", "embedded"),
    "extra_args": check.sequence_of(extra_arg, 256),
    "token_ids": check.one_of("accept", "refuse"),
    "download": check.one_of("auto", "never"),
    "aliases": check.sequence_of(served_id, 64),
    "default": check.boolean,
    "request_logs": check.boolean,
    "express": check.boolean,
    "cache": check.boolean,
    "start": check.one_of("eager", "on_demand"),
    "idle_unload_secs": check.whole(0, 10_000_000),
    "undo_secs": check.whole(0, 10_000_000),
    "max_replicas": check.whole(1, MOST_REPLICAS),
    "node_labels": check.sequence_of(node_label, 16),
}
FIELDS = check.Fields(CHECKS, required=("name", "model_id"), null_is_absent=True)
# What may change while the processes stay: all of it is ours, and none of it is among their flags.
CHANGEABLE = (
    *("aliases", "cache", "default", "download", "express", "idle_unload_secs", "start", "startup_timeout_secs"),
    *("token_ids", "undo_secs"),
)


@dataclass(frozen=True)
class InstanceSpec:
    """The fields of a request (docs/rest.md). ``None`` means: not asked for, the appliance decides."""

    name: str
    model_id: str
    revision: str | None = None
    port: int | None = None
    gpu_id: Gpu | None = None
    gpu_ids: tuple[Gpu, ...] = ()
    replicas: int = 1
    max_batch_tokens: int = 16384
    max_concurrent_requests: int = 512
    pooling: str | None = None
    dtype: str | None = None
    prometheus_port: int | None = None
    startup_timeout_secs: int | None = None
    engine: str | None = None
    extra_args: tuple[str, ...] = ()
    token_ids: str = (
        "accept"  # in the place of texts, over HTTP: those of another tokenizer give wrong vectors silently
    )
    download: str = "auto"  # of a model that is not on this machine
    aliases: tuple[str, ...] = ()  # other names by which requests may ask for it, as for a model id
    default: bool = False  # answers what names nobody, among the instances for its task
    request_logs: bool = False  # TEI's line for each request, which supervisord reads and writes: 12 to 60 us of CPU
    express: bool = False  # single gRPC calls go through Envoy straight to a replica
    cache: bool = True  # embeddings that were computed before are not computed again
    start: str = "eager"  # or by the first call: until then it sleeps, and others may have its memory
    idle_unload_secs: int = 0  # after so long without a call it sleeps; 0: never
    undo_secs: int = 600  # so long what it was before is kept ready, after it was replaced beside that
    max_replicas: int | None = None  # on a cluster: as many while texts wait, and `replicas` when they do not
    node_labels: tuple[str, ...] = ()  # on a cluster: of the machines on which replicas may run

    @classmethod
    def parse(cls, body: Any) -> InstanceSpec:
        """The spec in ``body`` (a mapping of request fields; ``null`` is the same as absent).

        Raises: Problem (invalid) that names the field and says what is allowed.
        """
        values = FIELDS.values(check.required_object(body, "An instance must be an object with its fields"))
        return cls(**values).coherent()

    def changed(self, body: Any) -> InstanceSpec:
        """This spec with the fields in ``body``; null is their default.

        Raises: Problem (invalid), also for a field that would need new processes.
        """
        given = check.required_object(body, "A change must be an object with the fields that change")
        after = InstanceSpec.parse({**self.mapping(), **given})
        if kept := sorted(self.differences(after) - set(CHANGEABLE)):
            raise invalid(f"Field {quoted(kept[0])} needs new processes; what changes at once: {', '.join(CHANGEABLE)}")
        return after

    def differences(self, other: InstanceSpec) -> set[str]:
        """The fields that the two do not have alike."""
        one, another = self.mapping(), other.mapping()
        return {name for name, value in one.items() if another[name] != value}

    @property
    def asks_for_ports(self) -> bool:
        return self.port is not None or self.asked_prometheus_port is not None

    def coherent(self) -> InstanceSpec:
        """This spec, or the Problem of two fields that do not go together."""
        if self.gpu_id is not None and self.gpu_ids:
            raise invalid('Fields "gpu_id" and "gpu_ids" exclude each other: use "gpu_ids" for several GPUs')
        for key, first in (("port", self.port), ("prometheus_port", self.asked_prometheus_port)):
            if first is not None and first + self.replicas - 1 > 65535:
                raise invalid(f'Field "{key}": {first} leaves no room for {self.replicas} replicas below 65536')
        if self.express and (self.is_on_demand or self.idle_unload_secs):
            raise invalid(
                'Field "express" does not go with "start" = "on_demand" nor with "idle_unload_secs": nobody counts the '
                "calls of the express lane, so it would sleep while it is used"
            )
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise invalid(f'Field "max_replicas" ({self.max_replicas}) is below "replicas" ({self.replicas})')
        if len({label.partition("=")[0] for label in self.node_labels}) < len(self.node_labels):
            raise invalid('Field "node_labels" has one key twice: each has one value')
        if self.overlapping:
            raise invalid(
                f'Fields "port" ({self.port}) and "prometheus_port" ({self.prometheus_port}) overlap over '
                f"{self.replicas} replicas: replica i listens on port + i and prometheus_port + i"
            )
        return self

    def flag(self, name: str) -> str | None:
        """The value of a flag among extra_args."""
        for argument, following in zip(self.extra_args, (*self.extra_args[1:], None)):
            if argument == name:
                return following
            if argument.startswith(f"{name}="):
                return argument.removeprefix(f"{name}=")
        return None

    @property
    def is_on_demand(self) -> bool:
        return self.start == "on_demand"

    @property
    def asked_prometheus_port(self) -> int | None:
        """The first port for metrics, where one was asked for."""
        return self.prometheus_port or None

    @property
    def metrics_off(self) -> bool:
        """Whether GET /metrics leaves out what the replicas measure. They do all the same: TEI cannot do without a port
        for it (1.9), and the monitor reads there whether a silent replica is at work."""
        return self.prometheus_port == 0

    @property
    def overlapping(self) -> bool:
        asked = (self.port, self.asked_prometheus_port)
        return None not in asked and abs((asked[0] or 0) - (asked[1] or 0)) < self.replicas

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that were asked for, taken in turn; empty when none was, or when the appliance places them."""
        if self.gpu_ids == AUTO:
            return ()
        return self.gpu_ids or (() if self.gpu_id is None else (self.gpu_id,))

    def mapping(self) -> dict[str, Any]:
        """Back to plain values, as ``parse`` reads them; lists instead of tuples, None where nothing was asked."""
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}
        return plain | ({"gpu_ids": "auto"} if self.gpu_ids == AUTO else {})
