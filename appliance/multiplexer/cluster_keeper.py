"""Keeps the listing of a cluster of Ray Serve: asks its directory twice a second where the replicas are, and writes
what is new into the data folder, which all processes follow.

So a multiplexer goes on, and starts, with what was good last while the directory is away, without which replicas serve.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import tomli_w

from appliance.core import cluster, listing
from appliance.core.addresses import Address
from appliance.core.listing import Listed, Listing
from appliance.core.problems import Problem
from appliance.core.settings import Settings
from appliance.drivers.serve import ServeDirectory
from appliance.files.replacement import replace_file
from appliance.node.directory import read_listing

log = logging.getLogger(__name__)
LOOK_SECS = 0.5


class ClusterKeeper:
    """One for each data folder."""

    def __init__(self, settings: Settings, directory: Address) -> None:
        self.directory = ServeDirectory(directory)
        self.kept = Path(settings.layout.listing)
        self.written: Listing | None = None
        self.said = ""

    def start(self) -> None:
        """Begin with what another process has kept."""
        if self.kept.exists():
            try:
                self.written = read_listing(self.kept)
            except Problem as problem:
                log.error("The listing that was kept is not used: %s", problem.message)
        threading.Thread(target=self.keep, name="cluster", daemon=True).start()

    def keep(self) -> None:
        while True:
            try:
                self.look()
                self.said = ""
            except Problem as problem:
                self.say(f"Keeping the previous listing: {problem.message}")
            except OSError as error:
                self.say(f"The listing cannot be kept: {error}")
            time.sleep(LOOK_SECS)

    def look(self) -> None:
        """Raises: Problem; OSError where the listing cannot be written."""
        answer = cluster.directory_answer(self.directory.replicas())
        told = listing.parse({"instances": answer.tables})
        before = {each.name: each for each in self.written or ()}
        fresh = tuple(completed(each, before, each.name in answer.incomplete) for each in told)
        if fresh != self.written:
            replace_file(self.kept, tomli_w.dumps(listing.dump(fresh)), durable=True)
            self.written = fresh

    def say(self, words: str) -> None:
        """Once, as long as it is the same."""
        if words != self.said:
            log.error("%s", words)
        self.said = words


def completed(told: Listed, before: Mapping[str, Listed], incomplete: bool) -> Listed:
    """incomplete: some replicas have not said where they are, so those that were there before count as well: whether
    they still listen is seen on the connection."""
    earlier: tuple[Address, ...] = before[told.name].addresses if incomplete and told.name in before else ()
    return replace(told, addresses=tuple(dict.fromkeys((*told.addresses, *earlier))))
