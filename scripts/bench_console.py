"""`make bench PARTS=console`: what the console costs where there are a hundred instances.

All of them run. A console that is open is its stream of events, and its table of instances whenever that says so, as a
browser asks for it. CPU is that of both workers of control, as a share of one core, over a minute; without a console it
is what the monitor and supervisord ask of control anyway.
"""

import re
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import requests

from testing import demo
from testing.running import RunningAppliance, eventually

INSTANCES, CALLS, SECS = 100, 20, 60.0
CONSOLES = (0, 1, 50)
TAG = re.compile(r"/console/fleet\?tag=([0-9a-f]+)")
ENDPOINT = "/console"


def console(room: Path) -> list[tuple[str, ...]]:
    """The rows of the table."""
    with RunningAppliance(room, seeds="") as running:
        for number in range(INSTANCES):
            running.create(f"instance-{number:03}")
        eventually(lambda: running.get("/health").json()["instances"]["running"] == INSTANCES, 600, every=2)
        url = running.url.replace("127.0.0.1", "localhost")
        seen = demo.program("testing.console_timing", f"{url}{ENDPOINT}", 5)
        table: list[tuple[str, ...]] = [
            ("what", "measured"),
            ("first page of a first visit, all its files", f"{seen['bytes'] / 1000:.0f} kB"),
            ("until it can be used (chromium, 5 visits)", f"{seen['ms']:.0f} ms"),
            (f"GET {ENDPOINT}, {CALLS} times", f"{statistics.median(asked(running) for _ in range(CALLS)):.0f} ms"),
        ]
        for count in CONSOLES:
            table.append((f"{count} consoles open", opened(running, count)))
        return table


def asked(running: RunningAppliance) -> float:
    began = time.perf_counter()
    assert running.get(ENDPOINT).status_code == 200
    return (time.perf_counter() - began) * 1000


def opened(running: RunningAppliance, count: int) -> str:
    """What so many cost control, and what they hold."""
    workers = [each for each in running.left_over() if "appliance.control" in each.cmdline() and not each.children()]
    with ExitStack() as stack:
        looks = [stack.enter_context(looking(running)) for _ in range(count)]
        time.sleep(5)
        before, began = spent(workers), time.monotonic()
        time.sleep(SECS)
        share = (spent(workers) - before) / (time.monotonic() - began)
        threads = sum(worker.num_threads() for worker in workers)
        connections = sum(len(established(worker)) for worker in workers)
        answers = sum(look[0] for look in looks)
        return f"{share:.1%} of a core, {threads} threads, {connections} connections, {answers} tables sent"


def spent(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def established(process: psutil.Process) -> list[object]:
    return [each for each in process.net_connections("tcp") if each.status == psutil.CONN_ESTABLISHED]


@contextmanager
def looking(running: RunningAppliance) -> Iterator[list[int]]:
    """A console that is open. Yields how many tables it was sent."""
    session = requests.Session()
    session.trust_env = False
    page = session.get(f"{running.url}{ENDPOINT}").text
    stream = requests.get(f"{running.url}/console/stream", stream=True, cookies=session.cookies, timeout=60)
    sent = [0]

    def follow() -> None:
        tag = TAG.findall(page)[0]
        try:
            for line in stream.iter_lines(chunk_size=1):
                if line.startswith(b"data"):
                    part = session.get(f"{running.url}/console/fleet", params={"tag": tag})
                    if part.status_code == 200:
                        tag, sent[0] = TAG.findall(part.text)[0], sent[0] + 1
        except (requests.RequestException, AttributeError):
            pass  # it was closed

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield sent
    finally:
        stream.close()
