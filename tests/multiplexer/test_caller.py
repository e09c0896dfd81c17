"""What a replica is told of a call, and how the call ends with that of a replica."""

from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import pytest

from appliance.core.routing import Replica
from appliance.multiplexer.caller import end_as, metadata_for_replica
from appliance.wire.calls import CallFailed, Code, Status
from appliance.wire.envelope import CODE_KEY
from appliance.wire.served_calls import request_of

BACKEND: Any = SimpleNamespace(replica=Replica("one", 0, "127.0.0.1:1", "m", 1, 64))


class Ended(Exception):
    pass


class Caller:
    def __init__(self, *metadata: tuple[str, str]) -> None:
        self.metadata = metadata
        self.trailing: dict[str, Any] = {}

    def invocation_metadata(self) -> Any:
        return self.metadata

    def set_trailing_metadata(self, trailing: Any) -> None:
        self.trailing = dict(trailing)

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise Ended(code.name)


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (Status(Code.UNAVAILABLE, "gone"), {CODE_KEY: "REPLICA_UNAVAILABLE"}),
        (Status(Code.UNAVAILABLE, "full", ((CODE_KEY, "QUEUE_FULL"),)), {CODE_KEY: "QUEUE_FULL"}),
        (Status(Code.INVALID_ARGUMENT, "empty"), {}),
    ],
)
def test_the_end_of_a_replica_is_not_taken_for_that_of_the_multiplexer(status: Status, told: dict[str, str]) -> None:
    """The gateway asked another process of it, where a call that ends replicas is no suspect."""
    caller: Any = Caller()
    with pytest.raises(Ended, match=Code(status.code).name):
        end_as(caller, BACKEND, CallFailed(status, answered=False))
    assert caller.trailing == told


@pytest.mark.parametrize("name", ["content-length", "connection", "transfer-encoding", "te", "host"])
def test_what_is_the_connections_is_nobody_elses(name: str) -> None:
    """The inner message is shorter than the one whose length the caller has told."""
    caller: Any = Caller((name, "1"), ("traceparent", "00-1"))
    assert metadata_for_replica(caller, None, is_peer=False) == [("traceparent", "00-1")]
    headers = ((":method", "POST"), (":path", "/x"), ("content-type", "application/grpc"), (name, "1"), ("a", "b"))
    assert request_of(headers).metadata == (("a", "b"),)
