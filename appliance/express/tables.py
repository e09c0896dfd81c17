"""Which replicas Envoy may send calls to: read from the state, the journal and the kernel, written for Envoy to follow.

An instance with `express` is in the tables. Its replicas are, too, while

- it shall run, and the monitor has taken no traffic from them,
- the process that supervisord started for them listens on their port, and no other one,
- no call of this launch was convicted of ending replicas: the multiplexer refuses such a call, and Envoy cannot.

Where none is left, Envoy sends the calls to the multiplexer, which lets them wait or says why not. So it does with all
calls while nobody says that the tables are right: a port in old ones may be another instance's by now.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

from filelock import Timeout

from appliance.core.events import Event
from appliance.core.program import default_engine, marker
from appliance.core.routing import Replica
from appliance.drivers import envoy
from appliance.drivers.journal import after
from appliance.drivers.listeners import ListenerTable
from appliance.export import envoy as export
from appliance.export import envoy_tables
from appliance.export.express_lane import VALID_SECS, Config, ExpressLane
from appliance.files.replacement import replace_file
from appliance.files.signature import Signature, signature_or_none
from appliance.node.context import Node
from appliance.node.directory import Directory, StateSource

log = logging.getLogger(__name__)
Ports = dict[str, list[int]]  # of the replicas, by instance
FOLLOWED_SECS = 0.1  # until Envoy has read a table
AGAIN_SECS = 5.0  # until tables that Envoy rejected are shown to it again: it may have been short of time or memory


class Tables:
    """What `follow` has written is in the lane's folder. envoy: the binary, which has to accept it first."""

    def __init__(self, node: Node, lane: ExpressLane, binary: Path) -> None:
        self.node = node
        self.lane = lane
        self.binary = binary
        self.folder = Path(lane.folder)
        self.directory = Directory(StateSource(node.state, default_engine(node.settings)))
        self.seen_ports: Ports | None = None
        self.rejected_ports: Ports | None = None
        self.again_at = 0.0
        self.certificate_marks: list[Signature | None] = []
        self.certificate_turn = 0
        self.convicted: set[tuple[str, int]] = set()  # (instance, launch)
        self.journal_mark: tuple[int, int] | None = None
        self.journal_seq = 0

    def follow(self) -> None:
        """Look at everything once; write the tables if they changed, and say that they are right. Raises: OSError."""
        self.directory.refresh()
        self.follow_certificates()
        self.read_convictions()
        ports = self.ports()
        if ports != self.seen_ports:
            if ports == self.rejected_ports and time.monotonic() < self.again_at:
                return
            if not self.write(ports):
                self.rejected_ports, self.again_at = ports, time.monotonic() + AGAIN_SECS
                return
            self.seen_ports = ports
        self.confirm()

    def confirm(self) -> None:
        """Let Envoy use the tables for another moment. In place, and always as long: a reader sees one or the other."""
        handle = os.open(self.lane.valid_file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(handle, b"%020d\n" % (int(time.time()) + VALID_SECS), 0)
        finally:
            os.close(handle)

    def follow_certificates(self) -> None:
        """Have Envoy read files of `[tls]` that changed. If they cannot be used, it keeps those that it has."""
        tls = self.lane.tls
        files = [file for file in (tls.cert_file, tls.key_file, tls.client_ca_file) if file]
        marks = [signature_or_none(file) for file in files]
        if marks != self.certificate_marks:
            self.certificate_turn += 1
            for name, secret in export.secrets(self.lane, self.certificate_turn).items():
                self.put(name, envoy_tables.resources([secret]))
            self.certificate_marks = marks

    def read_convictions(self) -> None:
        if (mark := self.node.journal.mark()) == self.journal_mark:
            return
        try:
            events = after(self.node.journal.since(0), self.journal_seq)
        except (OSError, Timeout) as error:
            log.warning("The journal cannot be read: %s", error)
            return
        self.journal_mark = mark
        for event in events:
            self.journal_seq = event["seq"]
            if event["event"] == Event.CONVICTED:
                self.convicted.add((event["instance"], event["launch"]))
            elif event["event"] == Event.DELETED:  # the next instance of its name counts its launches anew
                self.convicted = {each for each in self.convicted if each[0] != event["instance"]}

    def ports(self) -> Ports:
        """Of the replicas that calls may go to now, of each instance with `express`."""
        instances, table = self.directory.state.instances, self.node.listening()
        return {
            route.name: [each.port for each in route.replicas if route.wanted == "running" and self.admits(each, table)]
            for route in self.directory.table.routes
            if instances[route.name].spec.express
        }

    def admits(self, replica: Replica, table: ListenerTable) -> bool:
        if (replica.instance, replica.launch) in self.convicted:
            return False
        mark = marker(self.node.id, replica.instance, replica.index, replica.launch)
        return self.node.listeners.proved(replica.port, mark, table)

    def write(self, ports: Ports) -> bool:
        """Replace the tables, unless Envoy rejects them: then those before stay, which is an event."""
        if not self.accepted("tables", export.candidate(self.lane, ports), told=ports == self.rejected_ports):
            return False
        # A route must never name a cluster that is not there: new ones come before it, and the others go after it.
        gone: Ports = {name: [] for name in self.seen_ports or {} if name not in ports}
        self.put_clusters(gone | ports)
        self.put(envoy_tables.ROUTES, envoy_tables.resources([envoy_tables.routes(self.lane, list(ports))]))
        if gone:
            time.sleep(FOLLOWED_SECS)
            self.put_clusters(ports)
        return True

    def put_clusters(self, ports: Ports) -> None:
        self.put(envoy_tables.CLUSTERS, envoy_tables.resources(envoy_tables.clusters(self.lane, ports)))

    def accepted(self, what: str, config: Config, told: bool = False) -> bool:
        """told: a rejection of the same is in the journal."""
        path = self.put("candidate.json", config)
        if words := envoy.refusal(self.binary, path):
            if not told:
                message = f"Envoy rejects its {what}; those before stay: {words}"
                self.node.journal.record(Event.EXPRESS_REJECTED, None, message)
            return False
        return True

    def put(self, name: str, config: Config) -> Path:
        path = self.folder / name
        replace_file(path, json.dumps(config), durable=False, mode=0o600)
        return path
