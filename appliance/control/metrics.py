"""`GET /metrics`: what our processes have counted, what is true now, and TEI's own metrics of every replica."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import falcon

from appliance.control.resources import NodeResource
from appliance.core.problems import Problem
from appliance.core.state import Instance
from appliance.core.views import InstanceView
from appliance.drivers import metrics, nvml
from appliance.drivers.metrics import MeasuredGauge
from appliance.node import express_metrics, overview
from appliance.node.authentication import Authenticator
from appliance.node.context import Node
from appliance.node.directory import Directory
from appliance.node.replica_metrics import ReplicaMetrics


class MetricsResource(NodeResource):
    def __init__(self, node: Node, authenticator: Authenticator) -> None:
        super().__init__(node, authenticator)
        self.replica_metrics = ReplicaMetrics(node)

    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        existing: Mapping[str, Instance] | None = None
        instances: list[InstanceView] = []
        names: Collection[str] | None = None
        with suppress(Problem):  # the state cannot be read: what was counted is still true
            existing = self.node.state.read().instances
            names = self.names(existing)
        with self.replica_metrics.asked((existing or {}).values()) as of_replicas:
            with suppress(Problem):  # supervisord is away
                instances = overview.show_all(self.node)
            counted = metrics.merged(Path(self.node.layout.metrics), names, express_metrics.families(self.node))
            response.text = counted + metrics.gauges(present(instances)) + of_replicas()
        response.content_type = "text/plain; version=0.0.4; charset=utf-8"

    @cached_property
    def directory(self) -> Directory:
        return Directory.of(self.node.settings)

    def names(self, own: Collection[str]) -> Collection[str] | None:
        """Of the instances that callers can reach, also where others run them. None: not known yet."""
        self.directory.refresh()
        reached = {route.name for route in self.directory.table.all}
        return {*own, *reached} if reached or self.node.settings.has_state_directory else None


def present(instances: list[InstanceView]) -> list[MeasuredGauge]:
    replicas = [(instance, replica) for instance in instances for replica in instance.replicas]
    gpus = nvml.devices()
    return [
        MeasuredGauge("instances_count", "Instances that exist", (), [((), len(instances))]),
        MeasuredGauge(
            "instance_wanted",
            "Whether the instance shall run: it was not stopped",
            ("instance",),
            [((one.name,), float(one.status not in ("stopped", "stopping", "sleeping"))) for one in instances],
        ),
        MeasuredGauge(
            "instance_up",
            "Whether the replica answers",
            ("instance", "replica"),
            [((one.name, str(each.index)), float(each.status == "running")) for one, each in replicas],
        ),
        MeasuredGauge(
            "gpu_memory_used_bytes",
            "Memory in use on the GPU",
            ("gpu",),
            [((str(gpu.index),), gpu.memory_used) for gpu in gpus if gpu.memory_used is not None],
        ),
        MeasuredGauge(
            "gpu_memory_total_bytes",
            "Memory of the GPU",
            ("gpu",),
            [((str(gpu.index),), gpu.memory_total) for gpu in gpus if gpu.memory_total is not None],
        ),
        MeasuredGauge(
            "gpu_utilization_ratio",
            "How busy the GPU is, 0 to 1",
            ("gpu",),
            [((str(gpu.index),), gpu.utilization) for gpu in gpus if gpu.utilization is not None],
        ),
    ]
