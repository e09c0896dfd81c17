"""The wanted instances -> the objects that run them on a Kubernetes cluster (1.30 or newer), and a front for them.

    the models     PersistentVolumeClaim
    an instance    Deployment, headless Service, PodDisruptionBudget, NetworkPolicy; ScaledObject (KEDA)
    the front      ConfigMap, Deployment, Service, PodDisruptionBudget, NetworkPolicy
                   GRPCRoute, HTTPRoute (Gateway API)

The same instances give the same objects in the same order; `kubernetes_text` writes them down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from appliance.core.kubernetes import ACCESS_MODES, GRPC_PORT, METRICS_PORT, Cluster, Workload
from appliance.core.settings import Settings
from appliance.export.kubernetes_front import FRONT, front_objects, namespace
from appliance.export.kubernetes_pods import MODELS_CLAIM, OWNER, Object, labels, made, replica_pod, selector
from appliance.export.kubernetes_scaling import scaled_object

CLIENTS = ("redis", "qdrant")  # of stores that the image has not
ONE_NODE = "One node at a time has it: all pods that use it run there."
BACKEND_TLS = "The front has TLS: the Gateway needs a BackendTLSPolicy for its Service."


@dataclass(frozen=True)
class Rendered:
    """An object, and what is to be known of it, a sentence each."""

    content: Object
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return str(self.content["kind"])

    @property
    def name(self) -> str:
        return str(self.content["metadata"]["name"])

    @property
    def file_name(self) -> str:
        return f"{self.name}.{self.kind.lower()}.yaml"


def objects(
    workloads: Sequence[Workload], settings: Settings, cluster: Cluster, configuration_toml: str, directory_toml: str
) -> list[Rendered]:
    """The texts are those of `kubernetes_front.configuration` and `kubernetes_front.directory`, as TOML."""
    shared = cluster.access_mode == ACCESS_MODES[0]
    found = [Rendered(models_claim(cluster), () if shared else (ONE_NODE,))]
    for each in workloads:
        found += of_instance(each, settings, cluster)
    front = front_objects(settings, cluster, configuration_toml, directory_toml)
    store = settings.cache.store
    kept = (f"Its cache needs an image that has the extra {store} as well.",) if store in CLIENTS else ()
    secured = (BACKEND_TLS,) if cluster.tls_secret else ()
    notes = {"Deployment": kept, "GRPCRoute": secured, "HTTPRoute": secured}
    return found + [Rendered(each, notes.get(each["kind"], ())) for each in front]


def models_claim(cluster: Cluster) -> Object:
    spec: Object = {
        "accessModes": [cluster.access_mode],
        "resources": {"requests": {"storage": cluster.storage}},
        **({"storageClassName": cluster.storage_class} if cluster.storage_class else {}),
    }
    marks = {"app.kubernetes.io/name": OWNER, "app.kubernetes.io/managed-by": OWNER}
    return made("v1", "PersistentVolumeClaim", cluster, MODELS_CLAIM, marks, spec=spec)


def of_instance(each: Workload, settings: Settings, cluster: Cluster) -> list[Rendered]:
    marks, chosen = labels("replica", each.name), selector("replica", each.name)
    headless = {
        "clusterIP": "None",
        "selector": chosen,
        "ports": [
            {"name": "grpc", "port": GRPC_PORT, "targetPort": "grpc"},
            {"name": "metrics", "port": METRICS_PORT, "targetPort": "metrics"},
        ],
    }
    disruption = {
        "maxUnavailable": 1,
        "selector": {"matchLabels": chosen},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",  # one that fails again and again would hold a node for ever
    }
    deployed = made("apps/v1", "Deployment", cluster, each.name, marks, spec=deployment(each, settings, cluster))
    deployed["metadata"]["annotations"] = named(each)
    found = [
        Rendered(deployed, (f"Instance {each.spec.name}.", *each.notes)),
        Rendered(made("v1", "Service", cluster, each.name, marks, spec=headless)),
        Rendered(made("policy/v1", "PodDisruptionBudget", cluster, each.name, marks, spec=disruption)),
        Rendered(
            made("networking.k8s.io/v1", "NetworkPolicy", cluster, each.name, marks, spec=admission(each, cluster))
        ),
    ]
    return [*found, Rendered(scaled_object(each, cluster))] if each.is_scaled(cluster) else found


def named(each: Workload) -> dict[str, str]:
    """The instance's own name, which may be none of Kubernetes'."""
    return {"tei-appliance/instance": each.spec.name}


def deployment(each: Workload, settings: Settings, cluster: Cluster) -> Object:
    """Without `replicas` where KEDA decides: each `apply` would take them back to what is written."""
    scrape = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(METRICS_PORT),
        "prometheus.io/path": "/metrics",
    }
    annotations = named(each) | ({} if each.spec.metrics_off else scrape)
    # With GPUs an update would wait for one that nobody has: the old replica goes first.
    turns = {"maxUnavailable": 1, "maxSurge": 0} if each.on_gpu else {"maxUnavailable": 0, "maxSurge": 1}
    counted = {} if each.is_scaled(cluster) else {"replicas": each.spec.replicas if each.wanted else 0}
    return {
        **counted,
        "progressDeadlineSeconds": each.startup_secs + 600,
        "revisionHistoryLimit": 3,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": turns},
        "selector": {"matchLabels": selector("replica", each.name)},
        "template": {
            "metadata": {"labels": labels("replica", each.name), "annotations": annotations},
            "spec": replica_pod(each, cluster, settings),
        },
    }


def admission(each: Workload, cluster: Cluster) -> Object:
    """Who may call: the front, and Prometheus for the metrics."""
    return {
        "podSelector": {"matchLabels": selector("replica", each.name)},
        "policyTypes": ["Ingress"],
        "ingress": [
            {
                "from": [{"podSelector": {"matchLabels": selector("front", FRONT)}}],
                "ports": [{"protocol": "TCP", "port": GRPC_PORT}],
            },
            {"from": [namespace(cluster.monitoring)], "ports": [{"protocol": "TCP", "port": METRICS_PORT}]},
        ],
    }
