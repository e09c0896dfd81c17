"""`python -m appliance.cluster`: Ray on this machine, as the head of a cluster or one of its nodes, in the foreground.

supervisord runs it where `ray_role` is set, and starts it again: a node that was cut off from its head ends itself with
its replicas, and joins anew.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from appliance.core.addresses import address
from appliance.core.problems import Problem
from appliance.core.program import LOOPBACK
from appliance.core.settings import Settings
from appliance.drivers import configfile, output
from appliance.drivers.serve import token

HEAD_AWAY_SECS = 86400  # so long nodes serve without their head, and wait for it; Ray's own is 60
DRAIN_MARGIN_SECS = 30  # of a node, beyond the time that calls have: its replicas start elsewhere first


def command(settings: Settings, ray: str) -> list[str]:
    own = ["--node-ip-address", settings.ray_address] if settings.ray_address else []
    shared = ["--block", "--disable-usage-stats", *own, *settings.ray_start_args]
    if settings.is_cluster_head:
        dashboard = ["--dashboard-host", LOOPBACK, "--dashboard-port", str(settings.ray_dashboard_port)]
        return [ray, "start", "--head", "--port", str(settings.ray_port), *dashboard, *shared]
    return [ray, "start", "--address", address(settings.ray_head, settings.ray_port), *shared]


def environment(settings: Settings) -> dict[str, str]:
    """What Ray (2.60) reads; replicas inherit it. Raises: Problem for a token that is not there."""
    drain_secs = 0 if settings.is_cluster_head else settings.graceful_shutdown_timeout_secs + DRAIN_MARGIN_SECS
    values = {
        "RAY_worker_niceness": "0",  # 15 by default, which TEI would inherit
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(HEAD_AWAY_SECS),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(drain_secs),
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    }
    if settings.is_cluster_head:  # what is deployed, and where it runs, is known again after a restart
        values |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": settings.layout.ray}
    if settings.ray_token_file:
        values |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token(settings.ray_token_file)}
    return values


def main() -> NoReturn:
    output.configure()
    ray = Path(sys.executable).with_name("ray")
    try:
        settings = configfile.load(os.environ)
        variables = {**os.environ, **environment(settings)}
    except Problem as problem:
        sys.exit(problem.message)
    os.execve(ray, command(settings, str(ray)), variables)


if __name__ == "__main__":
    main()
