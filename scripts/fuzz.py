"""Malformed messages to every RPC of a busy multiplexer, and whether anything breaks, hangs or grows.

    python scripts/fuzz.py [messages] [seed] [first]

Valid calls of each RPC are damaged as protobuf, as Arrow IPC, or as HTTP/2, and sent over many connections at once;
message n is the same for the same seed, and ``first`` begins at a later one. Every 20th is left whole, and its answer
must be the right one. Violations: a process that died, a call that outlived its deadline by over 100 ms, an answer that
no request may get (UNKNOWN, INTERNAL, UNAVAILABLE), a traceback in a log, work that goes on when all calls have ended,
a wrong value, over 50 MB of memory that stay. Exit status 1 if there was any. Memory is what a process has for itself:
pages of mapped weights, which the kernel reads when a rare word first comes, are files.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from appliance.core.program import MARKER  # noqa: E402
from appliance.drivers import processes  # noqa: E402
from appliance.wire.tei.v1 import tei_pb2 as tei  # noqa: E402
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux  # noqa: E402
from scripts.fuzz_calls import DEADLINE_SECS, Client, Tally  # noqa: E402
from testing.engines import FAMILIES  # noqa: E402
from testing.running import RunningAppliance  # noqa: E402
from testing.texts import mixed_texts  # noqa: E402

CLIENTS = 16
GROWTH_MB = 50.0
TIDY_SECS = 12.0  # until our processes have returned the memory that they do not need
READERS = ("multiplexer", "minilm", "labels", "ranker", "splade")
TRACE = "Traceback (most recent call last)"
GRPCS_TRACE = "Invalid encoding on"  # what grpc says of a header that is not text (grpcio 1.85)
MODELS = {"labels": "bert-classify", "ranker": "bert-rerank", "splade": "bert-splade"}


class Watch:
    """The processes of an appliance: which have died, and the memory of those that read what callers send."""

    def __init__(self, running: RunningAppliance, tally: Tally) -> None:
        self.running, self.tally, self.node = running, tally, running.node_id()
        self.at_start = self.processes()
        self.watched = {name: process for name, process in self.at_start.items() if name.startswith(READERS)}
        self.before = {name: megabytes(process) for name, process in self.watched.items()}
        self.peak = dict(self.before)
        self.deaths: list[str] = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)

    def processes(self) -> dict[str, psutil.Process]:
        """By name, replica, launch and, for workers of a process, pid."""
        by_name = {}
        for process, marker in processes.marked(MARKER, f"{self.node}:", except_under=()):
            name = marker.partition(":")[2].replace(":", "-")
            by_name[f"{name} {process.pid}" if name in by_name else name] = process
        return by_name

    def look(self) -> None:
        """Until `ended`, note peaks and the processes that are gone, with the messages that were lost about then."""
        while not self.ended.wait(0.05):
            for name, process in list(self.watched.items()):
                try:
                    self.peak[name] = max(self.peak[name], megabytes(process))
                except psutil.NoSuchProcess:
                    del self.watched[name]
                    time.sleep(0.5)
                    with self.tally.lock:
                        lost = sorted(self.tally.lost[-2 * CLIENTS :])
                    self.deaths.append(f"{name} (process {process.pid}) died; not answered: messages {lost}")
                    time.sleep(5)
                    self.watched |= {
                        name: process for name, process in self.processes().items() if name.startswith(READERS)
                    }

    def stop(self) -> list[str]:
        """Wait until the appliance is idle. Returns what was violated."""
        seconds = self.until_idle()
        time.sleep(TIDY_SECS)
        self.ended.set()
        self.thread.join()
        violations = list(self.deaths)
        now = self.processes()
        for name, process in self.at_start.items():
            if name not in now or now[name].pid != process.pid:
                violations.append(f"{name} was process {process.pid} and is {now[name].pid if name in now else 'gone'}")
        print(f"\n{'memory in MB':24}  {'before':>8}  {'after':>8}  {'peak':>8}  {'files':>8}  {'threads':>8}")
        for name, before in self.before.items():
            if name in now:
                after = megabytes(now[name])
                files = now[name].memory_info().shared / 1e6
                sizes = f"{before:8.1f}  {after:8.1f}  {self.peak[name]:8.1f}  {files:8.1f}"
                print(f"{name:24}  {sizes}  {now[name].num_threads():8}")
                if after - before > GROWTH_MB:
                    violations.append(f"{name} has grown by {after - before:.1f} MB")
        print(f"idle {seconds:.1f} s after the last answer")
        if seconds > DEADLINE_SECS:
            violations.append(f"work went on for over {seconds:.1f} s after the last answer")
        return violations

    def until_idle(self) -> float:
        """Seconds until the readers have stopped computing, at most some more than the deadline."""
        began = time.monotonic()
        while (seconds := time.monotonic() - began) < 2 * DEADLINE_SECS:
            before = sum(busy(process) for process in self.watched.values())
            time.sleep(0.5)
            if sum(busy(process) for process in self.watched.values()) - before < 0.1:
                break
        return seconds


def megabytes(process: psutil.Process) -> float:
    memory = process.memory_info()
    return float(memory.rss - memory.shared) / 1e6


def busy(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def tracebacks(running: RunningAppliance) -> Iterator[str]:
    """From the logs."""
    for path in sorted((running.folder / "logs").glob("*")):
        lines = path.read_text(errors="replace").splitlines()
        traces = [at for at, line in enumerate(lines) if TRACE in line and GRPCS_TRACE not in line]
        if traces:
            yield f"{len(traces)} tracebacks in {path.name}, the first: {' | '.join(lines[traces[0] :][:25])[:2000]}"


def wrong_vectors(running: RunningAppliance) -> Iterator[str]:
    """MiniLM against sentence-transformers' own vectors."""
    right = np.load(ROOT / "tests" / "data" / "minilm.npz")["vectors"][:20].astype(np.float32)
    right /= np.linalg.norm(right, axis=1, keepdims=True)
    target, stub = mux.Target(instance_name="minilm"), running.stub()
    for text, wanted in zip(mixed_texts(1000)[:20], right, strict=True):
        request = mux.EmbedRequest(target=target, request=tei.EmbedRequest(inputs=text, truncate=True))
        try:
            vector = np.array(stub.Embed(request, timeout=DEADLINE_SECS).embeddings, np.float32)
        except grpc.RpcError as error:
            yield f"a valid Embed at the end: {error.code().name} {error.details()}"
            continue
        if float(vector @ wanted) < 0.9999:
            yield f"another vector than sentence-transformers' for {text[:40]!r}"


def main(messages: int, seed: int, first: int) -> int:
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder, RunningAppliance(Path(folder)) as running:
        for name, model in MODELS.items():
            running.create(name, model_id=str(FAMILIES / model), **({"pooling": name} if name == "splade" else {}))
        for name in ("minilm", *MODELS):
            running.wait_ready(name)
        right: dict[tuple[str, bytes], list[Any]] = {}
        clients = [Client(running.grpc_port, right, tally) for _ in range(CLIENTS)]
        clients[0].learn()
        clients[0].stretch()
        time.sleep(TIDY_SECS)
        watch = Watch(running, tally)
        watch.thread.start()
        began = time.monotonic()
        threads = [
            threading.Thread(target=client.run, args=(seed, range(first + at, first + messages, CLIENTS)))
            for at, client in enumerate(clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.monotonic() - began
        tally.table()
        violations = [*watch.stop(), *tally.forbidden(), *tally.violations, *tracebacks(running)]
        violations += wrong_vectors(running)
    print(f"{messages} messages in {took:.0f} s, seed {seed}; {tally.compared} valid replies compared")
    print(f"processes that died: {len(watch.deaths)}")
    for each in violations[:60]:
        print(f"VIOLATED: {each}")
    print(f"violations: {len(violations)}")
    return 1 if violations else 0


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(*(numbers + [100_000, 7, 0][len(numbers) :])))
