"""Measurements of an instance: begin one, and look at the last one."""

from __future__ import annotations

import falcon

from appliance.control.errors import known_parameters
from appliance.control.resources import NodeResource, boolean, reply
from appliance.core.problems import invalid, quoted
from appliance.node import benchmarks as measured
from appliance.operations import benchmarks


class BenchResource(NodeResource):
    def on_get(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        known_parameters(request)
        reply(response, measured.show(self.node, name).mapping())

    def on_post(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        known_parameters(request, "secs", "force")
        begun = benchmarks.start(self.node, name, seconds(request), boolean(request, "force"))
        reply(response, begun.mapping(), 202)


def seconds(request: falcon.Request) -> float:
    sent = request.get_param("secs")
    try:
        return benchmarks.STEP_SECS if sent is None else float(sent)
    except ValueError:
        raise invalid(f"Query parameter secs must be a number, not {quoted(sent)}") from None
