"""What the gateway keeps for its callers is booked on every route that takes a body, and while replies come in."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import falcon
import falcon.inspect
import falcon.testing
import pyarrow as pa
import pytest

from appliance.core.access import NOBODY
from appliance.drivers.memory import Reserve
from appliance.gateway.app import create_app
from appliance.gateway.bodies import ARROW, RequestMemory
from appliance.gateway.multiplexer_calls import DENSE, MultiplexerCalls
from appliance.gateway.refusals import Reason, Refusal
from appliance.gateway.resource import Gateway
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from tests.gateway.test_arrow_and_limits import ipc

MIB = 2**20


class Unlabelled:
    def labels(self, *_: str) -> "Unlabelled":
        return self

    def inc(self) -> None:
        pass

    def observe(self, seconds: float) -> None:
        pass


def app(reserve: Reserve) -> falcon.App[Any, Any]:
    """The gateway's, with nothing behind its routes."""
    authenticator = SimpleNamespace(
        settings=SimpleNamespace(open_health=False),
        identify=lambda environ: NOBODY,
        authorize=lambda principal, need: None,
    )
    meters = SimpleNamespace(http=Unlabelled(), http_durations=Unlabelled())
    selector = SimpleNamespace(select=lambda request, model, tasks: None)
    nobody: Any = None
    return create_app(Gateway(nobody, selector, nobody, nobody, meters, authenticator, reserve))  # type: ignore[arg-type]


def posts() -> list[str]:
    found = falcon.inspect.inspect_app(app(Reserve(1))).routes
    return [
        route.path
        for route in found
        if any(method.method == "POST" and not method.internal for method in route.methods)
    ]


@pytest.mark.parametrize("path", posts())
def test_a_body_for_which_there_is_no_memory_is_429_on_every_route(path: str) -> None:
    reserve = Reserve(16 * MIB)
    client = falcon.testing.TestClient(app(reserve))
    headers = {"Content-Type": "application/json"}
    with reserve.reservation(15 * MIB):
        reply = client.simulate_post(path, body=b'{"inputs": "%s"}' % (b"a" * 500_000), headers=headers)
    assert reply.status_code == 429, reply.text
    assert "memory_budget_mb" in reply.text
    assert reply.headers["Retry-After-Ms"] == "1000"
    assert reserve.budget.used == 0


@pytest.mark.parametrize("path", ["/embed", "/embed_sparse"])
def test_arrow_for_which_there_is_no_memory_is_429(path: str) -> None:
    reserve = Reserve(16 * MIB)
    client = falcon.testing.TestClient(app(reserve))
    with reserve.reservation(15 * MIB):
        reply = client.simulate_post(path, body=ipc(pa.array(["x" * 1000] * 500)), headers={"Content-Type": ARROW})
    assert reply.status_code == 429, reply.text
    assert reserve.budget.used == 0


class Generous:
    """As `MultiplexerChannels`: answers every request with a megabyte, and counts."""

    max_message_bytes = 40 * MIB

    def __init__(self, reply: bytes) -> None:
        self.reply, self.asked = reply, 0

    def stream(self, name: str, requests: list[bytes], *_: Any, **__: Any) -> Iterator[bytes]:
        for _request in requests:
            self.asked += 1
            yield self.reply


def calls(channels: Generous, memory: RequestMemory) -> MultiplexerCalls:
    selection: Any = SimpleNamespace(names="one", target=mux.Target(instance_name="one"))
    return MultiplexerCalls(channels, selection, nullcontext, memory.reserve)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["EmbedAll", "PredictPair", "Tokenize", "Decode"])
def test_replies_are_taken_only_as_long_as_there_is_memory(name: str) -> None:
    """/embed_all took 5.2 GB."""
    reserve, channels = Reserve(100 * MIB), Generous(bytes(MIB))
    memory = RequestMemory(reserve)
    with pytest.raises(Refusal) as caught:
        for _ in calls(channels, memory).replies(name, [b""] * 1000):
            pass
    assert caught.value.reason is Reason.LARGE
    assert channels.asked < 60
    memory.release()
    assert reserve.budget.used == 0


def test_vectors_are_taken_only_as_long_as_there_is_memory() -> None:
    """/similarity, too, which reserved nothing for them."""
    batch = pa.record_batch([pa.FixedSizeListArray.from_arrays(pa.array([0.0] * 384 * 2000, pa.float32()), 384)], ["v"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    reply = mux.EmbedArrowResponse(arrow_ipc=sink.getvalue().to_pybytes(), metadata=tei.Metadata())
    reserve, channels = Reserve(20 * MIB), Generous(reply.SerializeToString())
    memory, _ = RequestMemory(reserve), reserve.reservation(5 * MIB)
    channels.max_message_bytes = 4 * 4096 * 2000 * 10 // 9 + 16384
    with pytest.raises(Refusal) as caught:
        calls(channels, memory).batches(DENSE, pa.array(["a"] * 20_000, pa.large_string()), {})
    assert caught.value.reason is Reason.OVERLOADED
    assert channels.asked < 10
