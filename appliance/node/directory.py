"""Where the instances and the table of replicas come from: the state file, or a listing. Nothing else in a data path
knows.

    directory     instances and addresses
    state         those of this appliance, as the state file has them
    static, dns   those of a listing (`core.listing`). The multiplexer resolves its names and keeps the last good one in
                  the data folder (`multiplexer.listing_keeper`); all processes follow that

Beside the state, the instances of the peers: a listing of what they have, kept in the same way
(`multiplexer.peers_keeper`). They get the calls for what is not here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import tomli

from appliance.core import listing
from appliance.core.addresses import Address
from appliance.core.listing import Listed, Listing, Numbers
from appliance.core.problems import Kind, Problem, invalid, quoted
from appliance.core.program import LOOPBACK, default_engine
from appliance.core.routing import Table, table_of
from appliance.core.settings import Settings
from appliance.core.state import State
from appliance.drivers.filechange import FileChange
from appliance.drivers.statefile import StateFile
from appliance.files.signature import Signature, signature

log = logging.getLogger(__name__)


class Content(NamedTuple):
    """What a source says at one moment. listed: by name, of a listing."""

    state: State
    table: Table
    listed: Mapping[str, Listed]


NOTHING = Content(State(), Table(), {})


class InstanceSource(Protocol):
    """A file that says which instances there are. absent: why nothing is known without it; None where it says nothing
    then."""

    path: Path
    absent: Problem | None

    def content(self) -> Content:
        """Raises: Problem."""


class StateSource:
    """engine: of instances that ask for none."""

    def __init__(self, file: StateFile, engine: str) -> None:
        self.file = file
        self.path = file.path
        self.absent: Problem | None = None
        self.engine = engine

    def content(self) -> Content:
        state = self.file.read()
        return Content(state, table_of(state, LOOPBACK, self.engine), {})


class ListingSource:
    """engine: of instances that ask for none. peers: of a listing of what they have; else none."""

    def __init__(self, path: Path, engine: str, peers: Sequence[Address] = ()) -> None:
        self.path = path
        self.engine = engine
        self.peers = peers
        self.numbers = Numbers()
        words = f"{path} is not there yet: multiplexer-0 writes it, and its log says what it lacks"
        self.absent: Problem | None = Problem(Kind.UNAVAILABLE, "LISTING_UNREADABLE", words)

    def content(self) -> Content:
        listed = read_listing(self.path)
        if self.peers:
            listed = listing.of_peers(listed, self.peers)
        table = listing.table_of(listed, self.engine, self.numbers, are_peers=bool(self.peers))
        return Content(listing.state_of(listed), table, {each.name: each for each in listed})


def read_listing(path: Path) -> Listing:
    """Raises: Problem that names the file."""
    try:
        with path.open("rb") as file:
            return listing.parse(tomli.load(file))
    except OSError as error:
        raise Problem(Kind.UNAVAILABLE, "LISTING_UNREADABLE", f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8
        raise invalid(f"{path} is not TOML: {error}") from error
    except Problem as problem:
        raise Problem(problem.kind, problem.code, f"{path}: {problem.message}") from None


class Directory:
    """Follows a source; `content` is replaced as a whole and never changed. Thread-safe.

    beside: of the peers, for what the source does not have.
    """

    def __init__(self, source: InstanceSource, beside: Directory | None = None) -> None:
        self.source = source
        self.beside = beside
        self.own = NOTHING
        self.content = NOTHING
        self.signature_read: Signature | None = None
        self.problem: Problem | None = None  # why the file could not be read at the last look
        self.lock = threading.Lock()  # of two that look, the slower one must not put back what it read before

    @classmethod
    def of(cls, settings: Settings) -> Directory:
        """That of the settings `directory` and `peers`."""
        engine = default_engine(settings)
        if not settings.has_state_directory:
            return cls(ListingSource(Path(settings.layout.listing), engine))
        # Only read here, never repaired.
        state = StateSource(StateFile(settings.state_file, now=str, on_repair=log.warning), engine)
        peers = ListingSource(Path(settings.layout.peers), engine, settings.peers) if settings.peers else None
        return cls(state, cls(peers) if peers else None)

    @property
    def state(self) -> State:
        return self.content.state

    @property
    def table(self) -> Table:
        return self.content.table

    def notice(self) -> FileChange | None:
        """Hears at once that the source was replaced; None where the kernel has none: a look sees it, too."""
        try:
            return FileChange(self.source.path)
        except OSError as error:
            log.warning("Changes of %s are seen with a delay: %s", self.source.path, error)
            return None

    def require(self) -> None:
        """Raises: Problem while there is a file that could never be read: what it would say is unknown, not nothing."""
        if self.problem and self.signature_read is None:
            raise Problem(self.problem.kind, self.problem.code, self.problem.message)

    def refresh(self) -> None:
        """Look at the files again. An unreadable one keeps the previous content."""
        with self.lock:
            own, beside = self.own, self.beside.content if self.beside else NOTHING
            self.follow_source()
            if self.beside:
                self.beside.refresh()
            if own is self.own and (self.beside is None or beside is self.beside.content):
                return
            content = joined(self.own, self.beside.content) if self.beside else self.own
            # The same table as before is the very same object: whoever follows it sees at once that nothing changed.
            self.content = content._replace(table=self.table) if content.table == self.table else content

    def follow_source(self) -> None:
        try:
            present = signature(self.source.path)
        except OSError:
            return
        if present is None:
            self.problem = self.problem or self.source.absent
        if present is None or present == self.signature_read:
            return
        try:
            self.own = self.source.content()
        except Problem as problem:
            if self.problem is None or problem.message != self.problem.message:
                log.error("Keeping the previous routes: %s", problem.message)
            self.problem = problem
            return
        self.problem = None
        self.signature_read = present


def joined(own: Content, peers: Content) -> Content:
    """Ours, and what the peers have besides."""
    elsewhere = tuple(route for route in peers.table.routes if route.name not in own.state.instances)
    instances = {**peers.state.instances, **own.state.instances}
    return Content(
        replace(own.state, instances=dict(sorted(instances.items()))),
        replace(own.table, elsewhere=elsewhere),
        {route.name: peers.listed[route.name] for route in elsewhere},
    )


def refuse_listed(settings: Settings) -> None:
    """Raises: Problem where calls go to the instances of a listing: one that is made here would get none."""
    if not settings.has_state_directory:
        raise Problem(
            Kind.PRECONDITION,
            "INSTANCES_ARE_LISTED",
            f"This appliance serves the instances of its directory {quoted(settings.directory)}: list the instance "
            'there, or set directory = "state"',
        )
