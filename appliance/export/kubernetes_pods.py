"""What pods of the appliance have in common on Kubernetes, and the pod of a replica.

Pods keep to the `restricted` standard: no root, no capabilities, no writable root. They write to the volume of the
models, to /data and to /tmp alone, as the image says.
"""

from __future__ import annotations

from typing import Any

from appliance.core.kubernetes import GRPC_PORT, METRICS_PORT, MODELS_DIR, Cluster, Workload
from appliance.core.program import LOG_VARIABLE, NO_REQUEST_LINES, asked_lines, binary, flags
from appliance.core.settings import Settings

Object = dict[str, Any]

OWNER = "tei-appliance"
USER = 10001  # of the image
MODELS_CLAIM = "appliance-models"
EVERYWHERE = "0.0.0.0"
DATA_DIR = "/data"
# So long a pod that has been told to end still takes calls: CoreDNS keeps its address for 5 s, and the front asks again
# after a while.
LEAVING_SECS = 15
PROBE_SECS = 5
GPU = "nvidia.com/gpu"


def labels(component: str, name: str) -> dict[str, str]:
    """component: front or replica; name: of the object whose pods they are."""
    return {**selector(component, name), "app.kubernetes.io/part-of": OWNER, "app.kubernetes.io/managed-by": OWNER}


def selector(component: str, name: str) -> dict[str, str]:
    """The labels that a pod keeps for ever."""
    return {
        "app.kubernetes.io/name": OWNER,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/instance": name,
    }


def made(api: str, kind: str, cluster: Cluster, name: str, marks: dict[str, str], **parts: Any) -> Object:
    """An object. marks: its labels."""
    metadata = {"name": name, "namespace": cluster.namespace, "labels": marks}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **parts}


def literal(text: str) -> str:
    """An argument or a variable's value that Kubernetes gives on as it is: it would replace `$(NAME)`."""
    return text.replace("$", "$$")


def variables(**values: str) -> list[Object]:
    return [{"name": name, "value": literal(value)} for name, value in values.items()]


def hub_token(cluster: Cluster) -> list[Object]:
    """HF_TOKEN for models that not everybody may have."""
    if not cluster.hub_secret:
        return []
    return [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": cluster.hub_secret, "key": "token"}}}]


def hub_folders() -> list[Object]:
    return variables(HF_HOME=MODELS_DIR, HUGGINGFACE_HUB_CACHE=f"{MODELS_DIR}/hub", HOME="/tmp")


def confined() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def mount(name: str, path: str, **more: Any) -> Object:
    return {"name": name, "mountPath": path, **more}


def empty(name: str) -> Object:
    return {"name": name, "emptyDir": {}}


def models_volume() -> Object:
    return {"name": "models", "persistentVolumeClaim": {"claimName": MODELS_CLAIM}}


def pod(chosen: dict[str, str], grace_secs: int, **parts: Any) -> Object:
    """The spec of a pod. chosen: the labels by which its kind is chosen; they are spread over the nodes."""
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": chosen},
    }
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_secs,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [spread],
        **parts,
    }


def leaving(secs: int = LEAVING_SECS) -> Object:
    """Seconds before a program is told to end. Needs Kubernetes 1.30."""
    return {"preStop": {"sleep": {"seconds": secs}}}


def replica_pod(each: Workload, cluster: Cluster, settings: Settings) -> Object:
    """The template's spec."""
    grace_secs = settings.graceful_shutdown_timeout_secs + LEAVING_SECS
    parts: Object = {
        "containers": [replica_container(each, cluster, settings)],
        "volumes": [models_volume(), empty("tmp"), *([empty("data")] if each.engine == "embedded" else [])],
    }
    if each.downloads:
        parts = {"initContainers": [fetching(each, cluster, settings)], **parts}
    if each.on_gpu:
        parts["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    return pod(selector("replica", each.name), grace_secs, **parts)


def replica_container(each: Workload, cluster: Cluster, settings: Settings) -> Object:
    embedded = each.engine == "embedded"
    lines = {LOG_VARIABLE: NO_REQUEST_LINES} | asked_lines(each.spec)
    return {
        "name": "replica",
        "image": image_of(each, cluster),
        # TEI's image has the router as its entry point, behind a script that looks for CUDA's libraries.
        **({"command": ["tini", "--", *binary("embedded", settings, "python")]} if embedded else {}),
        "args": [literal(part) for part in flags(each.spec, EVERYWHERE, GRPC_PORT, METRICS_PORT)],
        "env": [
            *hub_folders(),
            *variables(**lines),
            *(variables(TEI_MANAGER_DATA_DIR=DATA_DIR) if embedded else []),
            *hub_token(cluster),
        ],
        "ports": [
            {"name": "grpc", "containerPort": GRPC_PORT},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ],
        "resources": resources(each, cluster),
        **probes(each, settings),
        "lifecycle": leaving(),
        "securityContext": confined(),
        "volumeMounts": [
            mount("models", MODELS_DIR),
            mount("tmp", "/tmp"),
            *([mount("data", DATA_DIR)] if embedded else []),
        ],
    }


def image_of(each: Workload, cluster: Cluster) -> str:
    if each.engine == "embedded":
        return cluster.image
    return cluster.tei_image if each.on_gpu else cluster.tei_cpu_image


def resources(each: Workload, cluster: Cluster) -> Object:
    """Without limits of memory and CPU: what a model takes is not known before, and a limit too low ends replicas again
    and again. GPUs have no other way than a limit."""
    asked = {"requests": {"cpu": "1", "memory": cluster.memory}}
    return asked | ({"limits": {GPU: "1"}} if each.on_gpu else {})


def probes(each: Workload, settings: Settings) -> Object:
    """They ask for the service that fits the model; `Info` is always SERVING (TEI 1.9). A batch that failed makes it
    NOT_SERVING until another one succeeds: so a replica keeps its calls for three looks, before it is replaced."""
    check = {"grpc": {"port": GRPC_PORT, **({"service": each.service} if each.service else {})}, "timeoutSeconds": 5}
    starting = -(-each.startup_secs // PROBE_SECS)
    most_failures = settings.max_failures_before_restart
    living = {
        **check,
        "periodSeconds": settings.health_check_interval_secs,
        "failureThreshold": most_failures,
    }
    return {
        "startupProbe": {**check, "periodSeconds": PROBE_SECS, "failureThreshold": starting},
        "readinessProbe": {**check, "periodSeconds": PROBE_SECS, "failureThreshold": 3},
        **({"livenessProbe": living} if most_failures else {}),  # 0: never for a missed check
    }


def fetching(each: Workload, cluster: Cluster, settings: Settings) -> Object:
    """The model's files, before the engine starts: so its time to start is that of loading alone."""
    spec = each.spec
    arguments = [
        spec.model_id,
        *(["--revision", spec.revision] if spec.revision else []),
        *(["--allow-pickle"] if settings.allow_pickle else []),
        *(["--packages"] if each.engine == "embedded" else []),
    ]
    return {
        "name": "model",
        "image": cluster.image,
        "command": ["tini", "--", "python", "-m", "appliance.jobs.fetch"],
        "args": [literal(part) for part in arguments],
        "env": [*hub_folders(), *hub_token(cluster)],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
        "securityContext": confined(),
        "volumeMounts": [mount("models", MODELS_DIR), mount("tmp", "/tmp")],
    }
