"""Keeps the listing of what the peers have: asks each of them again and again, and writes what came of it into the data
folder, which all processes follow.

A peer that does not answer keeps its instances. It is as a replica that is away: calls for them wait, or are told so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import tomli
import tomli_w
from google.protobuf.message import DecodeError

from appliance.core import listing
from appliance.core.addresses import Address, is_ip
from appliance.core.listing import Listed, Listing
from appliance.core.problems import Problem
from appliance.core.routing import Replica, space_of
from appliance.core.settings import Settings
from appliance.drivers.grpccalls import deadline_check
from appliance.drivers.http2 import CONNECT_SECS
from appliance.files.replacement import replace_file
from appliance.multiplexer.listing_keeper import addresses_of
from appliance.multiplexer.remote_replicas import RemoteReplicas
from appliance.node.directory import read_listing
from appliance.wire.calls import CallFailed, Code, Status, timeout_header
from appliance.wire.tei_appliance.v1.directory_pb2 import ListRequest, ListResponse

log = logging.getLogger(__name__)
LOOK_SECS = 1.0
LARGEST_BYTES = 4 * 1024 * 1024  # of an answer: some 10,000 instances
PATH = "/tei_appliance.v1.Directory/List"


class Peer:
    """One of the setting `peers`. has: its instances, as it said last; None before it said anything."""

    def __init__(self, address: Address, remote: RemoteReplicas) -> None:
        self.address = address
        self.remote = remote
        self.host = address.host  # its IP address
        self.has: Listing | None = None
        self.reply = b""  # which was read last
        self.thread: threading.Thread | None = None  # that asks it
        self.said = ""

    def begin(self) -> None:
        """Ask it in a thread, unless the one before still does."""
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=self.look, name="peer", daemon=True)
            self.thread.start()

    def look(self) -> None:
        """Ask it. Without an answer it has what it had."""
        try:
            self.resolve()
            reply = self.ask()
            if reply != self.reply or self.has is None:  # to read it again takes a millisecond for five instances
                self.has = listing.parse_peers(tomli.loads(ListResponse.FromString(reply).listing))
                self.reply = reply
            self.say("")
        except (OSError, CallFailed, Problem, ValueError, DecodeError, RecursionError) as error:
            self.say(f"The peer {self.address} does not say what it has: {error}")

    def resolve(self) -> None:
        """Raises: OSError while no address of it was ever known: the thread that watches replicas asks for none."""
        if is_ip(self.address.host):
            return
        found = addresses_of(self.address.host)
        if found and self.host not in found:
            self.host = found[0]
        if not is_ip(self.host):
            raise OSError("its name has no address")

    @property
    def reached(self) -> Address:
        return Address(self.host, self.address.port)

    def ask(self) -> bytes:
        """Raises: OSError, CallFailed; ValueError for more than one answer."""
        place = Replica("", 0, str(self.reached), "", 1, 1, server_name=self.address.host, is_peer=True)
        connection = self.remote.connect(place)
        try:
            call = connection.begin(PATH, (ListRequest().SerializeToString(),), [timeout()])
            in_time = deadline_check(CONNECT_SECS, "no answer after {:g} s")

            def check() -> float:
                if call.incomplete.needed > LARGEST_BYTES:
                    words = f"its answer is larger than {LARGEST_BYTES} bytes"
                    raise CallFailed(Status(Code.RESOURCE_EXHAUSTED, words), answered=True)
                return in_time()

            (reply,) = connection.replies(call, check)
            return reply
        finally:
            connection.close()

    def say(self, words: str) -> None:
        """Once, as long as it is the same."""
        if words and words != self.said:
            log.warning("%s", words)
        self.said = words


def timeout() -> tuple[str, str]:
    return "grpc-timeout", timeout_header(CONNECT_SECS)


class PeersKeeper:
    """One for each data folder. engine: of our instances that ask for none."""

    def __init__(self, settings: Settings, remote: RemoteReplicas, engine: str) -> None:
        self.kept = Path(settings.layout.peers)
        self.engine = engine
        self.peers = [Peer(address, remote) for address in settings.peers]
        self.written: Listing | None = None

    def start(self) -> None:
        """What is known from before is used until a peer has answered."""
        try:
            self.restore(read_listing(self.kept))
        except Problem as problem:
            if self.kept.exists():
                log.error("What was kept of the peers is not used: %s", problem.message)
        threading.Thread(target=self.keep, name="peers", daemon=True).start()

    def restore(self, before: Listing) -> None:
        self.written = before
        for peer in self.peers:
            has = []
            for listed in before:
                for address, name in listed.named:
                    if (name, address.port) == peer.address:
                        peer.host = address.host
                        has.append(replace(listed, addresses=(), server_names=()))
            peer.has = tuple(has) or None

    def keep(self) -> None:
        while True:
            try:
                self.look()
            except (OSError, RuntimeError) as error:  # also where no thread can be started
                log.error("What the peers have cannot be kept: %s", error)
            time.sleep(LOOK_SECS)

    def look(self) -> None:
        """Ask all peers, and write what is new. One that takes longer, or whose name does, holds up no other; it is
        waited for at a later look. Raises: OSError where it cannot be written."""
        until = time.monotonic() + LOOK_SECS
        for peer in self.peers:
            peer.begin()
        for peer in self.peers:
            if peer.thread:
                peer.thread.join(max(0.0, until - time.monotonic()))
        found = joined(self.peers, self.engine)
        if found != self.written and any(peer.has is not None for peer in self.peers):
            replace_file(self.kept, tomli_w.dumps(listing.dump(found)), durable=True)
            self.written = found


def joined(peers: list[Peer], engine: str) -> Listing:
    """Each instance with the peers that have it. One whose vectors are others than those of the first peer with an
    instance of that name is left out: answers of both must not be mixed."""
    found: dict[str, Listed] = {}
    for peer in peers:
        reached, name = peer.reached, peer.address.host
        for listed in peer.has or ():
            before = found.get(listed.name)
            if before is None:
                found[listed.name] = replace(listed, addresses=(reached,), server_names=(name,))
            elif reached not in before.addresses and are_alike(before, listed, engine):
                found[listed.name] = replace(
                    before,
                    addresses=(*before.addresses, reached),
                    server_names=(*before.server_names, name),
                    fingerprint=before.fingerprint or listed.fingerprint,
                )
    return with_own_aliases(found)


def are_alike(one: Listed, other: Listed, engine: str) -> bool:
    """Whether the vectors of both go together, as far as that is known: a peer that has just started has no
    fingerprint yet."""
    if one.fingerprint and other.fingerprint and one.fingerprint != other.fingerprint:
        return False
    return space_of(one.spec, engine) == space_of(other.spec, engine)


def with_own_aliases(found: Mapping[str, Listed]) -> Listing:
    """A word means one instance, though the peers do not know of each other: a name goes before an alias, and of two
    with one alias the first one has it. found: by name, in the order of the peers."""
    taken = set(found)
    listing = []
    for listed in found.values():
        aliases = tuple(alias for alias in listed.spec.aliases if alias not in taken)
        taken.update(aliases)
        listing.append(replace(listed, spec=replace(listed.spec, aliases=aliases)))
    return tuple(sorted(listing, key=lambda each: each.name))
