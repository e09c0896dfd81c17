"""What the gateway is compared to: a plain Falcon handler that turns protobuf floats into JSON, one stream a request.

python scripts/bench_plain.py PORT MULTIPLEXER INSTANCE
"""

import json
import sys
from pathlib import Path

import falcon
import grpc

sys.path.insert(0, str(Path(__file__).parent.parent))
from appliance.drivers.httpserver import GunicornServer
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub


class Embeddings:
    def __init__(self, multiplexer: str, instance: str) -> None:
        self.stub = TeiMultiplexerStub(grpc.insecure_channel(multiplexer))
        self.target = mux.Target(instance_name=instance)

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        texts = json.loads(request.stream.read(2**26))["input"]
        calls = (
            mux.EmbedRequest(target=self.target, request=tei.EmbedRequest(inputs=text, truncate=True)) for text in texts
        )
        vectors = [list(reply.embeddings) for reply in self.stub.EmbedStream(calls)]
        data = [{"object": "embedding", "index": at, "embedding": vector} for at, vector in enumerate(vectors)]
        response.text = json.dumps({"object": "list", "data": data})


def make_app() -> falcon.App:
    app = falcon.App()
    app.add_route("/v1/embeddings", Embeddings(*sys.argv[2:]))
    return app


if __name__ == "__main__":
    GunicornServer(
        "plain", f"127.0.0.1:{sys.argv[1]}", 2, 8, make_app, lambda status, message: ("text/plain", message)
    ).run()
