"""Keeps the listing of a directory that is not the state file: reads the operator's file, asks for the addresses of its
names, and writes what came of it into the data folder, which all processes follow.

So a multiplexer starts with what was good last, while names cannot be resolved or the file is being edited.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from pathlib import Path

import tomli_w

from appliance.core import listing
from appliance.core.listing import Listing
from appliance.core.problems import Problem, invalid
from appliance.core.resolution import Answers, Resolution, names_of
from appliance.core.settings import Settings
from appliance.files.replacement import replace_file
from appliance.files.signature import Signature, signature_or_none
from appliance.node.directory import read_listing

log = logging.getLogger(__name__)
LOOK_SECS = 1.0
UNKNOWN_NAMES = (socket.EAI_NONAME, socket.EAI_NODATA)  # every other failure says nothing about the name


class ListingKeeper:
    """One for each data folder."""

    def __init__(self, settings: Settings) -> None:
        kind, _, path = settings.directory.partition(":")
        self.source = Path(path)
        self.kept = Path(settings.layout.listing)
        self.resolution = Resolution(every=kind == "dns")
        self.wanted: Listing | None = None  # as the operator's file had it last
        self.seen: Signature | None = None
        self.read: Signature | None = None
        self.written: Listing | None = None
        self.said = ""

    def start(self) -> None:
        """Returns when there is a listing, unless nothing is known yet. What is known from before is used meanwhile."""
        if self.kept.exists():
            self.restore()
        else:
            self.look()
        threading.Thread(target=self.keep, name="listing", daemon=True).start()

    def restore(self) -> None:
        """Begin with what another process has kept."""
        try:
            self.written = read_listing(self.kept)
            self.resolution.restore(self.written, time.monotonic())
        except Problem as problem:
            log.error("The listing that was kept is not used: %s", problem.message)

    def keep(self) -> None:
        while True:
            time.sleep(LOOK_SECS)
            try:
                self.look()
            except OSError as error:
                self.say(f"The listing cannot be kept: {error}")

    def look(self) -> None:
        """Read the file, ask for its names, and write what is new. Raises: OSError where it cannot be written."""
        self.follow_source()
        if self.wanted is None:
            return
        resolved = self.resolution.resolve(self.wanted, addresses(names_of(self.wanted)), time.monotonic())
        if resolved != self.written:
            replace_file(self.kept, tomli_w.dumps(listing.dump(resolved)), durable=True)
            self.written = resolved

    def follow_source(self) -> None:
        """Read the file when it is another one, and the same as at the last look: it may be half written."""
        before, self.seen = self.seen, signature_or_none(self.source)
        if (self.seen == self.read and self.read) or (self.wanted and self.seen != before):
            return
        try:
            self.wanted = of_an_operator(read_listing(self.source))
            self.read = self.seen
            self.say("")
        except Problem as problem:
            self.say(f"Keeping the previous listing: {problem.message}")

    def say(self, words: str) -> None:
        """Once, as long as it is the same."""
        if words and words != self.said:
            log.error("%s", words)
        self.said = words


def of_an_operator(written: Listing) -> Listing:
    """Raises: Problem for what only a cluster says."""
    if listed := next((each for each in written if each.arrival), None):
        raise invalid(f'"{listed.name}": field "arrival" means nothing here: only a cluster starts what is missing')
    return written


def addresses(names: set[str]) -> Answers:
    return {name: addresses_of(name) for name in names}


def addresses_of(name: str) -> list[str] | None:
    """The IPv4 addresses of a name or, where it has none, those of IPv6: a replica with both is one replica. None where
    nobody could say."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return [] if error.errno in UNKNOWN_NAMES else None
    except (OSError, UnicodeError):
        return None
    fours = {str(place[0]) for family, *_, place in found if family == socket.AF_INET}
    return sorted(fours or {str(place[0]).partition("%")[0] for _, *_, place in found})
