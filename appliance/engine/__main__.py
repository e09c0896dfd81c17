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

# Set before anything imports a math library: only onnxruntime's threads, whose number is set, may compute.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # onnxruntime reports to Microsoft otherwise (1.31)

from appliance import __version__
from appliance.core import engine_flags
from appliance.core.layout import Layout
from appliance.core.problems import Kind, Problem
from appliance.core.program import LOG_VARIABLE
from appliance.core.settings import KNOBS
from appliance.drivers import configfile, hub, memory, output, ports
from appliance.drivers.ending import leave
from appliance.drivers.grpcserver import Server
from appliance.drivers.signals import ShutdownSignals
from appliance.drivers.statefile import StateFile
from appliance.engine import http
from appliance.engine.answers import Answers
from appliance.engine.model import LoadedModel
from appliance.engine.runtime import MOST_AT_ONCE, threads_for
from appliance.engine.service import Service
from appliance.node.integrity import refuse_changed
from appliance.wire.tei.v1 import tei_pb2 as tei

log = logging.getLogger("appliance.engine")
THREADS = 1024 + 64  # of RPCs; further calls would only wait for a permit
MODEL_TYPES = {"classifier": tei.MODEL_TYPE_CLASSIFIER, "reranker": tei.MODEL_TYPE_RERANKER}
FITTING = {
    "classifier": ("tei.v1.Predict",),
    "reranker": ("tei.v1.Predict", "tei.v1.Rerank"),
    "multivector": ("tei.v1.Embed", "tei.v1.Rerank"),
}
MESSAGE_BYTES = 64 * 1024 * 1024
CORES_VARIABLE = KNOBS["engine_cores"].metadata["env"]
DRAIN_SECS = 3600.0  # supervisord's stopwaitsecs is the real limit


def main() -> int:
    try:
        arguments = engine_flags.parse(None)
    except Problem as problem:
        print(f"appliance.engine: {problem.message}", file=sys.stderr)
        return 2
    memory.limit_malloc()
    level, *_ = os.environ.get(LOG_VARIABLE, "info").split(",")  # what follows is about parts of TEI
    output.configure(level=level.upper(), json_lines=arguments.json_output)
    try:
        run(arguments)
    except Problem as problem:
        log.error("%s", problem.message)
        return 1
    return 0


def run(arguments: argparse.Namespace) -> None:
    if ports.busy([arguments.port], arguments.hostname):
        raise Problem(Kind.UNAVAILABLE, "PORT_CONFLICT", f"Port {arguments.port} on {arguments.hostname} is in use")
    for name, why in engine_flags.ignored(arguments).items():
        log.info("%s is ignored: %s", name, why)
    began = time.monotonic()
    model = load(arguments)
    service = Service(Answers(model, arguments.max_client_batch_size), info(arguments, model))
    server = Server(THREADS, MESSAGE_BYTES, shared_port=False)
    for name, handlers in service.handlers().items():
        server.add(name, handlers)
    follow_health(server, model)
    shutdown = ShutdownSignals()
    memory.freeze_startup_objects()
    memory.disable_automatic_collection()
    server.start(arguments.hostname, arguments.port)
    http.serve(arguments.hostname, arguments.prometheus_port, model.metrics.text, model.metrics.work_text)
    log.info("Ready after %.2f s: %s on port %s", time.monotonic() - began, arguments.model_id, arguments.port)
    shutdown.wait(tick=memory.collect_young, tidy=memory.collect_and_trim)
    log.info("Draining: running calls end, new ones are refused")
    server.stop(DRAIN_SECS, idle=model.permits.idle)


def load(arguments: argparse.Namespace) -> LoadedModel:
    cache = arguments.huggingface_hub_cache
    # The threads of torch and of OpenVINO belong to no batch, and spin: several such engines want cores of their own.
    shared = arguments.runtime == "onnxruntime" and os.environ.get(CORES_VARIABLE, "shared") == "shared"
    refuse_changed(configfile.data_dir(os.environ), arguments.model_id, arguments.revision, cache)
    folder = hub.find(arguments.model_id, arguments.revision, cache)
    return LoadedModel(
        folder=folder,
        graphs=Path(Layout(configfile.data_dir(os.environ)).graphs),
        threads=arguments.threads or threads_for(1 if shared else engines(os.environ), cores()),
        cores=core_locks(os.environ, arguments.port) if shared and not arguments.threads else (),
        pooling=arguments.pooling,
        max_batch_tokens=arguments.max_batch_tokens,
        max_batch_requests=arguments.max_batch_requests,
        max_concurrent_requests=arguments.max_concurrent_requests,
        default_prompt=arguments.default_prompt,
        default_prompt_name=arguments.default_prompt_name,
        by_length=not arguments.arrival_order,
        runtime=arguments.runtime,
        dtype=arguments.dtype,
    )


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def core_locks(environ: Mapping[str, str], port: int) -> list[Path]:
    """Of every core, by which the engines of an appliance share them; none for an engine without an appliance.

    Of more cores than an engine has batches at once it prefers the first: these are others for the next port.
    """
    if "TEI_MANAGER_STATE_FILE" not in environ:
        return []
    layout, count = Layout(configfile.data_dir(environ)), cores()
    first = port * MOST_AT_ONCE % count if count > MOST_AT_ONCE else 0
    return [Path(layout.core_lock((first + number) % count)) for number in range(count)]


def engines(environ: Mapping[str, str]) -> int:
    """How many replicas the appliance wants on this machine; 1 for an engine that runs without an appliance."""
    path = environ.get("TEI_MANAGER_STATE_FILE")
    wanted = StateFile(path, now=str, on_repair=log.warning).read().generations if path else ()
    return sum(each.spec.replicas for each in wanted if each.wanted == "running") or 1


def follow_health(server: Server, model: LoadedModel) -> None:
    """grpc.health.v1 as TEI has it: the services that fit the model say whether its last batch could be computed."""
    fits = FITTING.get(model.card.task, ("tei.v1.Embed",))
    for service in ("tei.v1.Embed", "tei.v1.Predict", "tei.v1.Rerank"):
        server.set_health(service, service in fits)

    def on_health(ok: bool) -> None:
        for service in fits:
            server.set_health(service, ok)

    model.on_health = on_health


def info(arguments: argparse.Namespace, model: LoadedModel) -> tei.InfoResponse:
    """The fixed answer to Info."""
    answer = tei.InfoResponse(
        version=__version__,
        model_id=arguments.model_id,
        model_dtype=model.runtime.dtype,
        model_type=MODEL_TYPES.get(model.card.task, tei.MODEL_TYPE_EMBEDDING),
        max_concurrent_requests=arguments.max_concurrent_requests,
        max_input_length=model.max_tokens,
        max_batch_tokens=arguments.max_batch_tokens,
        max_client_batch_size=arguments.max_client_batch_size,
        tokenization_workers=arguments.tokenization_workers or 1,
    )
    if arguments.revision:
        answer.model_sha = arguments.revision
    if arguments.max_batch_requests:
        answer.max_batch_requests = arguments.max_batch_requests
    return answer


if __name__ == "__main__":
    leave(main())
