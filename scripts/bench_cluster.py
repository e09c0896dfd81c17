"""`make bench PARTS=cluster`: what a call costs a multiplexer that learns from Ray's directory where replicas are.

Beside one that reads the state file. Each is in a network namespace with one replica of the embedded engine on the same
machine, so both call it over loopback; the caller is outside of both. The two take turns, medians of ROUNDS. Needs root
and `.venv-ray` (`make ray`).
"""

import statistics
import time
from pathlib import Path

import psutil

from scripts.bench_single import CALLERS, NAME, Measured, Way, cpu_seconds, measured, wrapped_way
from testing.machines import Machine, Network, possible
from testing.ray_machines import PYTHON, RayMachine
from testing.running import eventually

ROUNDS = 7
IDLE_SECS = 10.0


def cluster(room: Path) -> dict[str, list[tuple[str, ...]]]:
    """A table for each number of callers, and one without any. Empty where there can be no cluster."""
    if not (possible() and PYTHON.exists()):
        return {}
    room.mkdir()
    with Network() as network:
        spaces = [network.space(number) for number in (1, 2)]
        head = RayMachine(spaces[0], room / "head", spaces[0].address, "head")
        box = Machine(spaces[1], room / "box", seeds="")
        with box, head:
            for machine in (box, head):
                eventually(lambda machine=machine: machine.create(NAME))
                machine.wait_ready(NAME)
            ways = [way("state file", box), way("Ray's directory", head)]
            tables = {f"{count} callers": table(ways, count) for count in CALLERS}
            tables["no caller"] = idle(ways)
            head.delete(f"/instances/{NAME}")
    return tables


def way(name: str, machine: Machine) -> Way:
    found = [process for process in psutil.process_iter() if is_multiplexer_of(process, machine)]
    return wrapped_way(name, f"{machine.host}:{machine.grpc_port}", found)


def is_multiplexer_of(process: psutil.Process, machine: Machine) -> bool:
    try:
        return "appliance.multiplexer" in process.cmdline() and process.environ().get("TEI_MANAGER_DATA_DIR") == str(
            machine.folder
        )
    except psutil.Error:
        return False


def table(ways: list[Way], callers: int) -> list[tuple[str, ...]]:
    rounds: list[list[Measured]] = [[measured(way, callers) for way in ways] for _ in range(ROUNDS)]
    lines: list[tuple[str, ...]] = [("the table of replicas is from", "p50 ms", "CPU, us a call", "ratio")]
    for at, each in enumerate(ways):
        p50, cpu = (statistics.median(getattr(row[at], field) for row in rounds) for field in ("p50", "cpu"))
        ratio = statistics.median(row[at].cpu / row[0].cpu for row in rounds)
        lines.append((each.name, f"{p50 * 1e3:.2f}", f"{cpu * 1e6:.0f}", f"{ratio:.2f}"))
    return lines


def idle(ways: list[Way]) -> list[tuple[str, ...]]:
    before = [sum(map(cpu_seconds, each.between)) for each in ways]
    time.sleep(IDLE_SECS)
    lines: list[tuple[str, ...]] = [("the table of replicas is from", "% of a core")]
    for each, began in zip(ways, before, strict=True):
        used = sum(map(cpu_seconds, each.between)) - began
        lines.append((each.name, f"{used / IDLE_SECS * 100:.1f}"))
    return lines
