"""What is true now: instances as CONTRACT section 3 shows them, logs, health. All of it is computed when asked."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from appliance.core import program, status
from appliance.core.layout import replica_process
from appliance.core.problems import Problem, invalid
from appliance.core.state import Instance
from appliance.drivers import logs
from appliance.node import conditions
from appliance.node.context import Node

LAST_LINES = 10  # of a log, told with a failure


def show(node: Node, name: str) -> dict[str, Any]:
    return of(node, node.state.read().get(name))


def show_all(node: Node) -> list[dict[str, Any]]:
    """Every instance, sorted by name."""
    instances = node.state.read().instances.values()
    known = node.supervisor.processes() if instances else []
    with ThreadPoolExecutor(max_workers=16) as pool:
        return list(pool.map(lambda instance: of(node, instance, known), instances))


def of(node: Node, instance: Instance, known: list[status.Process] | None = None) -> dict[str, Any]:
    """CONTRACT section 3's response for one instance; every value is computed now."""
    known = node.supervisor.processes() if known is None else known
    table = own_processes(node, instance, known)
    replicas = [replica(node, instance, index, table) for index in range(instance.spec.replicas)]
    statuses = [entry["status"] for entry in replicas]
    first = next((entry for entry in replicas if entry["pid"]), replicas[0])
    checks = node.health.probes_since(instance.launch, instance.name)
    return {
        **instance.spec.mapping(),
        "port": instance.ports[0],
        "prometheus_port": instance.prometheus_ports[0],
        "engine": program.engine_of(instance, node.settings),
        "startup_timeout_secs": program.startup_timeout(instance, node.settings),
        "status": status.instance_status(statuses),
        "pid": first["pid"],
        "created_at": instance.created_at,
        "uptime_secs": first["uptime_secs"],
        "restarts": instance.restarts,
        "health_check_failures": max((told["failures"] for told in checks), default=0),
        "last_health_check": max((told["checked_at"] for told in checks), default=None),
        "last_error": last_error(node, instance, replicas, table),
        "replicas_ready": statuses.count("running"),
        "replica_list": replicas,
    }


def own_processes(node: Node, instance: Instance, known: list[status.Process]) -> dict[str, status.Process]:
    """By name, those of the instance's present launch; a predecessor does not count."""
    found = {}
    for index in range(instance.spec.replicas):
        name = replica_process(instance.name, index)
        process = next((each for each in known if (each.group, each.name) == (instance.name, name)), None)
        if process := node.of_this_launch(instance, index, process):
            found[name] = process
    return found


def replica(node: Node, instance: Instance, index: int, table: dict[str, status.Process]) -> dict[str, Any]:
    process = table.get(replica_process(instance.name, index))
    answers = bool(process and process.uptime is not None) and node.proved(instance, index)
    timeout = program.startup_timeout(instance, node.settings)
    uptime = process.uptime if process else None
    return {
        "index": index,
        "port": instance.ports[index],
        "prometheus_port": instance.prometheus_ports[index],
        "gpu_id": instance.gpu_of(index),
        "pid": process.pid if process else None,
        "status": status.replica_status(
            instance.wanted,
            process,
            answers,
            timeout,
            withheld=index in instance.withheld,
            quarantined=index in instance.quarantined,
        ),
        "exit_status": process.exit_status if process else None,
        "uptime_secs": round(uptime, 3) if uptime is not None else None,
    }


def last_error(
    node: Node, instance: Instance, replicas: list[dict[str, Any]], table: dict[str, status.Process]
) -> str | None:
    """Why a replica is failed, unhealthy or keeps dying while it starts, with the last lines of its log."""
    for entry in replicas:
        index = entry["index"]
        if reason := instance.quarantined.get(index) or instance.withheld.get(index):
            return f"Replica {index}: {reason}"
        process = table.get(replica_process(instance.name, index))
        if process is None or (entry["status"] != "failed" and process.state not in ("BACKOFF", "EXITED")):
            continue
        if stranger := node.stranger(instance, index):
            return f"Replica {index} cannot listen: port {entry['port']} is in use by {stranger}"
        if process.state in status.ALIVE:
            reason = f"did not open port {entry['port']} within {program.startup_timeout(instance, node.settings)} s"
        else:
            reason = process.ending
        tail = "\n".join(logs.tail(node.log_path(instance.name, entry["index"]), LAST_LINES))
        return f"Replica {entry['index']} {reason}. Last log lines:\n{tail}"
    return None


def log_window(node: Node, name: str, replica: int, start: int | None, end: int | None) -> dict[str, Any]:
    """A slice of the log lines of one replica; an instance that never wrote a line has an empty log."""
    instance = node.state.read().get(name)
    if not 0 <= replica < instance.spec.replicas:
        raise invalid(f'Replica {replica} does not exist: "{name}" has 0 to {instance.spec.replicas - 1}')
    found, first, last, total = logs.window(node.log_path(name, replica), start, end)
    return {"lines": found, "start": first, "end": last, "total_lines": total}


def health(node: Node) -> dict[str, Any]:
    """``degraded`` when something refuses, which ``reason`` names, or an instance that shall run does not."""
    wrong: dict[str, str] = dict(conditions.found(node).items())
    try:
        instances = show_all(node)
        wrong |= conditions.silence(node, node.supervisor.processes())
        running = sum(entry["status"] == "running" for entry in instances)
        failed = any(entry["status"] in ("failed", "unhealthy") for entry in instances)
        answer = {"status": "degraded" if failed or wrong else "healthy", "running": running, "total": len(instances)}
        return answer | ({"reason": told(wrong)} if wrong else {})
    except Problem as problem:
        if problem.message not in wrong.values():
            wrong[problem.code.lower()] = problem.message
        return {"status": "degraded", "running": 0, "total": 0, "reason": told(wrong)}


def told(wrong: dict[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in wrong.items())
