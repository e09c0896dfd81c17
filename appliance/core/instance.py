"""InstanceSpec: what somebody asked for. One validator for REST bodies, TOML seeds, the CLI and the state file.

``model_id`` is a hub id or a local folder; ports are TCP ports on this machine; replica i listens on ``port + i`` and
``prometheus_port + i`` where these are given, and runs on ``gpu_ids[i % n]``; a GPU is its number or its UUID.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from appliance.core import fields as check
from appliance.core.problems import invalid, nearest, quoted

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
UUID = re.compile(r"GPU-[0-9A-Za-z-]{1,100}")
Gpu = int | str  # its number on the PCI bus, or its UUID
AUTO: tuple[Gpu, ...] = ("auto",)  # gpu_ids: the appliance places the replicas
RESERVED_NAMES = frozenset({"control", "multiplexer", "gateway", "monitor"})
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


def name(value: Any) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueError(
            f"must begin with a letter and have at most 64 letters, digits, '_' and '-', not {check.shown(value)}"
        )
    if value in RESERVED_NAMES:
        raise ValueError(f"must not be {quoted(value)}: that is a program of the appliance itself")
    return value


def model_id(value: Any) -> str:
    text: str = check.text(512)(value)
    if text.startswith("-") or text != text.strip():
        raise ValueError(f"must be a hub id or a local folder, not {check.shown(value)}")
    return text


def revision(value: Any) -> str:
    text: str = check.text(256)(value)
    if text.startswith("-"):
        raise ValueError(f"must be a branch, tag or commit, not {check.shown(value)}")
    return text


def extra_arg(value: Any) -> str:
    text: str = check.text(shortest=0)(value)
    flag = text.partition("=")[0]
    if flag in OWNED_FLAGS or (flag.startswith("-p") and flag[2:].isdigit()):
        raise ValueError(f"must not set {quoted(flag)}: the appliance sets it; use the field of that name")
    return text


def gpu(value: Any) -> Gpu:
    if isinstance(value, str):
        if not UUID.fullmatch(value):
            raise ValueError(f'must be a GPU\'s number or its UUID ("GPU-..."), not {check.shown(value)}')
        return value
    number: int = check.whole(0, 2**31 - 1)(value)
    return number


def gpus(value: Any) -> tuple[Gpu, ...]:
    if value == "auto":
        return AUTO
    if isinstance(value, str):
        raise ValueError(f'must be a list of GPUs or "auto", not {check.shown(value)}')
    found: tuple[Gpu, ...] = check.sequence_of(gpu, 64)(value)
    return found


PORT = check.whole(1024, 65535)
CHECKS: dict[str, check.Check] = {
    "name": name,
    "model_id": model_id,
    "revision": revision,
    "port": PORT,
    "gpu_id": gpu,
    "gpu_ids": gpus,
    "replicas": check.whole(1, 64),
    "max_batch_tokens": check.whole(1, 2**31 - 1),
    "max_concurrent_requests": check.whole(1, 1_000_000),
    "pooling": check.one_of("cls", "mean", "splade", "last-token"),
    "dtype": check.one_of("float16", "float32", "bfloat16"),
    "prometheus_port": PORT,
    "startup_timeout_secs": check.whole(1, 86400),
    "engine": check.one_of("tei", "embedded"),
    "extra_args": check.sequence_of(extra_arg, 256),
    "token_ids": check.one_of("accept", "refuse"),
}


@dataclass(frozen=True)
class InstanceSpec:
    """The request fields of CONTRACT section 3. ``None`` means: not asked for, the appliance decides."""

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

    @classmethod
    def parse(cls, given: Any) -> InstanceSpec:
        """The spec in ``given`` (a mapping of request fields; ``null`` is the same as absent).

        Raises: Problem (invalid) that names the field and says what is allowed.
        """
        if not isinstance(given, Mapping):
            raise invalid(f"An instance must be an object with its fields, not {check.shown(given)}")
        values: dict[str, Any] = {}
        for key, value in given.items():
            if key not in CHECKS:
                raise invalid(f"Unknown field {quoted(key)}{nearest(str(key), CHECKS)}")
            if value is None:
                continue
            try:
                values[key] = CHECKS[key](value)
            except ValueError as error:
                raise invalid(f'Field "{key}" {error}') from None
        for required in ("name", "model_id"):
            if required not in values:
                raise invalid(f'Field "{required}" is required')
        return cls(**values).coherent()

    def coherent(self) -> InstanceSpec:
        """This spec, or the Problem of two fields that do not go together."""
        if self.gpu_id is not None and self.gpu_ids:
            raise invalid('Fields "gpu_id" and "gpu_ids" exclude each other: use "gpu_ids" for several GPUs')
        for key in ("port", "prometheus_port"):
            first = getattr(self, key)
            if first is not None and first + self.replicas - 1 > 65535:
                raise invalid(f'Field "{key}": {first} leaves no room for {self.replicas} replicas below 65536')
        if self.port is not None and self.prometheus_port is not None and self.overlapping:
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
    def overlapping(self) -> bool:
        return abs((self.port or 0) - (self.prometheus_port or 0)) < self.replicas

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that were asked for, taken in turn; empty when none was, or when the appliance places them."""
        if self.gpu_ids == AUTO:
            return ()
        return self.gpu_ids or (() if self.gpu_id is None else (self.gpu_id,))

    def mapping(self) -> dict[str, Any]:
        """Back to plain values, as ``parse`` reads them; lists instead of tuples, None where nothing was asked."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        return plain | ({"gpu_ids": "auto"} if self.gpu_ids == AUTO else {})
