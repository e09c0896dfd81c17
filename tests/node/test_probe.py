"""What a probe asks of a process, and what it asks only once."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import monotonic

import grpc
import psutil
import pytest
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from appliance.core.health import ProbeResult
from appliance.node.probe import LOOK_SECS, Heard, ProbeTarget, answer, content, numbers, probe
from appliance.wire.calls import CallFailed
from appliance.wire.tei.v1 import tei_pb2 as tei
from testing.running import free_ports


class Classifier(grpc.GenericRpcHandler):
    """A replica without metrics that notes what it is asked."""

    def __init__(self, port: int | None = None) -> None:
        self.asked: list[str] = []
        self.going = threading.Event()
        self.going.set()
        free, self.silent_port = free_ports(2)
        self.port = port or free
        self.server = grpc.server(ThreadPoolExecutor(4), handlers=[self])
        self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.server.start()

    def target(self, heard: Heard) -> ProbeTarget:
        return ProbeTarget(self.port, self.silent_port, proved=lambda port: True, model=heard.model)

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        self.asked.append(call.method.rpartition("/")[2])
        return grpc.unary_unary_rpc_method_handler(self.info if call.method.endswith("Info") else self.predict)

    def info(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        return tei.InfoResponse(model_type=tei.MODEL_TYPE_CLASSIFIER).SerializeToString()

    def predict(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        self.going.wait(10)
        return tei.PredictResponse(predictions=[tei.Prediction(label="yes", score=0.5)]).SerializeToString()


@pytest.fixture
def classifier() -> Iterator[Classifier]:
    running = Classifier()
    yield running
    running.server.stop(None).wait(timeout=10)


def test_a_process_is_asked_once_what_its_model_is(classifier: Classifier) -> None:
    heard = Heard()
    for _ in range(2):
        assert probe(classifier.target(heard), 5, heard) == (ProbeResult.ANSWERED, "")
    assert answer(classifier.target(heard), "a", monotonic() + 5) == {"yes": 0.5}
    assert classifier.asked == ["Info", "Predict", "Predict", "Predict"]
    another = Heard()  # its successor may be something else
    assert probe(classifier.target(another), 5, another) == (ProbeResult.ANSWERED, "")
    assert classifier.asked[4:] == ["Info", "Predict"]


class Pages:
    """The metrics of a replica. running: whether they tell what is in progress, as the engine's."""

    def __init__(self, port: int, running: bool) -> None:
        registry = CollectorRegistry()
        self.asked = 0
        self.begun = Gauge("te_predict_count", "texts", registry=registry)
        self.ended = Gauge("te_predict_success", "texts", registry=registry)
        self.answered = Gauge("te_request_success", "texts", registry=registry)
        self.answered.set_function(self.count)
        if running:
            Gauge("te_batch_running_duration", "seconds", registry=registry)
            Gauge("te_batch_running_tokens", "tokens", registry=registry)
        self.server, self.thread = start_http_server(port, "127.0.0.1", registry)

    def count(self) -> float:
        self.asked += 1
        return self.asked


@pytest.fixture(params=[True, False], ids=["engine", "TEI"])
def pages(classifier: Classifier, request: pytest.FixtureRequest) -> Iterator[Pages]:
    pages = Pages(classifier.silent_port, request.param)
    yield pages
    pages.server.shutdown()
    pages.server.server_close()
    pages.thread.join()


def test_what_is_in_progress_is_looked_at_before_a_probe_where_it_is_not_told_later(
    classifier: Classifier, pages: Pages, request: pytest.FixtureRequest
) -> None:
    is_engine = request.node.callspec.params["pages"]
    heard = Heard()
    for _ in range(3):
        assert probe(classifier.target(heard), 5, heard) == (ProbeResult.ANSWERED, "")
    assert pages.asked == (1 if is_engine else 3)
    heard.looked_at -= LOOK_SECS
    for _ in range(2):
        assert probe(classifier.target(heard), 5, heard) == (ProbeResult.ANSWERED, "")
    assert pages.asked == (2 if is_engine else 5)


@pytest.mark.parametrize("pages", [True], indirect=True)
def test_a_replica_that_is_late_is_looked_at_while_it_is_waited_for(classifier: Classifier, pages: Pages) -> None:
    """It has answered others between the two looks: so it is busy, though nothing was in progress at either."""
    heard = Heard()
    assert probe(classifier.target(heard), 5, heard) == (ProbeResult.ANSWERED, "")
    classifier.going.clear()
    assert probe(classifier.target(heard), 1, heard) == (ProbeResult.BUSY, "")
    assert pages.asked == 3
    pages.answered.set_function(lambda: 3)  # no other answer
    assert probe(classifier.target(heard), 1, heard)[0] is ProbeResult.MISSED
    classifier.going.set()
    assert probe(classifier.target(heard), 5, heard) == (ProbeResult.ANSWERED, "")


def connections(port: int) -> int:
    """How many connections this process has to the port."""
    return sum(each.raddr[1:] == (port,) for each in psutil.Process().net_connections("tcp"))


def test_all_calls_of_a_block_go_over_one_new_connection_that_is_proved_once(classifier: Classifier) -> None:
    looked_for: list[tuple[int, ...]] = []

    def proved(port: int, *since: float) -> bool:
        looked_for.append((port, connections(classifier.port)))
        return True

    heard = Heard()
    for _ in range(2):
        looked_for.clear()
        with replace(classifier.target(heard), proved=proved).on_one_connection() as replica:
            assert probe(replica, 5, heard) == (ProbeResult.ANSWERED, "")
            for _ in range(3):
                assert answer(replica, "a", monotonic() + 5) == {"yes": 0.5}
        # Who listens on the port of the metrics is told by the same look, since the connection was there before it.
        assert looked_for == [(classifier.port, 1), (classifier.silent_port, 1)]
        assert connections(classifier.port) == 0


def test_a_stranger_in_the_place_of_a_replica_that_ended_is_not_asked(classifier: Classifier) -> None:
    """Between two calls of one block: the connection has ended, and the next one is to somebody else."""
    heard = Heard()
    strangers: list[bool] = []

    def proved(port: int, *since: float) -> bool:
        return not strangers

    with replace(classifier.target(heard), proved=proved).on_one_connection() as replica:
        assert answer(replica, "a", monotonic() + 5) == {"yes": 0.5}
        classifier.server.stop(None).wait(timeout=10)
        with pytest.raises(CallFailed):
            answer(replica, "a", monotonic() + 5)
        stranger = Classifier(classifier.port)
        strangers.append(True)
        try:
            for _ in range(2):
                with pytest.raises(ValueError, match="is not this replica"):
                    answer(replica, "a", monotonic() + 5)
                assert probe(replica, 5, heard)[0] is ProbeResult.MISSED
        finally:
            stranger.server.stop(None).wait(timeout=10)
    assert stranger.asked == []


def test_what_is_compared_is_what_the_model_said() -> None:
    one = tei.EmbedResponse(embeddings=[1.0, 2.0], metadata=tei.Metadata(total_time_ns=7))
    other = tei.EmbedResponse(embeddings=[1.0, 2.0], metadata=tei.Metadata(total_time_ns=8))
    assert content(one) == content(other)
    assert numbers(one) == {"0": 1.0, "1": 2.0}
    assert content(one) != content(tei.EmbedResponse(embeddings=[1.0, -2.0]))
