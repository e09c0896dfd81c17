"""`appliance export kubernetes`: what runs the same instances on a Kubernetes cluster."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from appliance.cli.folder_control import control_of_folder
from appliance.cli.terminal import say, say_json
from appliance.core.instance import CHECKS, InstanceSpec
from appliance.core.kubernetes import Cluster, Workload, workloads
from appliance.core.listing import TASKS
from appliance.core.problems import invalid, quoted
from appliance.core.program import default_engine
from appliance.core.settings import Settings
from appliance.drivers import keysfile
from appliance.export import kubernetes, kubernetes_front
from appliance.export.kubernetes import Rendered
from appliance.files.replacement import replace_file
from appliance.node.context import Node
from appliance.node.servable import card_of

ASKED_BY_CALLER = ("TEI_APPLIANCE_KEY", "TEI_APPLIANCE_CERT")


@dataclass(frozen=True)
class Wanted:
    """An instance of this appliance. engine: what serves it here; task: of its model, as far as it is known here."""

    spec: InstanceSpec
    engine: str
    running: bool
    task: str


def export_kubernetes(arguments: argparse.Namespace, settings: Settings) -> int:
    """The instances on a Kubernetes cluster, and a front for them."""
    cluster = cluster_of(arguments)
    refuse_open_front(settings, cluster)
    found = rendered(workloads_of(wanted_here(settings), arguments, settings), settings, cluster)
    if arguments.json and not arguments.output:
        say_json({"apiVersion": "v1", "kind": "List", "items": [each.content for each in found]})
        return 0
    from appliance.export import kubernetes_text  # only now: no other command needs PyYAML

    if arguments.output:
        write(Path(arguments.output), kubernetes_text.files(found))
    else:
        say(kubernetes_text.stream(found).rstrip())
    return 0


def rendered(wanted: list[Workload], settings: Settings, cluster: Cluster) -> list[Rendered]:
    configuration = tomli_w.dumps(kubernetes_front.configuration(settings, cluster))
    directory = tomli_w.dumps(kubernetes_front.directory(wanted, cluster))
    return kubernetes.objects(wanted, settings, cluster, configuration, directory)


def wanted_here(settings: Settings) -> list[Wanted]:
    """Asked of control; where nothing runs, those of the state file, and the seeds that it does not have yet."""
    if not settings.has_own_instances:
        raise invalid(
            f"The instances of this appliance are those of its directory {quoted(settings.directory)}, and run "
            "elsewhere: export where they are its own"
        )
    control = control_of_folder(settings)
    if control is not None:
        tasks = {each["model_id"]: (each["metadata"] or {}).get("task", "") for each in control.models()}
        return [told(each, tasks, settings.is_cluster_head) for each in control.instances()]
    state = Node.at(settings).state.read()
    specs = {name: each.spec for name, each in state.instances.items()}
    stopped = {name for name, each in state.instances.items() if not each.is_offered}
    seeds = {spec.name: spec for spec in settings.instances if spec.name not in state.seeded}
    return [
        Wanted(spec, spec.engine or default_engine(settings), name not in stopped, task_of(spec))
        for name, spec in (seeds | specs).items()
    ]


def told(entry: dict[str, Any], tasks: dict[str, str], on_cluster: bool = False) -> Wanted:
    """An instance as control tells it: its ports are those that it has here, asked for or not; on a cluster it has
    none."""
    fields = {key: entry[key] for key in CHECKS if entry[key] is not None}
    fields.pop("port")
    if fields["prometheus_port"] or on_cluster:  # 0: its metrics are off
        fields.pop("prometheus_port")
    spec = InstanceSpec.parse(fields)
    task = known_task(tasks.get(spec.model_id, "")) or task_of(spec)
    return Wanted(spec, entry["engine"], entry["status"] not in ("stopped", "stopping"), task)


def known_task(word: str) -> str:
    """Of the metadata of a model, which call embeddings dense; empty for another one."""
    task = {"dense": "embedding"}.get(word, word)
    return task if task in TASKS else ""


def task_of(spec: InstanceSpec) -> str:
    card = card_of(spec)
    return card.task if card else ""


def workloads_of(wanted: Iterable[Wanted], arguments: argparse.Namespace, settings: Settings) -> list[Workload]:
    each_by_name = {each.spec.name: each for each in wanted}
    return workloads(
        specs=[each.spec for each in each_by_name.values()],
        stopped=[name for name, each in each_by_name.items() if not each.running],
        engines={name: arguments.engine or each.engine for name, each in each_by_name.items()},
        startup_secs=settings.startup_timeout_secs,
        tasks={name: each.task for name, each in each_by_name.items()},
        every_gpu=arguments.gpus == "all",
    )


def refuse_open_front(settings: Settings, cluster: Cluster) -> None:
    """Raises: Problem where this appliance asks callers for something that the front would not ask them for."""
    if settings.tls.on and not cluster.tls_secret:
        raise invalid(
            "This appliance has TLS: name the Secret with tls.crt and tls.key for the front (--tls-secret), and with "
            "ca.crt where callers need certificates"
        )
    are_required = keysfile.are_required(Path(settings.layout.keys))
    has_keys = bool(settings.keys) or are_required or any(map(os.environ.get, ASKED_BY_CALLER))
    if has_keys and not cluster.keys_secret:
        raise invalid(
            f"This appliance asks for keys: name the Secret that has them as {kubernetes_front.KEYS_FILE} for the "
            "front (--keys-secret)"
        )


def write(folder: Path, texts: dict[str, str]) -> None:
    """Raises: Problem."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            replace_file(folder / name, text, durable=False)
    except OSError as error:
        raise invalid(f"Cannot write into {folder}: {error.strerror or error}") from error
    left = sorted(path.name for path in folder.glob("*.yaml") if path.name not in texts)
    if left:
        print(f"appliance: not of this export, and not in kustomization.yaml: {', '.join(left)}", file=sys.stderr)
    say(f"{len(texts)} files written: kubectl apply -k {folder}")


def cluster_of(arguments: argparse.Namespace) -> Cluster:
    """Raises: Problem invalid."""
    chosen = {key: getattr(arguments, key) for key in Cluster.__dataclass_fields__ if key != "callers"}
    return replace(Cluster(**chosen), callers=tuple(arguments.callers))
