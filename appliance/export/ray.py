"""The wanted instances -> the configuration of Ray Serve (2.60) that runs them, for `PUT /api/serve/applications/`.

    an instance    an application without a route: calls go straight to its replicas
    the directory  an application with a route, on the head: it tells the multiplexers where replicas listen

The same instances give the same configuration; Serve changes what differs from the one that it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from appliance.core import listing
from appliance.core.cluster import (
    DIRECTORY,
    DIRECTORY_DEPLOYMENT,
    REPLICA_DEPLOYMENT,
    application_name,
    needs_gpu,
)
from appliance.core.instance import InstanceSpec
from appliance.core.listing import Listed
from appliance.core.program import engine_of, startup_timeout
from appliance.core.settings import Settings
from appliance.core.state import Instance

MODULE = "appliance.cluster.applications"
POLICY = "appliance.cluster.scaling:QueuePolicy"
# Texts in the queue of a replica before another one is started: more than one batch of the longest texts.
TARGET_QUEUE = 32
UP_SECS, DOWN_SECS = 3.0, 60.0  # so long more, or fewer, replicas must have been right
LOOK_BACK_SECS = 6.0  # above Serve's own interval, which is 5
# A replica that is to end gets calls until the multiplexers have noticed: they ask twice a second.
DRAIN_SECS = 3.0
ENDING_SECS = 5.0  # beyond the time that its calls have
CONTROL_CALLS = 100  # of the directory and Serve's controller at once; no text goes through them
CPUS = 1
EVERYWHERE = "0.0.0.0"
# What decides how a replica is started; all else of an instance may change while replicas stay.
STARTING = (
    *("name", "model_id", "revision", "max_batch_tokens", "max_concurrent_requests", "pooling", "dtype", "extra_args"),
    *("request_logs", "download"),
)


def configuration(instances: Sequence[Instance], settings: Settings) -> dict[str, Any]:
    """Of those that shall run, in the order given; one that is stopped has no application."""
    wanted = [each for each in instances if each.is_offered]
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": EVERYWHERE, "port": settings.ray_directory_port},
        "applications": [
            directory_application(wanted, settings),
            *(instance_application(each, settings) for each in wanted),
        ],
    }


def directory_application(instances: Sequence[Instance], settings: Settings) -> dict[str, Any]:
    """Other instances reach the one that runs, which stays."""
    listed = [Listed(described(each, settings), addresses=()) for each in instances]
    return {
        "name": DIRECTORY,
        "route_prefix": "/",
        "import_path": f"{MODULE}:directory",
        "args": {},
        "deployments": [
            {
                "name": DIRECTORY_DEPLOYMENT,
                "num_replicas": 1,
                "max_ongoing_requests": CONTROL_CALLS,
                "user_config": {
                    **listing.dump(tuple(listed)),
                    "on_demand": [each.name for each in instances if each.spec.is_on_demand],
                },
                "ray_actor_options": {"num_cpus": 0.0},
            }
        ],
    }


def described(instance: Instance, settings: Settings) -> InstanceSpec:
    """As a listing has it: what its replicas compute, by which engine."""
    return InstanceSpec.parse({**instance.spec.mapping(), "engine": engine_of(instance, settings)})


def instance_application(instance: Instance, settings: Settings) -> dict[str, Any]:
    return {
        "name": application_name(instance.name),
        "route_prefix": None,
        "import_path": f"{MODULE}:replica",
        "args": arguments(instance, settings),
        "deployments": [deployment(instance, settings)],
    }


def arguments(instance: Instance, settings: Settings) -> dict[str, Any]:
    """With others every replica is replaced; launch: so that a restart does that, too."""
    given = {key: value for key, value in instance.spec.mapping().items() if key in STARTING}
    return {
        "instance": {key: value for key, value in given.items() if value not in (None, [])},
        "engine": engine_of(instance, settings),
        "startup_secs": startup_timeout(instance, settings),
        "launch": instance.launch,
    }


def deployment(instance: Instance, settings: Settings) -> dict[str, Any]:
    spec = instance.spec
    longest_secs = settings.graceful_shutdown_timeout_secs + DRAIN_SECS + ENDING_SECS
    return {
        "name": REPLICA_DEPLOYMENT,
        **replicas(spec),
        "max_ongoing_requests": CONTROL_CALLS,
        "graceful_shutdown_timeout_s": longest_secs,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": float(settings.health_check_interval_secs),
        "health_check_timeout_s": float(settings.health_check_interval_secs + 20),
        # In an update the new replica goes first, unless it would wait for a GPU that the old one has.
        "max_surge_percent": 0.0 if needs_gpu(spec) else 100.0,
        "ray_actor_options": {
            "num_cpus": float(CPUS),
            **({"num_gpus": 1.0} if needs_gpu(spec) else {}),
            **({"label_selector": labels(spec)} if spec.node_labels else {}),
        },
    }


def labels(spec: InstanceSpec) -> Mapping[str, str]:
    return dict(label.split("=", 1) for label in spec.node_labels)


def replicas(spec: InstanceSpec) -> dict[str, Any]:
    """Their number, or what decides it."""
    if spec.max_replicas is None and not spec.is_on_demand:
        return {"num_replicas": spec.replicas}
    return {
        "autoscaling_config": {
            "min_replicas": 0 if spec.is_on_demand else spec.replicas,
            "initial_replicas": 0 if spec.is_on_demand else spec.replicas,
            "max_replicas": spec.max_replicas or spec.replicas,
            "look_back_period_s": LOOK_BACK_SECS,
            "upscale_delay_s": UP_SECS,
            "downscale_delay_s": DOWN_SECS,
            "downscale_to_zero_delay_s": 1.0,  # the policy has counted the seconds without a call
            "policy": {
                "policy_function": POLICY,
                "policy_kwargs": {
                    "target_queue": TARGET_QUEUE,
                    "replicas": spec.replicas,
                    "idle_secs": spec.idle_unload_secs,
                },
            },
        }
    }
