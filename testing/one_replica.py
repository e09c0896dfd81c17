"""A replica for `BatchRunner`, without a process and a socket."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

from appliance.core.routing import Replica, Target
from appliance.core.settings import QueueSettings
from appliance.multiplexer.admission_queue import AdmissionQueue
from appliance.multiplexer.leases import ReplicaLeases
from appliance.multiplexer.suspicion import Suspicion, launch_of
from appliance.wire.calls import CallFailed, Status


class OneReplica:
    """As `ReplicaPool`, `Backend` and `Connection` at once: each request answered with itself, a bad one refused."""

    def __init__(self, capacity: int = 64) -> None:
        self.its_replica = Replica("one", 0, "127.0.0.1:1", "org/one", 1, capacity)
        self.looks = 0  # at its address: each slice that is considered has one
        self.outstanding = 0
        self.its_queue = AdmissionQueue("one", QueueSettings())
        self.its_queue.resize(capacity)
        self.connections = SimpleNamespace(drop_idle=lambda replica: None)
        self.arrivals = SimpleNamespace(
            until_ready=lambda target, choose, limits: choose(True), using=lambda target: nullcontext()
        )
        self.leases = ReplicaLeases()

    @property
    def replica(self) -> Replica:
        self.looks += 1
        return self.its_replica

    def ready(self, target: Target, look: bool = True) -> list["OneReplica"]:
        return [self]

    def generations(self, target: Target) -> tuple[tuple[str, int], ...]:
        return ()

    def queue(self, backend: Any) -> AdmissionQueue:
        return self.its_queue

    def flaw(self, backend: Any, method: str, request: bytes, reply: bytes) -> str | None:
        return None

    def suspicion(self, replica: Replica) -> Suspicion:
        return Suspicion(launch_of(replica), lambda conviction: None)

    def take(self, texts: int) -> None:
        self.outstanding += texts

    @contextmanager
    def connection(self, backend: Any, may_wait: bool = True) -> Iterator["OneReplica"]:
        yield self

    def begin(self, path: str, messages: Sequence[bytes], metadata: Any, one_at_a_time: bool) -> Sequence[bytes]:
        return messages

    def replies(self, messages: Sequence[bytes], check: Callable[[], float], wait: Any) -> Iterator[bytes]:
        for message in messages:
            if message == b"bad":
                raise CallFailed(Status(3, "bad text"), answered=True)
            yield message
