"""What is true of the instances on a cluster of Ray Serve, whose head this machine is. Asked each time, never kept."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from appliance.core import cluster, program
from appliance.core.addresses import Address
from appliance.core.cluster import KnownReplica, ServeApplication
from appliance.core.problems import Kind, Problem
from appliance.core.settings import Settings
from appliance.core.state import Instance
from appliance.core.views import InstanceView
from appliance.drivers.serve import ServeApi, ServeDirectory
from appliance.node.context import Node


class ClusterSight(NamedTuple):
    """What one look shows: Serve's applications, and where replicas are by the name of their instance."""

    applications: Mapping[str, ServeApplication]
    known: Mapping[str, Sequence[KnownReplica]]


def serve_api(settings: Settings) -> ServeApi:
    return ServeApi(Address(program.LOOPBACK, settings.ray_dashboard_port), settings.ray_token_file)


def look(node: Node) -> ClusterSight:
    """Raises: Problem CLUSTER_UNAVAILABLE. The directory may be away: then it is not known where replicas are."""
    told = serve_api(node.settings).applications()
    try:
        applications = cluster.applications_of(told)
    except (LookupError, TypeError, AttributeError) as error:
        words = f"Ray Serve answers otherwise than 2.60 does: {type(error).__name__}: {error}"
        raise Problem(Kind.UNAVAILABLE, "CLUSTER_UNAVAILABLE", words) from error
    place = node.settings.cluster_directory
    return ClusterSight(applications, known_replicas(place) if place else {})


def known_replicas(place: Address) -> Mapping[str, Sequence[KnownReplica]]:
    """None while the directory is away."""
    try:
        return cluster.directory_answer(ServeDirectory(place).replicas()).replicas
    except Problem:
        return {}


def view_of(node: Node, instance: Instance, sight: ClusterSight) -> InstanceView:
    application = sight.applications.get(cluster.application_name(instance.name))
    known = sight.known.get(instance.name, ())
    return InstanceView(
        instance=instance,
        engine=program.engine_of(instance, node.settings),
        startup_timeout_secs=program.startup_timeout(instance, node.settings),
        replicas=cluster.replica_views(instance, application, known, time.time()),
        last_error=cluster.last_error(application),
    )
