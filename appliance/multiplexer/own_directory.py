"""`tei_appliance.v1.Directory`: what this appliance tells its peers."""

from __future__ import annotations

import logging

import grpc
import tomli_w

from appliance.core import listing
from appliance.core.cachekey import Fingerprint
from appliance.core.instance import InstanceSpec
from appliance.core.problems import Problem
from appliance.core.settings import Settings
from appliance.core.state import State
from appliance.drivers.grpccalls import refuse
from appliance.drivers.statefile import StateFile
from appliance.multiplexer.fingerprint_watch import FingerprintWatch
from appliance.node.own_listing import own_listing
from appliance.node.servable import card_of
from appliance.wire.tei_appliance.v1.directory_pb2 import DESCRIPTOR, ListRequest, ListResponse

log = logging.getLogger(__name__)
MOST_TASKS = 1024
DIRECTORY = DESCRIPTOR.services_by_name["Directory"].full_name


class OwnDirectory:
    """Answers `List`. watch: knows the fingerprints of our instances."""

    def __init__(self, settings: Settings, watch: FingerprintWatch) -> None:
        self.settings = settings
        self.watch = watch
        self.state = StateFile(settings.state_file, now=str, on_repair=log.warning)  # only read here, never repaired
        self.tasks: dict[InstanceSpec, str] = {}

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        serialize = ListResponse.SerializeToString
        return {"List": grpc.unary_unary_rpc_method_handler(self.list, ListRequest.FromString, serialize)}

    def list(self, request: ListRequest, context: grpc.ServicerContext) -> ListResponse:
        try:
            state = self.state.read() if self.settings.has_state_directory else State()
        except Problem as problem:
            refuse(context, problem)
        routes = {route.name: route for route in self.watch.pool.directory.table.routes}

        def fingerprint(name: str) -> Fingerprint | None:
            return self.watch.current(routes[name]).fingerprint if name in routes else None

        own = own_listing(state, self.settings, fingerprint, lambda name: self.task(state.get(name).spec))
        return ListResponse(listing=tomli_w.dumps(listing.dump(own)))

    def task(self, spec: InstanceSpec) -> str | None:
        """Read once for each spec, as soon as its model is here."""
        if spec not in self.tasks and (card := card_of(spec)):
            self.tasks = {spec: card.task} if len(self.tasks) > MOST_TASKS else {**self.tasks, spec: card.task}
        return self.tasks.get(spec)
