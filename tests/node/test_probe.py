"""What a probe asks of a process, and what it asks only once."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import grpc
import pytest

from appliance.core.health import ProbeResult
from appliance.node.probe import Heard, ProbeTarget, answer, probe
from appliance.wire.tei.v1 import tei_pb2 as tei
from testing.running import free_ports


class Classifier(grpc.GenericRpcHandler):
    """A replica without metrics that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.port, self.silent_port = free_ports(2)
        self.server = grpc.server(ThreadPoolExecutor(4), handlers=[self])
        self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.server.start()

    def target(self, heard: Heard) -> ProbeTarget:
        return ProbeTarget(self.port, self.silent_port, sparse=False, proved=lambda port: True, model=heard.model)

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        self.asked.append(call.method.rpartition("/")[2])
        return grpc.unary_unary_rpc_method_handler(self.info if call.method.endswith("Info") else self.predict)

    def info(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        return tei.InfoResponse(model_type=tei.MODEL_TYPE_CLASSIFIER).SerializeToString()

    def predict(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
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
