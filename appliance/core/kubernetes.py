"""The instances of an appliance on a Kubernetes cluster, as values: their names there, and what cannot be had there.

A cluster decides where a replica runs, so GPUs are counted and not chosen, and each replica has an address of its own,
so all of them have the same ports. What an instance asks for and a cluster cannot give is told (`Workload.notes`) or
refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from appliance.core import engine_flags
from appliance.core.instance import AUTO, InstanceSpec
from appliance.core.model_names import HUB_ID
from appliance.core.problems import invalid, quoted
from appliance.core.servable import RUNTIMES, chosen_dtype

MODELS_DIR = "/models"  # where pods have the volume with the models
GRPC_PORT, METRICS_PORT = 8080, 9100  # of every replica
PREFIX = "tei-"  # of the objects of an instance; those of the front have another
# A pod is named after its Deployment, with 17 characters more, and a label has 63 at most.
LONGEST = 63 - 17 - len(PREFIX)
DIGITS = 10  # of the digest in a name
LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
PLAIN = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?")
DIGESTED = re.compile(rf"-[0-9a-f]{{{DIGITS}}}$")
SUBDOMAIN = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
QUANTITY = re.compile(r"[1-9][0-9]{0,11}(?:[KMGTPE]i|[kMGTPE])?")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}")
URL = re.compile(r"https?://[A-Za-z0-9.\[\]:_/-]{1,500}")
ACCESS_MODES = ("ReadWriteMany", "ReadWriteOnce")
# The service of grpc.health.v1 that follows the health of a model of the task (TEI 1.9). Others stay NOT_SERVING.
SERVICES = {
    "embedding": "tei.v1.Embed",
    "sparse": "tei.v1.Embed",
    "multivector": "tei.v1.Embed",
    "reranker": "tei.v1.Rerank",
    "classifier": "tei.v1.Predict",
}
# In extra_args they would be secrets in clear, or folders of this machine.
REFUSED_FLAGS = {
    "--hf-token": "a token is no part of a manifest: name the Secret that has it (--hub-secret)",
    "--hf-api-token": "a token is no part of a manifest: name the Secret that has it (--hub-secret)",
    "--huggingface-hub-cache": f"pods have their cache in {MODELS_DIR}",
}
OWN_FLAGS = ("--runtime", "--threads", "--arrival-order")  # of the embedded engine, which TEI refuses


@dataclass(frozen=True)
class Cluster:
    """What the cluster is told besides the instances. Empty: without.

    image: of the appliance; tei_image, tei_cpu_image: of TEI's gRPC build. memory: that a replica asks for.
    max_replicas: of an instance, 0: as many as it has. gateway: [NAMESPACE/]NAME of the Gateway API's.
    monitoring: the namespace that Prometheus runs in; callers: the namespaces that may call the front, besides its own.
    The secrets are names of Secrets in the namespace.
    """

    namespace: str
    image: str
    tei_image: str
    tei_cpu_image: str
    storage: str
    storage_class: str = ""
    access_mode: str = ACCESS_MODES[0]
    memory: str = "4Gi"
    front_replicas: int = 2
    max_replicas: int = 0
    from_zero: bool = False
    prometheus: str = "http://prometheus.monitoring:9090"
    monitoring: str = "monitoring"
    gateway: str = ""
    callers: tuple[str, ...] = ()
    tls_secret: str = ""
    keys_secret: str = ""
    hub_secret: str = ""

    def __post_init__(self) -> None:
        """Raises: Problem invalid."""
        for name, value in {"--namespace": self.namespace, "--monitoring-namespace": self.monitoring}.items():
            checked(name, value, LABEL, "the name of a namespace")
        for value in self.callers:
            checked("--callers", value, LABEL, "the name of a namespace")
        for name, value in {
            "--image": self.image,
            "--tei-image": self.tei_image,
            "--tei-cpu-image": self.tei_cpu_image,
        }.items():
            checked(name, value, IMAGE, "the name of an image")
        for name, value in {"--storage": self.storage, "--memory": self.memory}.items():
            checked(name, value, QUANTITY, "a quantity such as 50Gi")
        names = {
            "--storage-class": self.storage_class,
            "--tls-secret": self.tls_secret,
            "--keys-secret": self.keys_secret,
            "--hub-secret": self.hub_secret,
        }
        for name, value in names.items():
            checked(name, value or "unset", SUBDOMAIN, "a name of Kubernetes")
        checked("--prometheus", self.prometheus, URL, "the URL of a Prometheus")
        for part in self.gateway.split("/") if self.gateway else ():
            checked("--gateway", part, SUBDOMAIN, "NAME or NAMESPACE/NAME of a Gateway")
        if self.gateway.count("/") > 1:
            raise invalid(f"--gateway {quoted(self.gateway)} must be NAME or NAMESPACE/NAME of a Gateway")
        if self.from_zero and not self.max_replicas:
            raise invalid("--from-zero scales instances down to nothing: --max-replicas says how far up")

    @property
    def gateway_namespace(self) -> str:
        return self.gateway.rpartition("/")[0] or self.namespace

    @property
    def gateway_name(self) -> str:
        return self.gateway.rpartition("/")[2]


@dataclass(frozen=True)
class Workload:
    """An instance as it runs there. name: of its objects. engine: tei or embedded. task: of its model, empty where it
    is not known. on_gpu: whether each replica gets a GPU. notes: what is not as it is here."""

    spec: InstanceSpec
    name: str
    engine: str
    wanted: bool
    startup_secs: int
    task: str
    on_gpu: bool
    notes: tuple[str, ...]

    @property
    def service(self) -> str:
        """What its health is asked for; empty for the whole server, which opens its port when the model can answer."""
        return SERVICES.get(self.task, "")

    def is_scaled(self, cluster: Cluster) -> bool:
        return bool(cluster.max_replicas) and self.wanted and not self.spec.metrics_off

    @property
    def downloads(self) -> bool:
        return self.spec.download == "auto" and not self.spec.model_id.startswith("/")


def checked(flag: str, value: str, pattern: re.Pattern[str], kind: str) -> None:
    """Raises: Problem invalid."""
    if not pattern.fullmatch(value):
        raise invalid(f"{flag} {quoted(value)} is not {kind}")


def object_name(instance: str) -> str:
    """The name of an instance's objects: DNS-1123, and never that of another instance.

    A name that is none there, or that looks as if it had a digest, gets a digest.
    """
    if PLAIN.fullmatch(instance) and len(instance) <= LONGEST and not DIGESTED.search(instance):
        return PREFIX + instance
    digest = hashlib.sha256(instance.encode()).hexdigest()[:DIGITS]
    readable = re.sub(r"[^a-z0-9]+", "-", instance.lower())[: LONGEST - DIGITS - 1].strip("-")
    return f"{PREFIX}{readable}-{digest}"


def workloads(
    specs: Iterable[InstanceSpec],
    stopped: Iterable[str],
    engines: Mapping[str, str],
    startup_secs: int,
    tasks: Mapping[str, str],
    every_gpu: bool,
) -> list[Workload]:
    """In the order of their names. engines, tasks: by the name of the instance; startup_secs: of those that ask for no
    limit of their own; every_gpu: TEI has a GPU also where no instance names one. Raises: Problem that names the
    instance."""
    asleep = frozenset(stopped)
    found = [
        workload(spec, spec.name not in asleep, engines[spec.name], startup_secs, tasks.get(spec.name, ""), every_gpu)
        for spec in sorted(specs, key=lambda spec: spec.name)
    ]
    by_name: dict[str, str] = {}
    for each in found:
        if each.name in by_name:
            raise invalid(
                f'Instances "{by_name[each.name]}" and "{each.spec.name}" would both be {each.name}: rename one'
            )
        by_name[each.name] = each.spec.name
    return found


def workload(spec: InstanceSpec, wanted: bool, engine: str, startup_secs: int, task: str, every_gpu: bool) -> Workload:
    refuse_what_stays_here(spec, engine)
    asks_for_gpu = bool(spec.gpus or spec.gpu_ids == AUTO)
    on_gpu = engine == "tei" and (asks_for_gpu or every_gpu)
    return Workload(
        spec=spec,
        name=object_name(spec.name),
        engine=engine,
        wanted=wanted,
        startup_secs=spec.startup_timeout_secs or startup_secs,
        task=task,
        on_gpu=on_gpu,
        notes=tuple(notes(spec, engine, wanted, task, on_gpu)),
    )


def refuse_what_stays_here(spec: InstanceSpec, engine: str) -> None:
    """Raises: Problem for a model or a flag that means something on this machine only."""
    where = f'Instance "{spec.name}"'
    if not (HUB_ID.fullmatch(spec.model_id) or is_in_volume(spec.model_id)):
        raise invalid(
            f"{where} serves the folder {quoted(spec.model_id)}, which pods do not have: use a hub id, or put the "
            f"folder into the volume of the models and name it {MODELS_DIR}/..."
        )
    for argument in spec.extra_args:
        flag = argument.partition("=")[0]
        if why := REFUSED_FLAGS.get(flag):
            raise invalid(f"{where} has {flag} in extra_args: {why}")
        if engine == "tei" and flag in OWN_FLAGS:
            raise invalid(f"{where} has {flag} in extra_args, which TEI does not take: leave out --engine tei")
    if engine == "embedded":
        given = engine_flags.of_instance(spec.model_id, spec.extra_args)
        chosen_dtype(given.runtime, spec.dtype)


def is_in_volume(model_id: str) -> bool:
    parts = model_id.split("/")
    return model_id.startswith(f"{MODELS_DIR}/") and not {"", ".", ".."} & set(parts[1:])


def notes(spec: InstanceSpec, engine: str, wanted: bool, task: str, on_gpu: bool) -> Iterable[str]:
    """What of an instance is not as it is here, a sentence each."""
    if not wanted:
        yield "It is stopped, so it has no replicas; a start here is `kubectl scale`."
    if spec.gpus:
        named = ", ".join(map(str, spec.gpus))
        yield f"It names the GPUs {named} of this machine; the cluster chooses among its own, one for each replica."
    if engine == "embedded" and (spec.gpus or spec.gpu_ids == AUTO):
        yield "The embedded engine of the image computes on the CPU, so no GPU is asked for."
    elif engine == "tei" and not on_gpu:
        yield "It names no GPU, so TEI's image for CPUs serves it (--gpus all: everything that TEI serves has one)."
    if spec.metrics_off:
        yield "Its metrics are off, so Prometheus is not sent to it, and it is not scaled."
    if spec.express:
        yield "There is no express lane: the front's multiplexer takes its calls."
    runtime = spec.flag("--runtime") or RUNTIMES[0]
    if engine == "embedded" and runtime != RUNTIMES[0]:
        yield f"It needs an image that has the extra {runtime} as well."
    if spec.download == "never":
        yield f"Nothing is downloaded for it: its model must be in the cache of the volume ({MODELS_DIR}/hub)."
    if not task:
        yield "The task of its model is not known here, so probes ask the whole server: it answers once loaded."
