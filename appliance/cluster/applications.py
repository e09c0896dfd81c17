"""What Ray Serve builds from the configuration of `export.ray`. The only module that needs Ray in a replica."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.cluster.replica import ClusterReplica
from appliance.cluster.replica_directory import ClusterDirectory, Deployed
from appliance.core.cluster import DIRECTORY_DEPLOYMENT, REPLICA_DEPLOYMENT, WAKE_PATH


@serve.deployment(name=REPLICA_DEPLOYMENT)
class ServedReplica(ClusterReplica):
    def __init__(self, wanted: dict[str, Any]) -> None:
        super().__init__(wanted, ray.util.get_node_ip_address(), serve.get_replica_context().replica_id.unique_id)


@serve.deployment(name=DIRECTORY_DEPLOYMENT)
class ServedDirectory(ClusterDirectory):
    """Answers over HTTP: GET, what it knows; POST of `WAKE_PATH`, whether an instance is on its way."""

    def __init__(self) -> None:
        super().__init__(running_replicas, serve.get_deployment_handle)

    async def __call__(self, request: Request) -> Response:
        if request.method == "POST" and request.url.path == WAKE_PATH:
            return JSONResponse({"begun": await self.wake(request.query_params.get("instance", ""))})
        return JSONResponse(await self.answer())


def running_replicas() -> dict[str, Deployed]:
    """What Serve says of each application."""
    running = {}
    for name, application in serve.status().applications.items():
        states = [each.replica_states for each in application.deployments.values()]
        running[name] = Deployed(str(application.status.value), sum(each.get("RUNNING", 0) for each in states))
    return running


def replica(wanted: dict[str, Any]) -> Any:
    """An instance."""
    return bound(ServedReplica, wanted)


def directory(arguments: dict[str, Any]) -> Any:
    return bound(ServedDirectory)


def bound(deployment: Any, *arguments: Any) -> Any:
    """deployment: what `serve.deployment` has made of a class."""
    return deployment.bind(*arguments)
