"""Two multiplexer processes share one port: one dying costs only the calls on its own connections."""

import threading
import time
from pathlib import Path

import grpc
import pytest

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub
from testing.engines import FAMILIES
from testing.running import RunningAppliance, eventually

pytestmark = pytest.mark.faults
CALLERS = 12
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500))


def test_a_killed_worker_costs_only_its_own_connections(tmp_path: Path) -> None:
    with RunningAppliance(tmp_path, seeds="", settings="multiplexer_workers = 2") as running:
        running.create("small", model_id=str(FAMILIES / "bert-cls"))
        running.wait_ready("small")
        assert "multiplexer:multiplexer-1" in running.supervisorctl("status")
        errors: list[list[grpc.StatusCode]] = [[] for _ in range(CALLERS)]
        answers = [0] * CALLERS
        ended = threading.Event()

        def caller(number: int) -> None:
            with grpc.insecure_channel(f"127.0.0.1:{running.grpc_port}", OWN_CONNECTION) as channel:
                stub = TeiMultiplexerStub(channel)
                request = mux.EmbedRequest(
                    target=mux.Target(instance_name="small"), request=tei.EmbedRequest(inputs="river")
                )
                while not ended.is_set():
                    try:
                        stub.Embed(request, timeout=20)
                        answers[number] += 1
                    except grpc.RpcError as error:
                        errors[number].append(error.code())
                        time.sleep(0.1)

        threads = [threading.Thread(target=caller, args=(number,)) for number in range(CALLERS)]
        for thread in threads:
            thread.start()
        eventually(lambda: min(answers) > 20)
        running.processes_of("multiplexer", 0)[0].kill()
        before = list(answers)
        eventually(lambda: all(now > then + 20 for now, then in zip(answers, before, strict=True)), 30)
        ended.set()
        for thread in threads:
            thread.join()
        print(f"callers with errors: {sum(map(bool, errors))} of {CALLERS}, errors in all: {sum(map(len, errors))}")
        assert all(code is grpc.StatusCode.UNAVAILABLE for codes in errors for code in codes)
        assert any(not codes for codes in errors)
        eventually(lambda: running.supervisorctl("status").count("multiplexer:multiplexer") == 2)
