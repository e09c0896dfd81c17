"""What is true now: instances as `docs/rest.md` shows them, logs, health. All of it is computed when asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from appliance.core import generations, placement, program, status
from appliance.core.addresses import address
from appliance.core.cluster import one_machine_only
from appliance.core.log_lines import readable
from appliance.core.models import Job
from appliance.core.problems import Problem, invalid
from appliance.core.state import Instance
from appliance.core.status import Liveness, Process, Sighting
from appliance.core.views import HealthView, InstanceView, ReplacementView, ReplicaView, UndoView
from appliance.drivers import logs
from appliance.drivers.healthfile import Probes
from appliance.drivers.listeners import ListenerTable
from appliance.drivers.logs import LogWindow
from appliance.node import cluster, conditions, model_overview, room
from appliance.node.context import Node, rfc3339

LAST_LINES, READ_LINES = 10, 50  # of a log: shown with a failure, and read for it


class Sight(NamedTuple):
    """What one look shows of all replicas together: supervisor's processes by group and name, who listens, and what the
    monitor has measured, also for how long a replica of each workload loaded. It is taken for one answer, and never
    kept."""

    processes: Mapping[tuple[str, str], Process]
    table: ListenerTable
    probes: Probes
    load_secs: Mapping[str, float]


def look(node: Node, processes: Sequence[Process]) -> Sight:
    """processes: supervisor's, of a moment ago: what they listen on is read after them."""
    by_name = {(each.group, each.name): each for each in processes}
    return Sight(by_name, node.listening(), node.health.read(), node.load_times.read())


def look_at(node: Node, instance: Instance) -> Sight:
    """Only at the processes of one instance."""
    names = [each.process(index) for each in instance.generations for index in range(each.spec.replicas)]
    return look(node, node.supervisor.members(instance.name, names))


def show(node: Node, name: str) -> InstanceView:
    return view_of(node, node.state.read().get(name))


def show_all(node: Node, processes: Sequence[Process] | None = None) -> list[InstanceView]:
    """Every instance, sorted by name. processes: as for `look`; supervisor is asked where they are left out."""
    instances = node.state.read().instances.values()
    if not instances:
        return []
    if node.settings.is_cluster_head:
        seen = cluster.look(node)
        return [cluster.view_of(node, instance, seen) for instance in instances]
    sight = look(node, node.supervisor.processes() if processes is None else processes)
    return [view_of(node, instance, sight) for instance in instances]


def view_of(node: Node, instance: Instance, sight: Sight | None = None, downloading: bool = False) -> InstanceView:
    """One instance; every value is computed now. sight: taken now where it is left out.
    downloading: of one that only would be, whether its model would have to be fetched."""
    if node.settings.is_cluster_head:
        return cluster.view_of(node, instance, cluster.look(node))
    sight = sight or look_at(node, instance)
    sighting = sighting_of(node, instance, sight)
    if downloading:
        sighting = sighting._replace(downloading=True)
    replicas = replica_views(node, instance, sighting)
    job = download_of(node, instance) if instance.lacks_model else None
    checks = sight.probes.since(instance.launch, instance.stem)
    return InstanceView(
        instance=instance,
        engine=program.engine_of(instance, node.settings),
        startup_timeout_secs=program.startup_timeout(instance, node.settings),
        replicas=replicas,
        health_check_failures=max((check["failures"] for check in checks), default=0),
        last_health_check=max((check["checked_at"] for check in checks), default=None),
        last_error=last_error(node, instance, replicas, sighting),
        load_secs=sight.load_secs.get(placement.workload(instance.spec)),
        progress=model_overview.progress(node, job) if job else None,
        replacement=replacement_of(node, instance, sight),
        undo=undo_of(instance),
    )


def replacement_of(node: Node, instance: Instance, sight: Sight) -> ReplacementView | None:
    """The generation that starts beside the one that is called."""
    if (after := instance.successor) is None:
        return None
    replicas = replica_views(node, after, sighting_of(node, after, sight))
    return ReplacementView(
        strategy=generations.BESIDE,
        generation=after.generation,
        changes=tuple(sorted(after.spec.differences(instance.spec))),
        needs=room.needs_of(node, after),
        status=status.instance_status([each.status for each in replicas]),
        replicas_ready=sum(each.status == "running" for each in replicas),
    )


def undo_of(instance: Instance) -> UndoView | None:
    if (back := instance.previous) is None:
        return None
    kept = instance.predecessor
    changes = tuple(sorted(back.spec.differences(instance.spec)))
    return UndoView(changes, rfc3339(kept.kept_until) if kept else None)


def sighting_of(node: Node, instance: Instance, sight: Sight | None = None) -> Sighting:
    """Of each replica the process of the present launch, and whether that listens; a predecessor does not count."""
    sight = sight or look_at(node, instance)
    replicas = []
    for index in range(instance.spec.replicas):
        process = sight.processes.get((instance.name, instance.process(index)))
        process = node.of_this_launch(instance, index, process)
        is_alive = process is not None and process.uptime is not None
        replicas.append(Liveness(process, is_alive and node.proved(instance, index, sight.table)))
    return Sighting(instance.launch, tuple(replicas), instance.lacks_model and download_of(node, instance) is not None)


def download_of(node: Node, instance: Instance) -> Job | None:
    """The job that fetches the model of an instance."""
    model = node.models.read().models.get(instance.spec.model_id)
    return model.job if model and model.job and model.job.kind == "download" else None


def replica_views(node: Node, instance: Instance, sighting: Sighting) -> tuple[ReplicaView, ...]:
    timeout = program.startup_timeout(instance, node.settings)
    statuses = status.replica_statuses(instance, sighting, timeout)
    return tuple(
        replica_view(instance, index, liveness.process, each)
        for index, (liveness, each) in enumerate(zip(sighting.replicas, statuses, strict=True))
    )


def replica_view(instance: Instance, index: int, process: Process | None, replica_status: str) -> ReplicaView:
    uptime = process.uptime if process else None
    return ReplicaView(
        index=index,
        address=address(program.LOOPBACK, instance.ports[index]),
        port=instance.ports[index],
        prometheus_port=instance.prometheus_ports[index],
        gpu_id=instance.gpu_of(index),
        pid=process.pid if process else None,
        status=replica_status,
        exit_status=process.exit_status if process else None,
        uptime_secs=int(uptime) if uptime is not None else None,
    )


def last_error(node: Node, instance: Instance, replicas: Sequence[ReplicaView], sighting: Sighting) -> str | None:
    """Why a replica is failed, unhealthy or keeps dying while it starts, with the last lines of its log."""
    if instance.lacks_model and not instance.quarantined:
        return None if sighting.downloading else why_without_model(node, instance)
    for replica, (process, _) in zip(replicas, sighting.replicas, strict=True):
        index = replica.index
        if reason := instance.quarantined.get(index) or instance.ejected.get(index):
            return f"Replica {index}: {reason}"
        if process is None or (replica.status != "failed" and process.state not in ("BACKOFF", "EXITED")):
            continue
        if stranger := node.stranger(instance, index):
            return f"Replica {index} cannot listen: port {replica.port} is in use by {stranger}"
        if process.state in status.ALIVE:
            reason = f"did not open port {replica.port} within {program.startup_timeout(instance, node.settings)} s"
        else:
            reason = process.ending
        tail = "\n".join(last_lines(node, instance, index))
        return f"Replica {index} {reason}. Last log lines:\n{tail}"
    return instance.setback or None


def why_without_model(node: Node, instance: Instance) -> str:
    model = node.models.read().models.get(instance.spec.model_id)
    why = f": {model.download_error.rstrip('.')}" if model and model.download_error else ""
    return f"Model {instance.spec.model_id} is not on this machine{why}. A start of the instance downloads it"


def last_lines(node: Node, instance: Instance, replica: int) -> list[str]:
    """The end of a replica's log, for people."""
    return readable(logs.tail(node.log_path(instance, replica), READ_LINES))[-LAST_LINES:]


def log_window(node: Node, name: str, replica: int, start: int | None, end: int | None) -> LogWindow:
    """A slice of the log lines of one replica; an instance that never wrote a line has an empty log."""
    instance = node.state.read().get(name)
    if node.settings.is_cluster_head:
        raise one_machine_only("The log of a replica", "on a cluster Ray keeps it on the machine of the replica")
    if not 0 <= replica < instance.spec.replicas:
        raise invalid(f'Replica {replica} does not exist: "{name}" has 0 to {instance.spec.replicas - 1}')
    return logs.window(node.log_path(instance, replica), start, end)


def health(node: Node) -> HealthView:
    """``degraded`` when something refuses, which ``reason`` names, or an instance that shall run does not."""
    wrong: dict[str, str] = dict(conditions.present(node).items())
    try:
        processes = node.supervisor.processes()
        instances = show_all(node, processes)
        wrong |= conditions.programs_down(node, processes) | conditions.monitor_silence(node, processes)
    except Problem as problem:
        if problem.message not in wrong.values():
            wrong[problem.code.lower()] = problem.message
        return HealthView("degraded", reason=reasons_in_words(wrong))
    failed = any(instance.status in ("failed", "unhealthy") for instance in instances)
    return HealthView(
        status="degraded" if failed or wrong else "healthy",
        running=sum(instance.status == "running" for instance in instances),
        total=len(instances),
        reason=reasons_in_words(wrong),
    )


def reasons_in_words(wrong: dict[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in wrong.items())
