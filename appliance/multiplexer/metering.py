"""What the multiplexer measures of its calls: how many, how long, how they ended, how much of it was its own time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from appliance.core.routing import Target
from appliance.drivers.metrics import Meters
from appliance.node.directory import Directory

OK = grpc.StatusCode.OK


@dataclass
class CallRecord:
    """One call; the handler fills it in. waited_secs: the time at a replica or in the queue."""

    target: Target | None = None
    instance: str | None = None
    texts: int = 0
    waited_secs: float = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.waited_secs += time.monotonic() - began


class Metering:
    def __init__(self, meters: Meters, directory: Directory) -> None:
        self.meters = meters
        self.directory = directory

    @contextmanager
    def counting(self, method: str, context: grpc.ServicerContext) -> Iterator[CallRecord]:
        """Measure the call that the block answers, however it ends."""
        call, began = CallRecord(), time.monotonic()
        failed = True
        try:
            yield call
            failed = False
        finally:
            took = time.monotonic() - began
            code = context.code() or (grpc.StatusCode.CANCELLED if failed else OK)
            instance = self.instance_label(call)
            self.meters.calls.labels(method, instance, code.name).inc()
            self.meters.durations.labels(method, instance).observe(took)
            self.meters.overheads.labels(method).observe(max(0.0, took - call.waited_secs))
            if call.texts:
                self.meters.texts.labels(instance, method).inc(call.texts)

    def instance_label(self, call: CallRecord) -> str:
        """The name of the instance; empty for one that does not exist, because callers must not make labels."""
        name = call.instance or (call.target.instance_name if call.target else None)
        return name if name and any(route.name == name for route in self.directory.table.routes) else ""
