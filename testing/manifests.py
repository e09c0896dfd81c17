"""What Kubernetes would say of a set of objects, without a cluster.

kubernetes-validate has the schemas of the built-in kinds. It does not look at names, at what refers to what, and at
kinds of others; that is here. A check takes objects and returns complaints, so that a planted error can be seen found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs
import kubernetes_validate

Object = dict[str, Any]
VERSIONS = ("1.30", "1.34", "1.37")
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
LABEL_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?")
WORKLOADS = ("Deployment",)
TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}


def closed(required: tuple[str, ...], optional: tuple[str, ...] = (), **properties: Any) -> Object:
    assert set(required) | set(optional) == set(properties)
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


def whole_object(api: str, kind: str, spec: Object) -> Object:
    metadata = closed(
        ("name", "namespace", "labels"),
        ("annotations",),
        name=TEXT,
        namespace=TEXT,
        labels={"type": "object"},
        annotations={"type": "object"},
    )
    top = ("apiVersion", "kind", "metadata", "spec")
    return closed(top, apiVersion={"const": api}, kind={"const": kind}, metadata=metadata, spec=spec)


def listed(item: Object) -> Object:
    return {"type": "array", "minItems": 1, "items": item}


PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
ROUTE = closed(
    ("parentRefs", "rules"),
    parentRefs=listed(closed(("name",), ("namespace", "sectionName"), name=TEXT, namespace=TEXT, sectionName=TEXT)),
    rules=listed(closed(("backendRefs",), backendRefs=listed(closed(("name", "port"), name=TEXT, port=PORT)))),
)
# The fields that we use of kinds whose schemas nobody installs: from the references of KEDA 2.x and of Gateway API 1.x.
OTHERS = {
    "ScaledObject": whole_object(
        "keda.sh/v1alpha1",
        "ScaledObject",
        closed(
            ("scaleTargetRef", "minReplicaCount", "maxReplicaCount", "cooldownPeriod", "fallback", "triggers"),
            scaleTargetRef=closed(("apiVersion", "kind", "name"), apiVersion=TEXT, kind=TEXT, name=TEXT),
            minReplicaCount=COUNT,
            maxReplicaCount={"type": "integer", "minimum": 1},
            cooldownPeriod=COUNT,
            fallback=closed(("failureThreshold", "replicas"), failureThreshold=COUNT, replicas=COUNT),
            triggers=listed(
                closed(
                    ("type", "name", "metricType", "metadata"),
                    type={"const": "prometheus"},
                    name=TEXT,
                    metricType={"enum": ["AverageValue", "Value"]},
                    metadata=closed(
                        ("serverAddress", "query", "threshold", "ignoreNullValues"),
                        serverAddress=TEXT | {"pattern": "^https?://"},
                        query=TEXT,
                        threshold=TEXT | {"pattern": r"^\d+(\.\d+)?$"},
                        ignoreNullValues={"enum": ["true", "false"]},
                    ),
                )
            ),
        ),
    ),
    "GRPCRoute": whole_object("gateway.networking.k8s.io/v1", "GRPCRoute", ROUTE),
    "HTTPRoute": whole_object("gateway.networking.k8s.io/v1", "HTTPRoute", ROUTE),
}


def wrong_schemas(objects: list[Object], versions: tuple[str, ...]) -> list[str]:
    found = []
    for each in objects:
        if each["kind"] in OTHERS:
            found += [
                f"{called(each)}: {error.message}"
                for error in jsonschema_rs.Draft202012Validator(OTHERS[each["kind"]]).iter_errors(each)
            ]
            continue
        for version in versions:
            try:
                kubernetes_validate.validate(each, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                found.append(f"{called(each)}, {version}: {error.message}")
    return found


def called(each: Object) -> str:
    return f"{each['kind']} {each['metadata']['name']}"


def wrong_names(objects: list[Object]) -> list[str]:
    """Names that Kubernetes refuses, and two objects of one name."""
    found, seen = [], set()
    for each in objects:
        metadata = each["metadata"]
        allowed = LABEL if each["kind"] in ("Service", "Deployment") else SUBDOMAIN
        if not allowed.fullmatch(metadata["name"]):
            found.append(f"{called(each)}: no name of Kubernetes")
        if each["kind"] == "Deployment" and len(metadata["name"]) > 46:
            found.append(f"{called(each)}: its pods would have other names")
        if (key := (each["kind"], metadata["name"])) in seen:
            found.append(f"{called(each)}: twice")
        seen.add(key)
        for labels in (metadata["labels"], template_of(each).get("metadata", {}).get("labels", {})):
            found += [
                f"{called(each)}: label {key}: {value}"
                for key, value in labels.items()
                if not (LABEL_KEY.fullmatch(key) and LABEL_VALUE.fullmatch(value))
            ]
        annotations = {
            **metadata.get("annotations", {}),
            **template_of(each).get("metadata", {}).get("annotations", {}),
        }
        found += [f"{called(each)}: annotation {key}" for key in annotations if not LABEL_KEY.fullmatch(key)]
    return found


def template_of(each: Object) -> Object:
    found: Object = each["spec"]["template"] if each["kind"] in WORKLOADS else {}
    return found


def containers(each: Object) -> Iterator[Object]:
    pod = template_of(each).get("spec", {})
    yield from (*pod.get("initContainers", ()), *pod.get("containers", ()))


def wrong_selectors(objects: list[Object]) -> list[str]:
    """Selectors that choose no pods, or those of two."""
    pods = [(called(each), template_of(each)["metadata"]["labels"]) for each in objects if template_of(each)]
    found = []
    for each in objects:
        spec = each.get("spec", {})
        selector = {
            "Deployment": lambda spec: spec["selector"]["matchLabels"],
            "PodDisruptionBudget": lambda spec: spec["selector"]["matchLabels"],
            "Service": lambda spec: spec["selector"],
            "NetworkPolicy": lambda spec: spec["podSelector"]["matchLabels"],
        }.get(each["kind"])
        if selector:
            chosen = [name for name, labels in pods if selector(spec).items() <= labels.items()]
            if [name.split()[1] for name in chosen] != [each["metadata"]["name"]]:
                found.append(f"{called(each)}: chooses {chosen}")
    return found


def wrong_quantities(objects: list[Object]) -> list[str]:
    asked = [(called(each), one["resources"]) for each in objects for one in containers(each)]
    asked += [(called(each), each["spec"]["resources"]) for each in objects if each["kind"] == "PersistentVolumeClaim"]
    return [
        f"{name}: {key}: {value}"
        for name, resources in asked
        for part in resources.values()
        for key, value in part.items()
        if not (isinstance(value, str) and QUANTITY.fullmatch(value))
    ]


def dangling(objects: list[Object], secrets: tuple[str, ...] = ()) -> list[str]:
    """References to what is not there. secrets: those that are there besides."""
    there = {(each["kind"], each["metadata"]["name"]) for each in objects} | {("Secret", name) for name in secrets}
    found = []
    for each in objects:
        named = [("Deployment", each["spec"]["scaleTargetRef"]["name"])] if each["kind"] == "ScaledObject" else []
        if each["kind"].endswith("Route"):
            named += [("Service", back["name"]) for rule in each["spec"]["rules"] for back in rule["backendRefs"]]
            found += [f"{called(each)}: {port}" for port in wrong_backend_ports(each, objects)]
        volumes = template_of(each).get("spec", {}).get("volumes", [])
        for volume in volumes:
            named += [("ConfigMap", volume["configMap"]["name"])] if "configMap" in volume else []
            named += [("Secret", volume["secret"]["secretName"])] if "secret" in volume else []
            if "persistentVolumeClaim" in volume:
                named.append(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
        for one in containers(each):
            named += [
                ("Secret", variable["valueFrom"]["secretKeyRef"]["name"])
                for variable in one["env"]
                if "valueFrom" in variable
            ]
            mounted = {mount["name"] for mount in one["volumeMounts"]}
            found += [
                f"{called(each)}: no volume {name}" for name in sorted(mounted - {one["name"] for one in volumes})
            ]
        used = {mount["name"] for one in containers(each) for mount in one["volumeMounts"]}
        found += [f"{called(each)}: nobody mounts {one['name']}" for one in volumes if one["name"] not in used]
        found += [f"{called(each)}: there is no {kind} {name}" for kind, name in named if (kind, name) not in there]
        if each["kind"] == "Service":
            found += [f"{called(each)}: {port}" for port in wrong_target_ports(each, objects)]
    return found


def wrong_backend_ports(route: Object, objects: list[Object]) -> list[str]:
    ports = {
        (each["metadata"]["name"], port["port"])
        for each in objects
        if each["kind"] == "Service"
        for port in each["spec"]["ports"]
    }
    backends = [back for rule in route["spec"]["rules"] for back in rule["backendRefs"]]
    return [f"no port {back['port']}" for back in backends if (back["name"], back["port"]) not in ports]


def wrong_target_ports(service: Object, objects: list[Object]) -> list[str]:
    (chosen,) = [
        each
        for each in objects
        if template_of(each) and service["spec"]["selector"].items() <= template_of(each)["metadata"]["labels"].items()
    ]
    named = {port["name"] for one in containers(chosen) for port in one.get("ports", ())}
    return [f"no port {port['targetPort']}" for port in service["spec"]["ports"] if port["targetPort"] not in named]


def two_owners(objects: list[Object]) -> list[str]:
    """Deployments that say a number of replicas which KEDA changes."""
    scaled = {each["spec"]["scaleTargetRef"]["name"] for each in objects if each["kind"] == "ScaledObject"}
    return [
        f"{called(each)}: replicas, although it is scaled"
        for each in objects
        if each["kind"] == "Deployment" and ("replicas" in each["spec"]) == (each["metadata"]["name"] in scaled)
    ]


def wrong_scaling(objects: list[Object]) -> list[str]:
    return [
        f"{called(each)}: from {each['spec']['minReplicaCount']} to {each['spec']['maxReplicaCount']}"
        for each in objects
        if each["kind"] == "ScaledObject" and each["spec"]["minReplicaCount"] > each["spec"]["maxReplicaCount"]
    ]


def unconfined(objects: list[Object]) -> list[str]:
    """Pods that do not keep to the standard `restricted`, and roots that can be written to."""
    found = []
    for each in objects:
        if not (template := template_of(each)):
            continue
        whole = template["spec"]["securityContext"]
        if not (whole.get("runAsNonRoot") and whole.get("seccompProfile") == {"type": "RuntimeDefault"}):
            found.append(f"{called(each)}: its pod may be root")
        for one in containers(each):
            own = one.get("securityContext", {})
            strict = {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            if not strict.items() <= own.items():
                found.append(f"{called(each)}: {one['name']} may do too much")
    return found


CHECKS: tuple[Callable[[list[Object]], list[str]], ...] = (
    wrong_names,
    wrong_selectors,
    wrong_quantities,
    two_owners,
    wrong_scaling,
    unconfined,
)


def complaints(objects: list[Object], secrets: tuple[str, ...] = (), versions: tuple[str, ...] = VERSIONS) -> list[str]:
    found = [complaint for check in CHECKS for complaint in check(objects)]
    return [*wrong_schemas(objects, versions), *found, *dangling(objects, secrets)]


def as_started(argument: str, variables: dict[str, str] | None = None) -> str:
    """An argument as the container gets it: `$(NAME)` is replaced where there is such a variable, `$$` means `$`."""
    known = variables or {}

    def replaced(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return known.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replaced, argument)
