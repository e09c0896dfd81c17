"""The table of RPCs is the proto service, row for row, and the generated modules are the protos."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.wire import methods
from appliance.wire.methods import METHODS, Method, Shape
from appliance.wire.tei.v1 import tei_pb2
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2

ROOT = Path(__file__).parents[2]
SERVICE = multiplexer_pb2.DESCRIPTOR.services_by_name["TeiMultiplexer"]
SHAPES = {(False, False): Shape.UNARY, (True, True): Shape.BIDI_STREAMING, (True, False): Shape.CLIENT_STREAMING}
PROMISED = {
    Shape.UNARY: "Info Embed EmbedSparse EmbedAll Predict PredictPair Rerank Tokenize Decode",
    Shape.BIDI_STREAMING: "EmbedStream EmbedSparseStream EmbedAllStream PredictStream PredictPairStream "
    "TokenizeStream DecodeStream",
    Shape.CLIENT_STREAMING: "RerankStream",
}


def test_every_rpc_has_its_row_and_every_row_its_rpc() -> None:
    """Arrow and Hybrid are the multiplexer's own work, not a relay; images are the embedded engine's."""
    rpcs = [rpc for rpc in SERVICE.methods if not re.search("Arrow|Hybrid|Image", rpc.name)]
    assert {method.name for method in methods.IMAGES} == {rpc.name for rpc in SERVICE.methods if "Image" in rpc.name}
    relayed = {rpc.name: SHAPES[rpc.client_streaming, rpc.server_streaming] for rpc in rpcs}
    assert {method.name: method.shape for method in METHODS} == relayed
    assert len(METHODS) == len(relayed)


def test_the_rows_are_the_contract_s() -> None:
    shapes = {name: shape for shape, names in PROMISED.items() for name in names.split()}
    assert {method.name: method.shape for method in METHODS} == shapes


def test_the_service_has_the_contract_s_name() -> None:
    assert SERVICE.full_name == "tei_multiplexer.v1.TeiMultiplexer" == methods.MULTIPLEXER


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_row_leads_to_the_rpc_of_tei_with_the_same_messages(method: Method) -> None:
    _, service, name = method.path.split("/")
    there = tei_pb2.DESCRIPTOR.services_by_name[service.removeprefix("tei.v1.")].methods_by_name[name]
    here = SERVICE.methods_by_name[method.name]
    assert here.output_type.full_name == there.output_type.full_name
    assert (here.client_streaming, here.server_streaming) == (there.client_streaming, there.server_streaming)
    inner = here.input_type.fields_by_name.get("request")
    assert method.needs_request == (inner is not None)
    assert inner is None or (inner.message_type and inner.message_type.full_name) == there.input_type.full_name


def test_the_services_are_all_of_tei_s() -> None:
    assert set(methods.SERVICES) == set(tei_pb2.DESCRIPTOR.services_by_name)
    assert len(methods.SERVICES) == len(set(methods.SERVICES))


def test_field_numbers_are_those_of_existing_clients() -> None:
    numbers = {field.name: field.number for field in multiplexer_pb2.Target.DESCRIPTOR.fields}
    assert numbers == {"instance_name": 1, "model_id": 2, "instance_index": 3}
    for rpc in SERVICE.methods:
        if rpc.name == "Hybrid":  # each leg has a target
            continue
        fields = rpc.input_type.fields_by_name
        assert fields["target"].number == 1
        assert "request" not in fields or fields["request"].number == 2


@pytest.mark.processes
def test_the_generated_modules_are_in_step_with_the_protos(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "protos.py", tmp_path], check=True, timeout=60)
    fresh = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*_pb2*.py*")}
    wire = ROOT / "appliance" / "wire"
    committed = {path.relative_to(wire): path.read_text() for path in wire.rglob("*_pb2*.py*") if path.suffix != ".pyc"}
    assert sorted(fresh) == sorted(committed)
    assert [str(path) for path in fresh if fresh[path] != committed[path]] == []
