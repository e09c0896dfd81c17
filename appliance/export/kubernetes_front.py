"""The front on Kubernetes: multiplexer and gateway in one pod, for all instances, and what leads to them.

The two share a folder, because the gateway reaches the multiplexer through a socket in it; so there is one multiplexer
to a pod, and more pods for more calls. They find the replicas by `directory.toml`, and read it again when it changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

from appliance.core import listing
from appliance.core.addresses import Address
from appliance.core.kubernetes import GRPC_PORT, MODELS_DIR, Cluster, Workload
from appliance.core.listing import Listed
from appliance.core.problems import invalid
from appliance.core.settings import Settings
from appliance.export.kubernetes_pods import (
    DATA_DIR,
    EVERYWHERE,
    LEAVING_SECS,
    Object,
    confined,
    empty,
    hub_folders,
    labels,
    leaving,
    made,
    models_volume,
    mount,
    pod,
    selector,
    variables,
)

FRONT = "appliance-front"
CONFIG_DIR, TLS_DIR = "/etc/tei-appliance", "/etc/tei-appliance-tls"
CONFIG_FILE, DIRECTORY_FILE, KEYS_FILE = "appliance.toml", "directory.toml", "keys.toml"
METRICS_PATH = "/metrics"
BEHIND_SECS = 10  # that the multiplexer is told to end after the gateway, whose last requests need it
GATEWAY_API = "gateway.networking.k8s.io/v1"
# Of the configuration, what multiplexer and gateway read. The rest is about processes of one machine.
READ = (
    "grpc_port",
    "http_port",
    "graceful_shutdown_timeout_secs",
    "grpc_request_timeout_secs",
    "grpc_max_message_size_mb",
    "grpc_max_parallel_streams",
    "memory_budget_mb",
    "open_health",
    "cors_allow_origins",
    "image_url_hosts",
)


# -- what it reads ----------------------------------------------------------------------------------------------------


def directory(workloads: Sequence[Workload], cluster: Cluster) -> Object:
    """The table of `directory.toml`. A name of a headless Service stands for all its addresses."""
    return listing.dump(tuple(listed(each, cluster) for each in workloads))


def listed(each: Workload, cluster: Cluster) -> Listed:
    # Each pod of the front has its part of what a replica takes at once, as the multiplexers of one machine have.
    share = max(1, each.spec.max_concurrent_requests // cluster.front_replicas)
    spec = replace(each.spec, engine=each.engine, max_concurrent_requests=share)
    return Listed(spec, (Address(f"{each.name}.{cluster.namespace}.svc", GRPC_PORT),), task=each.task or None)


def configuration(settings: Settings, cluster: Cluster) -> Object:
    """The table of the front's `appliance.toml`. Raises: Problem for what a ConfigMap must not have."""
    default = Settings()
    table: Object = {"multiplexer_workers": 1}
    for key in READ:
        value = getattr(settings, key)
        if value != getattr(default, key):
            table[key] = list(value) if isinstance(value, tuple) else value
    for key in ("queue", "cache"):
        if changed := differing(getattr(settings, key), getattr(default, key)):
            table[key] = changed
    if "@" in settings.cache.url or "password" in parse_qs(urlsplit(settings.cache.url).query):
        raise invalid(
            '"cache.url" has a password, which would be in clear in a ConfigMap: export with a configuration whose '
            "cache needs none (--config), and let a NetworkPolicy say who reaches it"
        )
    if cluster.tls_secret:
        table["tls"] = tls(settings)
    return table


def tls(settings: Settings) -> Object:
    """As here, with the files of the Secret."""
    kept = differing(settings.tls, Settings().tls)
    table: Object = {key: kept[key] for key in ("allowed_subjects", "allowed_sans", "min_version") if key in kept}
    table |= {"cert_file": f"{TLS_DIR}/tls.crt", "key_file": f"{TLS_DIR}/tls.key"}
    if settings.tls.require_client_cert:
        table |= {"client_ca_file": f"{TLS_DIR}/ca.crt", "require_client_cert": True}
    return table


def differing(part: Any, default: Any) -> Object:
    """The keys of a table of the configuration that are not as by default, as plain values."""
    values = {each.name: getattr(part, each.name) for each in fields(part)}
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in values.items()
        if value != getattr(default, key)
    }


# -- its objects ------------------------------------------------------------------------------------------------------


def front_objects(settings: Settings, cluster: Cluster, configuration_toml: str, directory_toml: str) -> list[Object]:
    """The texts are those of `configuration` and `directory`, as TOML."""
    marks = labels("front", FRONT)
    files = {CONFIG_FILE: configuration_toml, DIRECTORY_FILE: directory_toml}
    disruption = {
        "maxUnavailable": 1,
        "selector": {"matchLabels": selector("front", FRONT)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    found = [
        made("v1", "ConfigMap", cluster, FRONT, marks, data=files),
        made("apps/v1", "Deployment", cluster, FRONT, marks, spec=deployment(settings, cluster, configuration_toml)),
        made("v1", "Service", cluster, FRONT, marks, spec=service(settings, cluster)),
        made("policy/v1", "PodDisruptionBudget", cluster, FRONT, marks, spec=disruption),
        made("networking.k8s.io/v1", "NetworkPolicy", cluster, FRONT, marks, spec=admission(settings, cluster)),
    ]
    if cluster.gateway:
        found += [
            route("GRPCRoute", "grpc", settings.grpc_port, cluster),
            route("HTTPRoute", "http", settings.http_port, cluster),
        ]
    return found


def deployment(settings: Settings, cluster: Cluster, configuration_toml: str) -> Object:
    grace_secs = settings.graceful_shutdown_timeout_secs + LEAVING_SECS + BEHIND_SECS
    chosen = selector("front", FRONT)
    annotations = {
        # It is read at the start alone: another one makes other pods. The directory is read again without.
        "tei-appliance/configuration": hashlib.sha256(configuration_toml.encode()).hexdigest()[:16],
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(settings.http_port),
        "prometheus.io/path": METRICS_PATH,
        "prometheus.io/scheme": "https" if cluster.tls_secret else "http",
    }
    template = {
        "metadata": {"labels": labels("front", FRONT), "annotations": annotations},
        "spec": pod(
            chosen,
            grace_secs,
            containers=[
                container("multiplexer", settings.grpc_port, settings, cluster),
                container("gateway", settings.http_port, settings, cluster),
            ],
            volumes=volumes(cluster),
        ),
    }
    return {
        "replicas": cluster.front_replicas,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "selector": {"matchLabels": chosen},
        "template": template,
    }


def container(program: str, port: int, settings: Settings, cluster: Cluster) -> Object:
    keys = [mount("keys", f"{DATA_DIR}/{KEYS_FILE}", subPath=KEYS_FILE, readOnly=True)] if cluster.keys_secret else []
    certificates = [mount("tls", TLS_DIR, readOnly=True)] if cluster.tls_secret else []
    return {
        "name": program,
        "image": cluster.image,
        "command": ["tini", "--", "python", "-m", f"appliance.{program}"],
        "env": [
            *variables(
                TEI_MANAGER_CONFIG=f"{CONFIG_DIR}/{CONFIG_FILE}",
                TEI_MANAGER_DIRECTORY=f"dns:{CONFIG_DIR}/{DIRECTORY_FILE}",
                TEI_MANAGER_DATA_DIR=DATA_DIR,
                TEI_MANAGER_BIND=EVERYWHERE,
                # As on one machine: Arrow's own pool keeps what other threads freed, and nothing large is multiplied.
                ARROW_DEFAULT_MEMORY_POOL="system",
                OPENBLAS_NUM_THREADS="1",
                **(settings.tls.environment if cluster.tls_secret else {}),
            ),
            *hub_folders(),
        ],
        "ports": [{"name": "grpc" if program == "multiplexer" else "http", "containerPort": port}],
        "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}},
        **probes(program, port, settings, cluster),
        "lifecycle": leaving(LEAVING_SECS + (BEHIND_SECS if program == "multiplexer" else 0)),
        "securityContext": confined(),
        "volumeMounts": [
            mount("data", DATA_DIR),
            mount("tmp", "/tmp"),
            mount("config", CONFIG_DIR, readOnly=True),
            mount("models", MODELS_DIR, readOnly=True),  # what a model does, and which one it is, stands in its files
            *keys,
            *certificates,
        ],
    }


def probes(program: str, port: int, settings: Settings, cluster: Cluster) -> Object:
    """Whether the program answers, and not whether its models do: a front without any has to tell its callers so.

    The kubelet has neither a key nor a certificate, and speaks no gRPC over TLS: where these are needed, it connects.
    """
    check: Object = {"tcpSocket": {"port": port}}
    if not cluster.tls_secret and program == "multiplexer" and (settings.open_health or not cluster.keys_secret):
        check = {"grpc": {"port": port}}
    elif not cluster.tls_secret and program == "gateway" and not cluster.keys_secret:
        check = {"httpGet": {"path": "/api/version", "port": port}}
    return {
        "startupProbe": {**check, "timeoutSeconds": 5, "periodSeconds": 2, "failureThreshold": 60},
        "readinessProbe": {**check, "timeoutSeconds": 5, "periodSeconds": 5, "failureThreshold": 2},
        "livenessProbe": {**check, "timeoutSeconds": 10, "periodSeconds": 30, "failureThreshold": 4},
    }


def volumes(cluster: Cluster) -> list[Object]:
    found = [empty("data"), empty("tmp"), {"name": "config", "configMap": {"name": FRONT}}, models_volume()]
    secrets = {"keys": cluster.keys_secret, "tls": cluster.tls_secret}
    # Readable for the group of the pod, which is that of our user.
    found += [
        {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}}
        for name, secret in secrets.items()
        if secret
    ]
    return found


def service(settings: Settings, cluster: Cluster) -> Object:
    """appProtocol: a Gateway would speak HTTP/1.1 to a port that does not say h2c."""
    secure = bool(cluster.tls_secret)
    grpc = {} if secure else {"appProtocol": "kubernetes.io/h2c"}
    return {
        "selector": selector("front", FRONT),
        "ports": [
            {"name": "grpc", "port": settings.grpc_port, "targetPort": "grpc", **grpc},
            {
                "name": "http",
                "port": settings.http_port,
                "targetPort": "http",
                "appProtocol": "https" if secure else "http",
            },
        ],
    }


def admission(settings: Settings, cluster: Cluster) -> Object:
    """Who may call: its own namespace, those that were named, and that of the Gateway; Prometheus for the metrics."""
    named = {*cluster.callers, *([cluster.gateway_namespace] if cluster.gateway else [])} - {cluster.namespace}
    callers = [{"podSelector": {}}, *(namespace(each) for each in sorted(named))]
    ports = [{"protocol": "TCP", "port": port} for port in (settings.grpc_port, settings.http_port)]
    return {
        "podSelector": {"matchLabels": selector("front", FRONT)},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": callers, "ports": ports},
            {"from": [namespace(cluster.monitoring)], "ports": ports[1:]},
        ],
    }


def namespace(name: str) -> Object:
    """All pods of a namespace, as a peer of a NetworkPolicy."""
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def route(kind: str, listener: str, port: int, cluster: Cluster) -> Object:
    """listener: of the Gateway; two, because one hostname of a listener cannot have routes of both kinds."""
    parent = {"name": cluster.gateway_name, "sectionName": listener}
    if cluster.gateway_namespace != cluster.namespace:
        parent["namespace"] = cluster.gateway_namespace
    spec = {"parentRefs": [parent], "rules": [{"backendRefs": [{"name": FRONT, "port": port}]}]}
    return made(GATEWAY_API, kind, cluster, FRONT, labels("front", FRONT), spec=spec)
