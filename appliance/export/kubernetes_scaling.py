"""How many replicas an instance has on Kubernetes: KEDA's ScaledObject (2.x), with questions to Prometheus.

Prometheus has to scrape the pods of the replicas and of the front, with the labels `namespace` and `pod` on what it
finds, and with `honor_labels`, because our label `instance` is that of a model. An instance without replicas has no
`te_queue_size` and nothing waits for it: its calls are refused. So what wakes it is that there were calls.
"""

from __future__ import annotations

from typing import Any

from appliance.core.kubernetes import Cluster, Workload
from appliance.export.kubernetes_pods import Object, labels, made

BACKLOG = 64  # texts that wait, for each replica
CALLS_WINDOW = "5m"  # an instance with a call in this time keeps a replica
COOLDOWN_SECS = 300
UNREACHABLE = "1000000000"  # a threshold: calls wake an instance, and its backlog alone says how many replicas


def scaled_object(each: Workload, cluster: Cluster) -> Object:
    fewest = 0 if cluster.from_zero else each.spec.replicas
    triggers = [trigger("backlog", backlog(each, cluster), str(BACKLOG), cluster)]
    if cluster.from_zero:
        triggers.append(trigger("calls", calls(each, cluster), UNREACHABLE, cluster))
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": each.name},
        "minReplicaCount": fewest,
        "maxReplicaCount": max(cluster.max_replicas, each.spec.replicas),
        # A new replica loads its model first: it is not given up before it could answer.
        "cooldownPeriod": COOLDOWN_SECS + each.startup_secs,
        # While Prometheus does not answer, as many as were asked for.
        "fallback": {"failureThreshold": 3, "replicas": each.spec.replicas},
        "triggers": triggers,
    }
    return made("keda.sh/v1alpha1", "ScaledObject", cluster, each.name, labels("replica", each.name), spec=spec)


def trigger(name: str, query: str, threshold: str, cluster: Cluster) -> Object:
    """Values of the metadata are strings. Without `ignoreNullValues` a metric that nobody scrapes would count as 0."""
    metadata: dict[str, Any] = {
        "serverAddress": cluster.prometheus,
        "query": query,
        "threshold": threshold,
        "ignoreNullValues": "false",
    }
    return {"type": "prometheus", "name": name, "metricType": "AverageValue", "metadata": metadata}


def backlog(each: Workload, cluster: Cluster) -> str:
    """Texts that wait: within the replicas, and in the front because all of them are full."""
    # Pods of this Deployment alone: that of the instance "a-b" begins with the name of "a", and has a part more.
    pods = f'namespace="{cluster.namespace}",pod=~"{each.name}-[a-z0-9]+-[a-z0-9]+"'
    within = f"sum(avg_over_time(te_queue_size{{{pods}}}[1m]))"
    if cluster.from_zero:
        within = f"({within} or vector(0))"
    return f"{within} + (sum({of_front('tei_manager_queue_size', each, cluster)}) or vector(0))"


def calls(each: Workload, cluster: Cluster) -> str:
    """Calls of the last minutes, however they ended. A series begins with its first call, which `increase` does not
    see: it is counted as a series that was not there before."""
    series = of_front("tei_manager_grpc_requests_total", each, cluster)
    begun = f"count({series} unless {series} offset {CALLS_WINDOW})"
    return f"(sum(increase({series}[{CALLS_WINDOW}])) or vector(0)) + ({begun} or vector(0))"


def of_front(metric: str, each: Workload, cluster: Cluster) -> str:
    return f'{metric}{{namespace="{cluster.namespace}",instance="{each.spec.name}"}}'
