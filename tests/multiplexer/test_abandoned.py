"""Calls that were given up, and whose replica went away soon afterwards: which of them are suspects."""

from types import SimpleNamespace
from typing import Any

import pytest

from appliance.core.routing import Replica
from appliance.multiplexer.replica_pool import ReplicaPool

OURS = Replica("a", 0, "127.0.0.1:1", "m", 1, 8)
PEER = Replica("a", 0, "far:9001", "m", 1, 8, server_name="far", is_peer=True)


class Gone:
    """A backend that is not ready any more, and had a call that its caller gave up."""

    ready = False

    def __init__(self, alone: bool) -> None:
        self.abandoned = [SimpleNamespace(method="Embed", digest=b"text", alone=alone)]

    def forget_abandoned(self) -> list[Any]:
        forgotten, self.abandoned = self.abandoned, []
        return forgotten


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("replica", "suspects"), [(OURS, 1), (PEER, 0)], ids=["a replica", "a peer"])
def test_a_peer_that_is_lost_was_not_ended_by_a_call(replica: Replica, suspects: int, alone: bool) -> None:
    told: list[Any] = []
    suspicion = SimpleNamespace(
        died_alone=lambda *call: told.append(call), suspect_digests=lambda *call: told.append(call)
    )
    backend = Gone(alone)
    pool: Any = SimpleNamespace(backends={replica: backend}, suspicion=lambda _: suspicion)
    ReplicaPool.suspect_abandoned(pool)
    assert (len(told), backend.abandoned) == (suspects, [])
