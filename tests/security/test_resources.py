"""`docs/security.md` says of every RPC and every HTTP route what a caller may hold: a new one needs a row."""

import re
from pathlib import Path

import falcon.inspect
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from appliance.control import routes as control
from appliance.drivers.memory import Reserve
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_appliance.v1 import engine_pb2
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from tests.gateway.test_budget import app

TEXT = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
TABLE = TEXT.partition("## What one caller may hold")[2].partition("\n## ")[0]
ROWS = [line.strip("|").split("|") for line in TABLE.splitlines() if line.startswith("|")][2:]
NAMED = [name for row in ROWS for name in re.findall(r"`([^`]+)`", row[0])]


def rpcs() -> set[str]:
    files = (mux.DESCRIPTOR, tei.DESCRIPTOR, engine_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
    services = [service for file in files for service in file.services_by_name.values()]
    return {method.name for service in services for method in service.methods}


def routes() -> set[str]:
    return {route.path for route in falcon.inspect.inspect_app(app(Reserve(1))).routes}


def management() -> set[str]:
    """Routes of the management API, as the table writes them: the gateway has some of the same paths."""
    return {f"{path}:9000" for path in control.document()["paths"]}


def test_every_rpc_and_route_has_one_row_and_no_row_is_of_none() -> None:
    assert sorted(NAMED) == sorted(rpcs() | routes() | management())


def test_every_row_says_how_much_for_how_long_and_what_they_are_told() -> None:
    for row in ROWS:
        assert len(row) == 4, row
        assert all(cell.strip() for cell in row), row
