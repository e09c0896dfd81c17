"""`appliance export ray`: the configuration of Ray Serve that runs the same instances."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from appliance.cli.export_kubernetes import Wanted, wanted_here
from appliance.cli.terminal import say, say_json
from appliance.core import cluster
from appliance.core.instance import AUTO
from appliance.core.settings import Settings
from appliance.core.state import Instance
from appliance.export import ray


def export_ray(arguments: argparse.Namespace, settings: Settings) -> int:
    """For `serve deploy`, a RayService's `serveConfigV2`, or PUT of Serve's REST."""
    wanted = wanted_here(settings)
    for each in wanted:
        for note in cluster.notes(each.spec):
            print(f"{each.spec.name}: {note}", file=sys.stderr)
    found = ray.configuration([on_cluster(each) for each in wanted], settings)
    if arguments.json:
        say_json(found)
        return 0
    from appliance.export import kubernetes_text  # only now: no other command needs PyYAML

    say(kubernetes_text.document(found).rstrip())
    return 0


def on_cluster(wanted: Wanted) -> Instance:
    """Without what means something on one machine only; GPUs are counted."""
    spec = replace(
        wanted.spec,
        engine=wanted.engine,
        port=None,
        prometheus_port=None,
        gpu_id=None,
        gpu_ids=AUTO if cluster.needs_gpu(wanted.spec) else (),
        express=False,
    )
    return Instance(spec, (), (), created_at="", wanted="running" if wanted.running else "stopped")
