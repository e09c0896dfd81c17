"""A replica that answers at once, for scripts/bench.py: TEI's Embed and EmbedStream with one constant vector.

python scripts/bench_stub.py PORT
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from appliance.wire.tei.v1 import tei_pb2 as tei

REPLY = tei.EmbedResponse(embeddings=[0.05] * 384, metadata=tei.Metadata(compute_tokens=8)).SerializeToString()


def stream(requests: Any, context: Any) -> Any:
    for _ in requests:
        yield REPLY


handlers = {
    "Embed": grpc.unary_unary_rpc_method_handler(lambda request, context: REPLY),
    "EmbedStream": grpc.stream_stream_rpc_method_handler(stream),
}
server = grpc.server(ThreadPoolExecutor(64))
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tei.v1.Embed", handlers),))
server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
server.start()
server.wait_for_termination()
