"""What is said of an instance that is not ready."""

from types import SimpleNamespace
from typing import Any

import pytest

from appliance.gateway import tei_info
from appliance.gateway.refusals import Reason, Refusal
from appliance.node import overview
from appliance.wire.envelope import REPLICA_UNAVAILABLE

LOST = 'Replica 0 of "a" does not answer, see its logs: Socket closed'


@pytest.mark.parametrize(
    ("code", "words"), [("BACKEND_UNAVAILABLE", '"a" is still loading its model'), (REPLICA_UNAVAILABLE, LOST)]
)
def test_a_call_whose_replica_went_away_is_told_so_though_that_loads_again(
    monkeypatch: pytest.MonkeyPatch, code: str, words: str
) -> None:
    view = SimpleNamespace(
        name="a",
        status="starting",
        replicas=[SimpleNamespace(uptime_secs=1.0)],
        load_secs=5.0,
        startup_timeout_secs=300,
    )
    monkeypatch.setattr(overview, "show", lambda node, name: view)
    selection: Any = SimpleNamespace(first=SimpleNamespace(name="a"))
    node: Any = None
    told = tei_info.explain_unavailable(Refusal(Reason.UNAVAILABLE, LOST, code=code), node, selection)
    assert words in told.message
    assert told.retry_after_ms == 4000
