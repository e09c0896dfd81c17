"""`python -m appliance.engine`: load a model, warm it up, then open the port. Exit status as TEI's: 1 bad model or
busy port, 2 bad flag, 0 after a graceful stop."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from appliance.core.layout import Layout

# Before anything imports a math library: only onnxruntime's threads, which are counted, shall compute.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # onnxruntime reports to Microsoft otherwise (1.31)

from appliance import __version__
from appliance.core.problems import Kind, Problem
from appliance.drivers import configfile, hub, memory, output, ports
from appliance.drivers.grpcserver import Server
from appliance.drivers.signals import Ending
from appliance.drivers.statefile import StateFile
from appliance.engine import flags, http
from appliance.engine.answers import Answers
from appliance.engine.model import Model
from appliance.engine.runtime import threads_for
from appliance.engine.service import Service
from appliance.node.integrity import refuse_changed
from appliance.wire.tei.v1 import tei_pb2 as tei

log = logging.getLogger("appliance.engine")
THREADS = 1024 + 64  # of RPCs; more wait for a permit anyway
MODEL_TYPES = {"classifier": tei.MODEL_TYPE_CLASSIFIER, "reranker": tei.MODEL_TYPE_RERANKER}
FITTING = {"classifier": ("tei.v1.Predict",), "reranker": ("tei.v1.Predict", "tei.v1.Rerank")}
MESSAGE_BYTES = 64 * 1024 * 1024
DRAIN_SECS = 3600.0  # supervisord's stopwaitsecs is the real limit


def main() -> int:
    given = flags.parse()
    memory.limit_malloc()
    output.configure(level=os.environ.get("LOG_LEVEL", "info").upper(), json_lines=given.json_output)
    try:
        run(given)
    except Problem as problem:
        log.error("%s", problem.message)
        return 1
    return 0


def run(given: argparse.Namespace) -> None:
    if ports.busy([given.port], given.hostname):
        raise Problem(Kind.UNAVAILABLE, "PORT_CONFLICT", f"Port {given.port} on {given.hostname} is in use")
    began = time.monotonic()
    model = load(given)
    service = Service(Answers(model, given.max_client_batch_size), info(given, model))
    server = Server(THREADS, MESSAGE_BYTES, shared_port=False)
    for name, handlers in service.handlers().items():
        server.add(name, handlers)
    follow_health(server, model)
    ending = Ending()
    memory.freeze_startup_objects()
    server.start(given.hostname, given.port)
    http.serve(given.hostname, given.prometheus_port, model.metrics.text)
    log.info("Ready after %.2f s: %s on port %s", time.monotonic() - began, given.model_id, given.port)
    ending.wait(tidy=memory.collect_and_trim)
    log.info("Draining: running calls end, new ones are refused")
    server.stop(DRAIN_SECS, idle=model.permits.idle)


def load(given: argparse.Namespace) -> Model:
    cache = given.huggingface_hub_cache
    refuse_changed(configfile.data_dir(os.environ), given.model_id, given.revision, cache)
    folder = hub.find(given.model_id, given.revision, cache)
    return Model(
        folder=folder,
        graphs=Path(Layout(configfile.data_dir(os.environ)).graphs),
        threads=given.threads or threads_for(engines(os.environ), cores()),
        pooling=given.pooling,
        max_batch_tokens=given.max_batch_tokens,
        max_batch_requests=given.max_batch_requests,
        max_concurrent_requests=given.max_concurrent_requests,
        default_prompt=given.default_prompt,
        default_prompt_name=given.default_prompt_name,
        by_length=not given.arrival_order,
        runtime=given.runtime,
        dtype=given.dtype,
    )


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def engines(environ: Mapping[str, str]) -> int:
    """How many replicas the appliance wants on this machine; 1 for an engine that runs by itself."""
    path = environ.get("TEI_MANAGER_STATE_FILE")
    wanted = StateFile(path, now=str, on_repair=log.warning).read().instances.values() if path else ()
    return sum(instance.spec.replicas for instance in wanted if instance.wanted == "running") or 1


def follow_health(server: Server, model: Model) -> None:
    """grpc.health.v1 as TEI has it: the services that fit the model say whether its last batch could be computed."""
    fits = FITTING.get(model.card.task, ("tei.v1.Embed",))
    for service in ("tei.v1.Embed", "tei.v1.Predict", "tei.v1.Rerank"):
        server.set_health(service, service in fits)

    def on_health(ok: bool) -> None:
        for service in fits:
            server.set_health(service, ok)

    model.on_health = on_health


def info(given: argparse.Namespace, model: Model) -> tei.InfoResponse:
    answer = tei.InfoResponse(
        version=__version__,
        model_id=given.model_id,
        model_dtype=model.runtime.dtype,
        model_type=MODEL_TYPES.get(model.card.task, tei.MODEL_TYPE_EMBEDDING),
        max_concurrent_requests=given.max_concurrent_requests,
        max_input_length=model.max_tokens,
        max_batch_tokens=given.max_batch_tokens,
        max_client_batch_size=given.max_client_batch_size,
        tokenization_workers=given.tokenization_workers or 1,
    )
    if given.revision:
        answer.model_sha = given.revision
    if given.max_batch_requests:
        answer.max_batch_requests = given.max_batch_requests
    return answer


if __name__ == "__main__":
    sys.exit(main())
