"""What on this machine keeps the appliance from working, and how to mend it: `appliance doctor`, `GET /doctor`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from appliance.core.addresses import Address
from appliance.core.cluster import directory_answer
from appliance.core.instance import PROGRAMS
from appliance.core.problems import Problem
from appliance.core.program import MARKER
from appliance.drivers import hub, nvml, ports, processes
from appliance.drivers.serve import ServeDirectory
from appliance.node import conditions, overview
from appliance.node.authentication import Authenticator, is_open_to_the_network
from appliance.node.context import Node
from appliance.node.directory import read_listing

VERDICTS = ("ok", "warning", "wrong")
EXPIRES_SOON_DAYS = 21
LITTLE_FREE_BYTES = 5 * 10**9
REMOTE_SECS, ASKED_AT_ONCE = 2.0, 64
NO_ADDRESS = "Its names have no address: look at what answers them"
EARLIEST = datetime(2025, 1, 1, tzinfo=UTC)  # a clock before this was never set


@dataclass(frozen=True)
class Finding:
    """verdict: of VERDICTS. fix: what to do, where something is to be done."""

    verdict: str
    what: str
    state: str
    fix: str = ""

    def mapping(self) -> dict[str, str]:
        """As REST and `--json` tell it."""
        return {"verdict": self.verdict, "what": self.what, "found": self.state, "fix": self.fix}


def examine(node: Node) -> list[Finding]:
    """All findings, in the order in which the appliance needs things. Nothing is changed."""
    checks: tuple[Callable[[Node], Iterator[Finding]], ...] = (
        *(binary, disk, cache, gpus, clock, certificates),
        *(supervisor, listeners, strangers, left_over, instances, listed_instances, peers),
    )
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check(node)
        except (Problem, OSError) as error:
            findings.append(Finding("wrong", check.__name__, str(error)))
    return findings


def binary(node: Node) -> Iterator[Finding]:
    path = node.settings.tei_binary_path
    if not path:
        fix = "For TEI itself install text-embeddings-router on PATH, or set tei_binary_path"
        yield Finding("ok", "engine", "the embedded one; text-embeddings-router is not on PATH", fix)
    elif os.access(path, os.X_OK) and Path(path).is_file():
        yield Finding("ok", "engine", path)
    else:
        yield Finding("wrong", "engine", f"{path} cannot be run", "Set tei_binary_path to the file, and chmod +x it")


def disk(node: Node) -> Iterator[Finding]:
    for folder in dict.fromkeys([node.folder, Path(node.settings.state_file).parent, Path(node.settings.log_dir)]):
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if not os.access(there, os.W_OK):
            fix = f"chown it to this user (uid {os.getuid()}), or set data_dir"
            yield Finding("wrong", "data folder", f"{there} cannot be written", fix)
            continue
        yield room(there, "data folder", f"{folder}: ", "Make room, or move data_dir")
    if node.folder.exists():
        for name, message in conditions.present(node).items():
            yield Finding("wrong", name, message)


def room(folder: Path, name: str, about: str, fix: str) -> Finding:
    free = shutil.disk_usage(folder).free
    little = free < LITTLE_FREE_BYTES
    words = f"{about}{free / 10**9:.1f} GB free"
    return Finding("warning", name, words, fix) if little else Finding("ok", name, words)


def cache(node: Node) -> Iterator[Finding]:
    folder = hub.cache_folder()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    models = len(list(hub.cached_ids()))
    if not os.access(there, os.W_OK):
        yield Finding("wrong", "model cache", f"{folder} cannot be written", "Set HF_HOME to a folder that can")
        return
    yield room(there, "model cache", f"{folder}: {models} models, ", "Make room, or set HF_HOME to another disk")


def gpus(node: Node) -> Iterator[Finding]:
    devices, variable = nvml.devices(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices:
        for device in devices:
            free = f"{(device.memory_free or 0) / 2**30:.1f} GiB free"
            verdict = "wrong" if device.error else "ok"
            fix = "Look at dmesg for Xid errors; reset the GPU or restart the machine" if device.error else ""
            yield Finding(verdict, f"GPU {device.index}", device.error or f"{device.name}, {free}", fix)
    elif variable is not None:
        yield Finding("warning", "GPU", f"CUDA_VISIBLE_DEVICES={variable!r} leaves none", "Unset it, or name a GPU")
    elif list(Path("/proc/driver/nvidia/gpus").glob("*")):
        fix = "Install the user-space driver (libnvidia-ml.so.1); in a container use --gpus all"
        yield Finding("wrong", "GPU", "the kernel has NVIDIA GPUs, but their library does not answer", fix)
    else:
        yield Finding("ok", "GPU", "none; models run on the CPU")


def clock(node: Node) -> Iterator[Finding]:
    now = datetime.now(UTC)
    if now < EARLIEST:
        yield Finding("wrong", "clock", f"it is {now:%Y-%m-%d} here", "Set the time: certificates and tokens need it")
    else:
        yield Finding("ok", "clock", f"{now:%Y-%m-%d %H:%M:%S} UTC")


def certificates(node: Node) -> Iterator[Finding]:
    tls = node.settings.tls
    if not tls.on:
        open_to_all = is_open_to_the_network(node.settings)
        fix = "Make a key (appliance keys create NAME admin), or set [tls]" if open_to_all else ""
        words = f"off; bind = {node.settings.bind}" + (", and nobody is asked who he is" if open_to_all else "")
        yield Finding("warning" if open_to_all else "ok", "TLS", words, fix)
        return
    from appliance.wire.certificates import expiry  # only now: it takes 20 ms, and few boxes use TLS

    Authenticator.of(node.settings)  # raises for files that cannot be used
    for file in (tls.cert_file, tls.client_ca_file):
        if not file:
            continue
        left = (expiry(Path(file).read_bytes()) - datetime.now(UTC)).days
        verdict = "wrong" if left < 0 else "warning" if left < EXPIRES_SOON_DAYS else "ok"
        words = f"{file} is valid for {left} more days" if left >= 0 else f"{file} has expired"
        yield Finding(
            verdict, "certificate", words, "Replace it; it is read again by itself" if verdict != "ok" else ""
        )


def supervisor(node: Node) -> Iterator[Finding]:
    if not node.supervisor.answers():
        yield Finding("wrong", "supervisord", "does not answer: the appliance is not up", "appliance up")
        return
    for process in node.supervisor.processes():
        if process.group in PROGRAMS:
            running = process.state == "RUNNING"
            fix = "" if running else conditions.remedy(node, process)
            yield Finding("ok" if running else "wrong", process.name, process.state.lower(), fix)


def listeners(node: Node) -> Iterator[Finding]:
    up = node.supervisor.answers()
    for port, key in node.settings.own_ports.items():
        taken = bool(ports.busy([port], node.settings.bind))
        if taken == up:
            yield Finding("ok", f"port {port}", f"{key}: {'ours' if up else 'free'}")
        elif taken:
            fix = f"Stop the program that has it, or set {key}"
            owner = node.listeners.stranger(port, f"{node.id}:") or "another program"
            yield Finding("wrong", f"port {port}", f"{key}: in use by {owner}", fix)
        else:
            yield Finding("wrong", f"port {port}", f"{key}: nobody listens", "supervisorctl status; look into the log")


def strangers(node: Node) -> Iterator[Finding]:
    """Programs that have the port of a replica that is to run."""
    for instance in node.state.read().instances.values():
        for replica in range(len(instance.ports) if instance.wanted == "running" else 0):
            if owner := node.stranger(instance, replica):
                port = instance.ports[replica]
                fix = f"Stop it; or delete the instance, and create it with another port than {port}"
                fix = fix if instance.spec.port else "The monitor gives it another one"
                yield Finding("wrong", f"port {port}", f"of {instance.name}: in use by {owner}", fix)


def left_over(node: Node) -> Iterator[Finding]:
    known = {process.pid for process in node.supervisor.processes()} if node.supervisor.answers() else set()
    pids = [process.pid for process, _ in processes.marked(MARKER, f"{node.id}:", except_under=known)]
    if pids:
        fix = "`appliance up` ends them; while it is up the monitor does, once a minute"
        yield Finding("warning", "left-over processes", f"pids {', '.join(map(str, pids))}", fix)
    else:
        yield Finding("ok", "left-over processes", "none")


def instances(node: Node) -> Iterator[Finding]:
    if not node.supervisor.answers():
        return
    for instance in overview.show_all(node):
        bad = instance.status in ("failed", "unhealthy")
        verdict = "wrong" if bad else "warning" if instance.last_error else "ok"
        words = f"{instance.status}, {instance.replicas_ready} of {len(instance.replicas)} replicas"
        yield Finding(verdict, f"instance {instance.name}", words, instance.last_error or "")


def answering(addresses: Sequence[Address]) -> set[Address]:
    """Those at which somebody listens: asked all at once, or fifty that are away would take a hundred seconds."""
    with ThreadPoolExecutor(max(1, min(ASKED_AT_ONCE, len(addresses)))) as pool:
        found = pool.map(lambda each: ports.answers(each.host, each.port, REMOTE_SECS), addresses)
        return {address for address, answers in zip(addresses, found, strict=True) if answers}


def cluster_directory(place: Address) -> Finding:
    try:
        told = directory_answer(ServeDirectory(place).replicas())
    except Problem as problem:
        fix = "What was known last is used. Look at the head: `appliance status` there, and its cluster.log"
        return Finding("wrong", "directory", problem.message, fix)
    return Finding("ok", "directory", f"{place}: {len(told.tables)} instances")


def listed_instances(node: Node) -> Iterator[Finding]:
    """Those of a directory that is not the state: whether somebody listens at the addresses that were found last."""
    if node.settings.has_state_directory:
        return
    if place := node.settings.cluster_directory:
        yield cluster_directory(place)
    else:
        source = Path(node.settings.directory.partition(":")[2])
        yield Finding("ok", "directory", f"{source}: {len(read_listing(source))} instances")
    if not node.supervisor.answers():
        return
    for listed in read_listing(Path(node.settings.layout.listing)):
        answers = answering(listed.addresses)
        away = [str(each) for each in listed.addresses if each not in answers]
        words = f"{len(listed.addresses) - len(away)} of {len(listed.addresses)} addresses answer"
        verdict, fix = "ok", ""
        if not listed.addresses:
            verdict, fix = "wrong", NO_ADDRESS
        elif away:
            verdict = "wrong" if len(away) == len(listed.addresses) else "warning"
            fix = f"Start what shall listen at {', '.join(away[:5])}"
        yield Finding(verdict, f"instance {listed.name}", words, fix)


def peers(node: Node) -> Iterator[Finding]:
    """Whether they answer, and what they were seen to have."""
    kept = Path(node.settings.layout.peers)
    listing = read_listing(kept) if node.settings.peers and kept.exists() else ()
    answers = answering(node.settings.peers)
    for peer in node.settings.peers:
        has = [each.name for each in listing for at, name in each.named if (name, at.port) == peer]
        words = f"has {', '.join(has)}" if has else "is not known to have an instance"
        if peer in answers:
            yield Finding("ok" if has else "warning", f"peer {peer}", words, "" if has else "See the multiplexer's log")
        else:
            yield Finding("wrong", f"peer {peer}", f"nobody listens; it {words}", "Start it, or mend its address")
