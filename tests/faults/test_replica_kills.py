"""kill -9 of one of two replicas, again and again, under Arrow and single calls: no caller sees an error."""

import random
import threading
import time

import grpc
import numpy as np
import pytest

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.arrows import dense_request, rows
from testing.running import MINILM, RunningAppliance, eventually

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
SINGLE_THREADS = 4
BETWEEN_KILLS = (0.0, 4.0)  # seconds


@pytest.mark.parametrize(("arrow_calls", "single_calls"), [(4, 300), pytest.param(100, 10_000, marks=pytest.mark.long)])
def test_no_call_fails_and_no_row_moves(own_appliance: RunningAppliance, arrow_calls: int, single_calls: int) -> None:
    running = own_appliance
    running.create("two", model_id=MINILM, replicas=2)
    running.wait_ready("two")
    texts = [f"row {number} of a batch" for number in range(60)]
    right = vectors(running, texts)
    errors: list[str] = []
    done = threading.Event()
    kills: list[float] = []
    answered: list[int] = []  # rows of each batch

    def singles(count: int) -> None:
        stub = running.stub()
        request = mux.EmbedRequest(
            target=mux.Target(instance_name="two"), request=tei.EmbedRequest(inputs=texts[0], normalize=True)
        )
        for _ in range(count):
            try:
                found = np.array(stub.Embed(request, timeout=60).embeddings)
                if not np.allclose(found, right[0], atol=1e-4):
                    errors.append("a single text has another vector")
            except grpc.RpcError as error:
                errors.append(f"single: {error.code()} {error.details()}")

    def batches() -> None:
        for _ in range(arrow_calls):
            try:
                if not np.allclose(vectors(running, texts), right, atol=1e-4):
                    errors.append("a batch has other vectors")
                answered.append(len(texts))
            except grpc.RpcError as error:
                errors.append(f"batch: {error.code()} {error.details()}")

    workers = [threading.Thread(target=singles, args=(single_calls // SINGLE_THREADS,)) for _ in range(SINGLE_THREADS)]
    workers.append(threading.Thread(target=batches))
    chance = random.Random(5)

    killing = threading.Thread(target=kill_in_turn, args=(running, done, chance, kills, answered))
    for thread in (*workers, killing):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    killing.join()
    assert not errors, errors[:5]
    print(f"{len(kills)} kills, {arrow_calls} Arrow calls and {single_calls} single calls, no error")
    assert kills


def kill_in_turn(
    running: RunningAppliance, done: threading.Event, chance: random.Random, kills: list[float], answered: list[int]
) -> None:
    """One replica, then the other, each time when both answer. At most four deaths of each: five are a crash loop.
    A batch ends between two deaths of the first: a row that was there at three deaths would be convicted."""
    batches = 0
    while len(kills) < 8 and not done.wait(chance.uniform(*BETWEEN_KILLS) if kills else 0.2):
        eventually(lambda: running.instance("two")["replicas_ready"] == 2, timeout=60)
        while kills and len(kills) % 2 == 0 and len(answered) == batches and not done.wait(0.05):
            pass
        batches = len(answered)
        if kills:
            time.sleep(1)  # a returned replica takes traffic within a second of opening its port
        victim = running.processes_of("two", len(kills) % 2)[0]
        victim.kill()
        kills.append(time.monotonic())
        victim.wait(10)  # until then its port may still answer, as if it were ready


def vectors(running: RunningAppliance, texts: list[str]) -> np.ndarray:
    reply = running.stub().EmbedArrow(dense_request("two", texts), timeout=120)
    found = np.array(rows(reply).column(0).to_pylist(), np.float32)
    assert len(found) == len(texts)
    return found
