"""The instances of an appliance on a cluster of Ray Serve, as values: what cannot be had there, and how they fare.

Each instance is an application of Serve with one deployment, whose replicas are TEI or engine processes on any machine
of the cluster. One application more, the directory, knows where they listen; the multiplexers ask it, and call the
replicas themselves. Serve decides where a replica runs, so GPUs are counted and not chosen.

    replica of Serve                                  status of ours
    RUNNING, PENDING_MIGRATION                        running
    STARTING, UPDATING, RECOVERING                    starting
    STOPPING                                          stopping
    missing, the application could not be deployed    failed
    missing, the instance is started by a call        sleeping
    missing otherwise                                 starting, or stopped where it shall not run

An application is UNHEALTHY in Serve's words as soon as one of its replicas is missing, while the others serve: its own
status is asked only where there is no replica at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from appliance.core.addresses import Address, host_and_port
from appliance.core.instance import AUTO, InstanceSpec
from appliance.core.port_choice import choose_ports
from appliance.core.problems import Kind, Problem, invalid
from appliance.core.settings import Settings
from appliance.core.state import Instance, State, alone, with_instance
from appliance.core.views import ReplicaView

PREFIX = "tei-"  # of the applications of instances
DIRECTORY = "directory"  # the application that knows the addresses
REPLICA_DEPLOYMENT, DIRECTORY_DEPLOYMENT = "ClusterReplica", "ClusterDirectory"
REPLICAS_PATH, WAKE_PATH = "/replicas", "/wake"  # of the directory
FAILED = "DEPLOY_FAILED"
RAISED = re.compile(r"[A-Za-z_.]*(Error|Exception|Problem): ")  # the end of a traceback
LAST_LINES, LONGEST_REASON = 20, 4000
STATUSES = {
    "RUNNING": "running",
    "PENDING_MIGRATION": "running",
    "STARTING": "starting",
    "UPDATING": "starting",
    "RECOVERING": "starting",
    "STOPPING": "stopping",
}
# What REST's fields ask of one machine. Field -> what is to be done instead.
OF_ONE_MACHINE = {
    "port": "replicas choose theirs",
    "prometheus_port": "replicas choose theirs",
    "gpu_id": 'GPUs of a cluster are counted and not chosen: "gpu_ids": "auto" gives each replica one',
    "express": "the multiplexers of the cluster take its calls",
}


def refuse_unsupported(spec: InstanceSpec) -> None:
    """Raises: Problem for what only one machine can give."""
    for field, instead in asked_of_one_machine(spec).items():
        raise invalid(f'Field "{field}" means nothing on a cluster: {instead}')
    if spec.gpus:
        raise invalid(f'Field "gpu_ids" must be "auto" on a cluster: {OF_ONE_MACHINE["gpu_id"]}')
    if spec.idle_unload_secs and not spec.is_on_demand:
        raise invalid('Field "idle_unload_secs" needs "start" = "on_demand" on a cluster: then a call starts it again')


def refuse_without_cluster(spec: InstanceSpec) -> None:
    """Raises: Problem for what only a cluster can give."""
    for field in ("max_replicas", "node_labels"):
        if getattr(spec, field):
            raise invalid(f'Field "{field}" means nothing on one machine: it is for a cluster (docs/scaling.md)')


def notes(spec: InstanceSpec) -> list[str]:
    """What of an instance that runs on one machine is not so on a cluster, a sentence each."""
    found = [f'Its "{field}" is left out: {instead}.' for field, instead in asked_of_one_machine(spec).items()]
    return found + (["Each replica gets one GPU; which one is the cluster's choice."] if needs_gpu(spec) else [])


def asked_of_one_machine(spec: InstanceSpec) -> dict[str, str]:
    """The fields that it has, with what is to be done instead."""
    asked = {"port": spec.port, "prometheus_port": spec.asked_prometheus_port, "gpu_id": spec.gpu_id}
    given = {field for field, value in asked.items() if value is not None} | ({"express"} if spec.express else set())
    return {field: instead for field, instead in OF_ONE_MACHINE.items() if field in given}


def needs_gpu(spec: InstanceSpec) -> bool:
    return bool(spec.gpus) or spec.gpu_ids == AUTO


class ServeReplica(NamedTuple):
    """A replica in Serve's words. started_at: seconds since 1970."""

    id: str
    state: str
    node: str
    started_at: float


class ServeApplication(NamedTuple):
    """An application in Serve's words. config: with which it was deployed."""

    status: str
    message: str
    replicas: tuple[ServeReplica, ...]
    config: Mapping[str, Any]


def applications_of(answer: Mapping[str, Any]) -> dict[str, ServeApplication]:
    """By name, of what Serve's REST tells (2.60). Raises: LookupError, TypeError, AttributeError for another shape."""
    return {name: application_of(told) for name, told in answer["applications"].items()}


def application_of(told: Mapping[str, Any]) -> ServeApplication:
    deployments = told["deployments"].values()
    replicas = [
        ServeReplica(each["replica_id"], each["state"], each.get("node_ip") or "", each["start_time_s"])
        for deployment in deployments
        for each in deployment["replicas"]
    ]
    # That of the application names the deployment, whose own says why.
    messages = [*(deployment["message"] for deployment in deployments), told["message"]]
    return ServeApplication(
        told["status"],
        next((each for each in messages if each), ""),
        tuple(sorted(replicas, key=lambda each: (each.started_at, each.id))),
        told["deployed_app_config"] or {},
    )


class KnownReplica(NamedTuple):
    """What the directory knows of a replica. pid: of the TEI or engine process, on its machine."""

    id: str
    address: Address
    pid: int


class DirectoryAnswer(NamedTuple):
    """What the directory tells. tables: of a listing, each instance with the addresses of its replicas; by name the
    replicas, and the instances of which some replicas have not answered the directory yet."""

    tables: Sequence[Mapping[str, Any]]
    replicas: Mapping[str, tuple[KnownReplica, ...]]
    incomplete: frozenset[str]


def directory_answer(told: Mapping[str, Any]) -> DirectoryAnswer:
    """Raises: Problem for what is no answer of the directory."""
    try:
        replicas = {
            name: tuple(KnownReplica(each["id"], host_and_port(each["address"]), int(each["pid"])) for each in entries)
            for name, entries in told["replicas"].items()
        }
        return DirectoryAnswer(list(told["instances"]), replicas, frozenset(told["incomplete"]))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise invalid(f"It is no answer of the directory: {type(error).__name__}: {error}") from error


def replica_views(
    instance: Instance, application: ServeApplication | None, known: Sequence[KnownReplica], now: float
) -> tuple[ReplicaView, ...]:
    """At least one. known: of its replicas; now: seconds since 1970."""
    by_id = {each.id: each for each in known}
    there = application.replicas if application else ()
    views = [replica_view(index, each, by_id.get(each.id), now) for index, each in enumerate(there)]
    lacking = max(1 if not views else 0, instance.spec.replicas - len(views) if instance.wanted == "running" else 0)
    missing = status_of_missing(instance, application)
    return (*views, *(absent_view(len(views) + index, missing) for index in range(lacking)))


def replica_view(index: int, replica: ServeReplica, known: KnownReplica | None, now: float) -> ReplicaView:
    return ReplicaView(
        index=index,
        address=str(known.address) if known else None,
        port=known.address.port if known else 0,
        prometheus_port=0,
        gpu_id=None,
        pid=known.pid if known else None,
        status=STATUSES.get(replica.state, "starting"),
        exit_status=None,
        uptime_secs=max(0, int(now - replica.started_at)),
    )


def absent_view(index: int, status: str) -> ReplicaView:
    return ReplicaView(index, None, 0, 0, None, None, status, None, None)


def status_of_missing(instance: Instance, application: ServeApplication | None) -> str:
    if instance.wanted == "stopped" and not instance.sleeping:
        return "stopped"
    if application and application.status == FAILED:
        return "failed"
    return "sleeping" if instance.spec.is_on_demand else "starting"


def last_error(application: ServeApplication | None) -> str | None:
    """Why an instance has no replica, or fewer than it shall have: what Serve says, without the traceback."""
    if application is None or not application.message or application.status == "RUNNING":
        return None
    lines = [line for line in application.message.splitlines() if line.strip()]
    raised = max((at for at, line in enumerate(lines) if RAISED.match(line)), default=0)
    return "\n".join(lines[raised:][-LAST_LINES:])[-LONGEST_REASON:]


def with_ports(state: State, settings: Settings) -> State:
    """Ports for instances that have none, because they ran on a cluster before."""
    # Those that ask for some come first: the others take what is left.
    for instance in sorted(state.instances.values(), key=lambda each: not each.spec.asks_for_ports):
        if not instance.ports:
            ports, prometheus_ports = choose_ports(state.taken_ports, instance.spec, settings, ())
            state = with_instance(state, replace(instance, ports=ports, prometheus_ports=prometheus_ports))
    return state


def without_machine(state: State) -> State:
    """Instances that ran on one machine, as they are on a cluster: without ports, GPUs and further generations."""
    for instance in state.instances.values():
        if instance.ports:
            state = with_instance(
                state,
                replace(
                    alone(instance),
                    ports=(),
                    prometheus_ports=(),
                    placed=(),
                    lacks_model=False,
                    previous=None,
                    ejected={},
                    quarantined={},
                    rolling={},
                    unproved=False,
                ),
            )
    return state


def application_name(instance: str) -> str:
    return f"{PREFIX}{instance}"


def one_machine_only(what: str, instead: str) -> Problem:
    """The Problem of a request that a cluster cannot do. instead: what is to be done."""
    return Problem(Kind.PRECONDITION, "ON_A_CLUSTER", f"{what} is for instances of one machine: {instead}")


def differs(wanted: Mapping[str, Any], deployed: Mapping[str, ServeApplication]) -> bool:
    """Whether Serve was deployed with another configuration than is wanted."""
    return {each["name"]: each for each in wanted["applications"]} != {
        name: application.config for name, application in deployed.items()
    }
