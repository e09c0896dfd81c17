"""A replica of an instance on a cluster: a TEI or engine process beside an actor of Serve, which tells where it is.

No text goes through the actor: multiplexers call the process itself. Serve takes the replica for running when its
process has answered, and moves it elsewhere when that ends or is silent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from appliance.cluster.child import Child
from appliance.cluster.scaling import IDLE, QUEUE
from appliance.core.addresses import address
from appliance.core.health import ProbeResult
from appliance.core.instance import InstanceSpec
from appliance.core.program import MARKER, asked_lines, binary, flags, marker, refuse_missing_engine
from appliance.core.settings import Settings
from appliance.drivers import configfile, ports
from appliance.drivers.scraping import metrics_page
from appliance.export.ray import DRAIN_SECS
from appliance.node.context import node_id
from appliance.node.probe import Heard, ProbeTarget, ServedModel, probe
from appliance.node.servable import vectors_of
from appliance.wire import exposition

PROBE_SECS = 10.0
POLL_SECS = 0.1
METRICS_SECS = 0.75


class ClusterReplica:
    """wanted: as `export.ray.arguments`. host: the address of this machine in the cluster. replica_id: Serve's."""

    def __init__(self, wanted: Mapping[str, Any], host: str, replica_id: str) -> None:
        settings = configfile.load(os.environ)
        spec = InstanceSpec.parse(wanted["instance"])
        self.replica_id, self.host = replica_id, host
        self.graceful_secs = settings.graceful_shutdown_timeout_secs
        self.most_failures = settings.max_failures_before_restart
        self.failures, self.detail = 0, ""
        self.is_ready = False
        # At the last look: texts that the process has begun, our probes among them; and when it last had others.
        self.begun, self.probes_then, self.called_at = 0.0, 0, time.monotonic()
        fetch(spec, wanted["engine"], settings)
        self.port, self.metrics_port = ports.unused(host, 2)
        self.heard = Heard(model=ServedModel(vectors=vectors_of(spec)))
        self.probes = 0
        self.probing = threading.Lock()
        self.child = Child(
            (
                *binary(wanted["engine"], settings, sys.executable),
                *flags(spec, host, self.port, self.metrics_port),
            ),
            {MARKER: marker(node_id(settings.data_dir), spec.name, 0, 0), **asked_lines(spec)},
            on_end=self.hear_of_end,
        )
        self.wait_until_it_answers(wanted["startup_secs"])
        self.is_ready = True

    def hear_of_end(self, status: int) -> None:
        """The process has ended by itself. Serve sees at once that this replica is gone."""
        if self.is_ready:
            os._exit(1)

    def wait_until_it_answers(self, secs: float) -> None:
        """Raises: RuntimeError with the last lines of the process."""
        deadline = time.monotonic() + secs
        while not (ports.answers(self.host, self.port) and self.answers()):
            if self.child.ended.is_set() or time.monotonic() > deadline:
                why = "ended" if self.child.ended.is_set() else f"did not answer within {secs:g} s"
                self.child.stop(0)
                tail = "\n".join(self.child.lines)
                raise RuntimeError(f"The replica {why}. Its last lines:\n{tail}")
            time.sleep(POLL_SECS)

    def answers(self) -> bool:
        with self.probing:
            self.probes += 1
            result, detail = probe(self.target(), PROBE_SECS, self.heard)
        self.detail = detail
        return result is not ProbeResult.MISSED

    def target(self) -> ProbeTarget:
        return ProbeTarget(
            self.port, self.metrics_port, proved=lambda port: True, model=self.heard.model, host=self.host
        )

    def check_health(self) -> None:
        """Called by Serve. Raises: RuntimeError when the process has not answered several times in a row."""
        self.failures = 0 if self.answers() else self.failures + 1
        if self.most_failures and self.failures >= self.most_failures:
            raise RuntimeError(f"{self.failures} probes in a row were not answered: {self.detail}")

    async def address(self) -> dict[str, Any]:
        """What the directory asks of each replica."""
        return {"id": self.replica_id, "address": address(self.host, self.port), "pid": self.child.pid}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve, for `scaling.QueuePolicy`. Nothing where the process does not tell."""
        page = metrics_page(self.metrics_port, METRICS_SECS, host=self.host)
        if page is None:
            return {}
        work, probes = exposition.work(page), self.probes
        begun = work.begun if work else self.begun
        if begun - self.begun > probes - self.probes_then:
            self.called_at = time.monotonic()
        self.begun, self.probes_then = begun, probes
        return {QUEUE: exposition.total(page, "te_queue_size"), IDLE: time.monotonic() - self.called_at}

    def __del__(self) -> None:
        """Called by Serve when this replica is to end. Nobody finds it any more; multiplexers notice a moment later."""
        if child := getattr(self, "child", None):
            time.sleep(DRAIN_SECS)
            child.stop(self.graceful_secs)


def fetch(spec: InstanceSpec, engine: str, settings: Settings) -> None:
    """The model's files onto this machine, unless they are there. Raises: RuntimeError, Problem."""
    refuse_missing_engine(engine, settings)
    if os.path.isabs(spec.model_id) or spec.download == "never":
        return
    command = [sys.executable, "-m", "appliance.jobs.fetch", spec.model_id]
    command += ["--revision", spec.revision] if spec.revision else []
    command += ["--allow-pickle"] if settings.allow_pickle else []
    command += ["--packages"] if engine == "embedded" else []
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        raise RuntimeError(f"The model is not here and cannot be fetched:\n{done.stdout[-2000:]}")
