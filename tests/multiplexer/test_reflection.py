"""Every RPC is found and called through reflection alone, as grpcurl does it: no generated code of ours is used."""

import base64
import re
from typing import Any

import grpc
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.json_format import ParseDict
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from testing.arrows import ipc
from testing.running import RunningAppliance

SERVICE = "tei_multiplexer.v1.TeiMultiplexer"
INNER: dict[str, dict[str, Any]] = {
    "PredictPair": {"inputs": ["one", "two"]},
    "Rerank": {"query": "one", "texts": ["two"]},
    "RerankStream": {"query": "one", "text": "two"},
    "Decode": {"ids": [101, 7592, 102]},
    "EmbedImage": {"image": "AAAA"},
}
# MiniLM embeds; what it does not do is refused by the engine itself, so the call has gone all the way.
ANSWERED = ("Info", "Embed", "EmbedAll", "Tokenize", "Decode", "EmbedArrow", "EmbedAllArrow", "Hybrid")


def body(name: str) -> dict[str, Any]:
    plain = name.removesuffix("Stream")
    request: dict[str, Any] = {"target": {"instance_name": "minilm"}}
    if "Arrow" in name:
        request["arrow_ipc"] = base64.b64encode(ipc(pa.table({"text": ["one", None]}))).decode()
    elif name == "Hybrid":
        return {"inputs": "one", "legs": [{"target": request["target"], "output": "HYBRID_OUTPUT_DENSE"}]}
    elif name != "Info":
        request["request"] = INNER.get(name) or INNER.get(plain) or {"inputs": "one"}
    return request


def test_every_rpc_is_found_and_called_through_reflection_alone(appliance: RunningAppliance) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{appliance.grpc_port}") as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert SERVICE in database.get_services()
        service = descriptor_pool.DescriptorPool(database).FindServiceByName(SERVICE)
        assert len(service.methods) == 26
        # grpcurl prints the names that it is told here, and people read `.arrowIpc`.
        told = database.FindFileContainingSymbol(SERVICE)
        names = {field.name: field.json_name for message in told.message_type for field in message.field}
        assert (names["arrow_ipc"], names["model_id"]) == ("arrowIpc", "modelId")
        for method in service.methods:
            call(channel, method)


def call(channel: grpc.Channel, method: Any) -> None:
    request = ParseDict(body(method.name), message_factory.GetMessageClass(method.input_type)())
    reply_class = message_factory.GetMessageClass(method.output_type)
    many = method.client_streaming, method.server_streaming
    factory = {
        (False, False): channel.unary_unary,
        (True, True): channel.stream_stream,
        (True, False): channel.stream_unary,
    }[many]
    callable_ = factory(f"/{SERVICE}/{method.name}", type(request).SerializeToString, reply_class.FromString)
    given = iter([request]) if many[0] else request
    if method.name.removesuffix("Stream") in ANSWERED:
        reply = callable_(given, timeout=20)
        assert (next(reply) if many[1] else reply).ByteSize() > 0
        return
    with pytest.raises(grpc.RpcError) as caught:
        next(callable_(given, timeout=20)) if many[1] else callable_(given, timeout=20)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION, method.name
    assert re.search("BertModel is an embedding model|BertModel takes no images", caught.value.details())
