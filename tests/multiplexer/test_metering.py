"""What is counted of a call, and that one which begins anew is counted once."""

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from appliance.core.routing import Table
from appliance.drivers.metrics import Meters
from appliance.multiplexer.cooperation import WouldBlock
from appliance.multiplexer.metering import Metering


def test_a_call_that_begins_anew_found_room_once(meters: Meters) -> None:
    directory: Any = SimpleNamespace(table=Table(()))
    context: Any = SimpleNamespace(is_active=lambda: True, code=lambda: None)
    metering = Metering(meters, directory)

    def counted(name: str, **labels: str) -> float:
        return meters.registry.get_sample_value(f"tei_manager_{name}", labels) or 0.0

    def call(problem: type[Exception] | None) -> None:
        with metering.counting("Embed", context) as record:
            record.found_room += 1
            if problem:
                raise problem

    with pytest.raises(WouldBlock):
        call(WouldBlock)
    assert counted("queue_wait_seconds_count") == 0
    call(None)
    assert counted("queue_wait_seconds_count") == 1
    calls = {"method": "Embed", "instance": "", "code": grpc.StatusCode.OK.name}
    assert counted("grpc_requests_total", **calls) == 1
