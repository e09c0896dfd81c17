"""A caller beside an overload, for scripts/bench.py: asks again and again, prints the seconds of each refusal as JSON.

python scripts/bench_probe.py PORT SECONDS
"""

import json
import sys
import time
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).parent.parent))
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub

stub = TeiMultiplexerStub(grpc.insecure_channel(f"127.0.0.1:{sys.argv[1]}"))
request = mux.EmbedRequest(target=mux.Target(instance_name="one"), request=tei.EmbedRequest(inputs="a short query"))
ended, refused = time.monotonic() + float(sys.argv[2]), []
while time.monotonic() < ended:
    began = time.perf_counter()
    try:
        stub.Embed(request, timeout=60)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        refused.append(time.perf_counter() - began)
    time.sleep(0.05)
print(json.dumps(refused))
