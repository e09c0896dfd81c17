"""From the names in a listing to addresses, look by look.

A name that cannot be asked about keeps the addresses that it had: what answers names being away says nothing of the
replicas. An address that is not among the answers any more is kept for a while, because one answer may lack what the
next one has; whether something still listens there is seen on the connection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from appliance.core.addresses import Address, is_ip
from appliance.core.listing import Listed, Listing

GRACE_SECS = 10.0
Answers = Mapping[str, Sequence[str] | None]  # name -> its addresses; None: nobody could say


def names_of(listing: Listing) -> set[str]:
    return {address.host for listed in listing for address in listed.addresses if not is_ip(address.host)}


class Resolution:
    """every: a name stands for all its addresses, each a replica; otherwise for one of them."""

    def __init__(self, every: bool) -> None:
        self.every = every
        self.known: dict[str, tuple[str, ...]] = {}
        self.seen: dict[tuple[str, str], float] = {}  # when an answer had this address of this name

    def restore(self, listing: Listing, now: float) -> None:
        """Begin with what was resolved before, by another process."""
        for listed in listing:
            for address, name in listed.named:
                self.known[name] = (*self.known.get(name, ()), address.host)
                self.seen[name, address.host] = now

    def resolve(self, listing: Listing, answers: Answers, now: float) -> Listing:
        """now: of a clock that only goes forward, in seconds."""
        names = names_of(listing)
        self.known = {name: known for name, known in self.known.items() if name in names}
        self.seen = {key: at for key, at in self.seen.items() if key[0] in names}
        for name in names:
            self.note(name, answers.get(name), now)
        return tuple(self.resolved(listed) for listed in listing)

    def note(self, name: str, answer: Sequence[str] | None, now: float) -> None:
        if answer is None:
            self.seen.update({(name, host): now for host in self.known.get(name, ())})
            return
        self.seen.update({(name, host): now for host in answer})
        recent = [host for host in self.known.get(name, ()) if self.seen[name, host] > now - GRACE_SECS]
        if not self.every and answer:
            # One replica: the address that it had, as long as that is one of the name's.
            self.known[name] = (next((host for host in recent if host in answer), sorted(answer)[0]),)
            return
        self.known[name] = tuple(sorted({*recent, *answer}))

    def resolved(self, listed: Listed) -> Listed:
        found: dict[Address, str] = {}
        for address, name in listed.named:
            hosts = (address.host,) if is_ip(address.host) else self.known.get(address.host, ())
            for host in hosts:
                found.setdefault(Address(host, address.port), name)
        return replace(listed, addresses=tuple(found), server_names=tuple(found.values()))
