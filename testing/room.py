"""How much memory an appliance may use, so that no more than so many instances of the tiny model are loaded at once,
and a watch for more of them."""

import threading
import time
from pathlib import Path

from appliance.drivers import processes
from testing.agreement import alive, replicas_alive
from testing.background import Background
from testing.running import RunningAppliance, eventually

TOO_MANY_SECS = 1.0  # so long more may be seen than fit: a look takes a while
SPARE = 0.7  # of one instance: the next one does not fit, and nobody is turned away for what a load takes more or less


def setting_for(folder: Path, room: int) -> str:
    """A line of a configuration with room for so many. One is loaded in ``folder``, to see what it takes."""
    folder.mkdir()
    with RunningAppliance(folder, seeds="", settings="health_check_interval_secs = 1") as measuring:
        measuring.create("first")
        measuring.wait_ready("first")
        eventually(measuring.node().memory_needs.read)
        (taken,) = measuring.node().memory_needs.read().values()
    return f"memory_limit_mb = {int(taken / 1024**2 * (room + SPARE))}"


class Looks(Background):
    """Looks all the time for two processes of one replica, and for more instances than there is room for.

    most: that it saw loaded at once. began: when the process of a launch did, by (instance, launch); since 1970.
    """

    def __init__(self, node_id: str, room: int) -> None:
        super().__init__()
        self.node_id, self.room = node_id, room
        self.wrong: list[str] = []
        self.most = self.count = 0
        self.many: list[float] = []  # the looks in a row that saw too many; time.monotonic
        self.began: dict[tuple[str, int], float] = {}
        self.threads = [threading.Thread(target=self.look)]

    def look(self) -> None:
        while not self.ended.wait(0.1):
            found = replicas_alive(self.node_id)
            # A look takes a while: one may have ended and its successor begun within it.
            live = {key: [each for each in pairs if alive(each[0])] for key, pairs in found.items()}
            self.wrong += [f"two processes of {key}: {pairs}" for key, pairs in live.items() if len(pairs) > 1]
            loaded = [key for key, pairs in live.items() if pairs]
            self.many = [*self.many, time.monotonic()] if len(loaded) > self.room else []
            if len(self.many) > 2 and self.many[-1] - self.many[0] > TOO_MANY_SECS:
                self.wrong.append(f"loaded at once for {self.many[-1] - self.many[0]:.1f} s: {sorted(loaded)}")
            self.most = max(self.most, len(loaded))
            self.count += 1
            for (name, _), pairs in live.items():
                for process, launch in pairs:
                    self.note_begin(name, launch, process.pid)

    def note_begin(self, name: str, launch: int, pid: int) -> None:
        if (name, launch) not in self.began and (started := processes.started(pid)):
            self.began[name, launch] = started.at_ns / 1e9
