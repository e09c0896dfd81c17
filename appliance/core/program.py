"""An instance becomes programs: argv, environment and times for each replica.

TEI and the embedded engine take the same flags, so they differ only in the binary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from appliance.core.instance import InstanceSpec
from appliance.core.layout import CLUSTER, EXPRESS
from appliance.core.models import Job
from appliance.core.problems import invalid
from appliance.core.settings import Settings
from appliance.core.state import Instance

LOOPBACK = "127.0.0.1"
# In the environment of every replica: it distinguishes a replica from left-over ones and from other programs.
MARKER = "TEI_APPLIANCE_REPLICA"

# TEI reads every flag from an environment variable of the same name, generic ones included (TEI 1.9, `--help`). Our own
# gunicorn reads PORT and WEB_CONCURRENCY. None of them may decide anything here, so they are removed from the
# environment that supervisord hands down; HF_*, CUDA_*, LOG_LEVEL and the rest pass through.
SCRUBBED_VARIABLES = frozenset(
    """
    MODEL_ID REVISION TOKENIZATION_WORKERS DTYPE SERVED_MODEL_NAME POOLING MAX_CONCURRENT_REQUESTS MAX_BATCH_TOKENS
    MAX_BATCH_REQUESTS MAX_CLIENT_BATCH_SIZE AUTO_TRUNCATE DEFAULT_PROMPT_NAME DEFAULT_PROMPT DENSE_PATH HOSTNAME PORT
    UDS_PATH PAYLOAD_LIMIT API_KEY JSON_OUTPUT DISABLE_SPANS OTLP_ENDPOINT OTLP_SERVICE_NAME PROMETHEUS_PORT
    CORS_ALLOW_ORIGIN TASK AIP_HTTP_PORT AIP_PREDICT_ROUTE AIP_HEALTH_ROUTE WEB_CONCURRENCY GUNICORN_CMD_ARGS
    TEI_APPLIANCE_KEY TEI_APPLIANCE_CERT TEI_APPLIANCE_CERT_KEY
    """.split()
)


TRACES_FLAG = "--otlp-endpoint"
LOG_VARIABLE = "LOG_LEVEL"
CLUSTER_END_SECS = 60  # above the time that replicas have to move
EXPRESS_END_SECS = 10  # above the time that it gives to calls in progress
# TEI (1.9) writes a line of 1 kB for each request, at the level and under the names of those of its start: what is lost
# with them is "Starting gRPC server" and "Ready". Unless the caller of `up` has a LOG_LEVEL of his own.
NO_REQUEST_LINES = "info,text_embeddings_router::grpc::server=warn,text_embeddings_router::http::server=warn"


@dataclass(frozen=True)
class Program:
    """One supervised process. ``argv[0]`` is the binary; times are seconds.

    log_backups: how many earlier log files of ``log_bytes`` are kept.
    """

    name: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    autostart: bool
    start_secs: int
    start_retries: int
    stop_wait_secs: int
    log_file: str
    log_bytes: int
    log_backups: int
    autorestart: str = "true"
    stop_as_group: bool = True  # TERM reaches all of its processes at once


def marker(node_id: str, name: str, replica: int, launch: int) -> str:
    """What the processes of one replica bear that were started for this launch. node_id: the id of the appliance."""
    return f"{node_id}:{name}:{replica}:{launch}"


def engine_of(instance: Instance, settings: Settings) -> str:
    """``tei`` or ``embedded``: as asked, else by what is installed."""
    return instance.spec.engine or default_engine(settings)


def default_engine(settings: Settings) -> str:
    return "tei" if settings.tei_binary_path else "embedded"


def startup_timeout(instance: Instance, settings: Settings) -> int:
    return instance.spec.startup_timeout_secs or settings.startup_timeout_secs


def refuse_missing_engine(engine: str | None, settings: Settings) -> None:
    """Raises: Problem when TEI is asked for by name and is not installed."""
    if engine == "tei" and not settings.tei_binary_path:
        raise invalid(
            'Field "engine" asks for "tei", but text-embeddings-router is not on PATH: install it, set '
            'tei_binary_path, or use "embedded"'
        )


def programs_of(instance: Instance, settings: Settings, python: str, node_id: str) -> list[Program]:
    """One Program per replica of one generation. python: the interpreter of the embedded engine. node_id: this
    appliance's short id."""
    engine = engine_of(instance, settings)
    return [
        Program(
            name=instance.process(replica),
            argv=(*binary(engine, settings, python), *arguments(instance, replica)),
            environment=environment(instance, replica, node_id),
            autostart=instance.wanted == "running" and not instance.lacks_model,
            # Dying before start_secs counts as a failed start, and start_retries of those in a row are FATAL: the
            # crash-loop fuse. TEI takes seconds to minutes before it fails on a bad model, the engine about one.
            start_secs=5 if engine == "embedded" else 60,
            start_retries=4,
            stop_wait_secs=settings.graceful_shutdown_timeout_secs,
            log_file=settings.layout.log(instance.process(replica)),
            log_bytes=settings.log_bytes,
            log_backups=settings.log_backups,
        )
        for replica in range(instance.spec.replicas)
    ]


def express_program(settings: Settings, python: str, node_id: str) -> Program:
    """Envoy, while an instance asks for the express lane."""
    return own_program(EXPRESS, settings, python, node_id, start_secs=1, end_secs=EXPRESS_END_SECS)


def cluster_program(settings: Settings, python: str, node_id: str) -> Program:
    """Ray, where this machine is one of a cluster. TERM reaches its first process alone, which lets replicas move to
    other machines before it ends the others."""
    program = own_program(CLUSTER, settings, python, node_id, start_secs=5, end_secs=CLUSTER_END_SECS)
    return replace(program, stop_as_group=False)


def own_program(name: str, settings: Settings, python: str, node_id: str, start_secs: int, end_secs: int) -> Program:
    """The program of ours in the folder of that name. end_secs: above the time that calls in progress have."""
    return Program(
        name=name,
        argv=(python, "-m", f"appliance.{name}"),
        environment={MARKER: marker(node_id, name, 0, 0)},
        autostart=True,
        start_secs=start_secs,
        start_retries=1000,
        stop_wait_secs=settings.graceful_shutdown_timeout_secs + end_secs,
        log_file=settings.layout.log(name),
        log_bytes=settings.log_bytes,
        log_backups=settings.log_backups,
    )


def job_program(job: Job, settings: Settings, python: str, node_id: str) -> Program:
    """The process of a job: started again when it dies, and not when it ends."""
    return Program(
        name=job.program,
        argv=(python, "-m", "appliance.jobs", str(job.number)),
        environment={MARKER: f"{node_id}:{job.program}:0:{job.number}"},
        autostart=True,
        start_secs=0,
        start_retries=3,
        stop_wait_secs=10,
        log_file=settings.layout.log(job.program),
        log_bytes=settings.log_bytes,
        log_backups=settings.log_backups,
        autorestart="unexpected",
    )


def binary(engine: str, settings: Settings, python: str) -> tuple[str, ...]:
    if engine == "tei":
        return (python, "-m", "appliance.tei", settings.tei_binary_path)
    return (python, "-m", "appliance.engine")


def arguments(instance: Instance, replica: int) -> tuple[str, ...]:
    return flags(instance.spec, LOOPBACK, instance.ports[replica], instance.prometheus_ports[replica])


def flags(spec: InstanceSpec, host: str, port: int, prometheus_port: int) -> tuple[str, ...]:
    """TEI's flags. host: ``--hostname`` must be an IP literal, because TEI turns any other value into 0.0.0.0 (1.9)."""
    values = {
        "--model-id": spec.model_id,
        "--revision": spec.revision,
        "--hostname": host,
        "--port": port,
        "--prometheus-port": prometheus_port,
        "--max-batch-tokens": spec.max_batch_tokens,
        "--max-concurrent-requests": spec.max_concurrent_requests,
        "--pooling": spec.pooling,
        "--dtype": spec.dtype,
    }
    chosen = [part for flag, value in values.items() if value is not None for part in (flag, str(value))]
    return (*chosen, "--json-output", *spec.extra_args)


def environment(instance: Instance, replica: int, node_id: str) -> dict[str, str]:
    """What one replica gets on top of the inherited environment."""
    own = {MARKER: marker(node_id, instance.name, replica, instance.launch)}
    gpu = instance.gpu_of(replica)
    if gpu is not None:  # else it sees what the appliance itself may see
        own |= {"CUDA_VISIBLE_DEVICES": str(gpu), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return own | asked_lines(instance.spec)


def asked_lines(spec: InstanceSpec) -> dict[str, str]:
    """The variable that gives an instance TEI's line for each request, where it asks for them."""
    # What hides the lines also hides the spans that are sent to a collector.
    asked = spec.request_logs or any(arg.startswith(TRACES_FLAG) for arg in spec.extra_args)
    return {LOG_VARIABLE: "info"} if asked else {}
