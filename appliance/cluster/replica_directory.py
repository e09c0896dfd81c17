"""The directory of a cluster: which instances there are, and where their replicas listen."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from appliance.core.cluster import FAILED, REPLICA_DEPLOYMENT, application_name

log = logging.getLogger(__name__)
FRESH_SECS = 0.4  # so long an answer serves all who ask
WAKE_SECS = 10.0
ANSWER_SECS = 2.0  # of the replicas of an instance, to the question where they are


class Deployed(NamedTuple):
    """An application in Serve's words; replicas: how many run."""

    status: str
    replicas: int


UNKNOWN = Deployed("NOT_STARTED", 0)


class ClusterDirectory:
    """running: what Serve says of each application. handle: of a deployment of an application.

    Serve's own count proves that an answer is whole: a handle that is new knows some replicas only a moment later.
    """

    def __init__(self, running: Callable[[], Mapping[str, Deployed]], handle: Callable[[str, str], Any]) -> None:
        self.running = running
        self.handle = handle
        self.handles: dict[str, Any] = {}
        self.listing: list[Mapping[str, Any]] = []
        self.on_demand: frozenset[str] = frozenset()
        self.known: dict[str, Any] = {}
        self.known_at = float("-inf")
        self.lock = asyncio.Lock()
        self.waking: dict[str, asyncio.Task[None]] = {}

    def reconfigure(self, listing: Mapping[str, Any]) -> None:
        """Called by Serve with the instances that there are, as a listing without addresses, and the names of those
        that a call starts."""
        self.listing = list(listing["instances"])
        self.on_demand = frozenset(listing["on_demand"])
        self.known_at = float("-inf")

    async def answer(self) -> dict[str, Any]:
        """As `core.cluster.directory_answer` reads it."""
        async with self.lock:
            if time.monotonic() - self.known_at > FRESH_SECS:
                self.known = await self.look()
                self.known_at = time.monotonic()
            return self.known

    async def look(self) -> dict[str, Any]:
        names = [str(each["name"]) for each in self.listing]
        running = await asyncio.to_thread(self.running)
        told = await asyncio.gather(*(self.replicas_of(name) for name in names), return_exceptions=True)
        replicas = {name: self.heard(name, each) for name, each in zip(names, told, strict=True)}
        known = {name: running.get(application_name(name), UNKNOWN) for name in names}
        return {
            "instances": [self.entry(each, replicas, known) for each in self.listing],
            "replicas": replicas,
            "incomplete": [name for name in names if len(replicas[name]) < known[name].replicas],
        }

    def entry(self, listed: Mapping[str, Any], replicas: Mapping[str, Any], known: Mapping[str, Deployed]) -> Any:
        """As a listing has it."""
        name = str(listed["name"])
        arrival = "sleeping" if name in self.on_demand else "starting"
        return {
            **listed,
            "addresses": [replica["address"] for replica in replicas[name]],
            "arrival": "failed" if known[name].status == FAILED else arrival,
        }

    async def replicas_of(self, name: str) -> list[Any]:
        """What its replicas tell. Raises: exceptions of Ray, where the application is coming or going, or a replica
        has died."""
        asked = self.handle_of(name).broadcast("address").results_async()
        return sorted(await asyncio.wait_for(asked, ANSWER_SECS), key=lambda each: str(each["id"]))

    def heard(self, name: str, told: list[Any] | BaseException) -> list[Any]:
        """None, where not all of them have told it."""
        if isinstance(told, BaseException):
            log.info("%s has not answered: %s", name, told)
            return []
        return told

    def handle_of(self, name: str) -> Any:
        if name not in self.handles:
            self.handles[name] = self.handle(REPLICA_DEPLOYMENT, application_name(name))
        return self.handles[name]

    async def wake(self, name: str) -> bool:
        """Let Serve start an instance without replicas: a call that waits is what it goes by. Returns when it has one,
        or after a while; False where there is no such instance."""
        if name not in {each["name"] for each in self.listing}:
            return False
        if name not in self.waking or self.waking[name].done():
            self.waking[name] = asyncio.get_running_loop().create_task(self.call(name))
        waking = self.waking[name]
        await asyncio.wait({waking}, timeout=WAKE_SECS)
        if waking.done() and (error := waking.exception()):
            log.warning("%s does not start: %s", name, error)
        return True

    async def call(self, name: str) -> None:
        await self.handle_of(name).address.remote()
