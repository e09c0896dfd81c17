"""Arrow bodies, compressed bodies, large lists, and everything a hostile client can send."""

import base64
import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lz4.frame
import numpy as np
import pyarrow as pa
import pytest
import requests

from appliance.gateway.multiplexer_channels import RECONNECT_SECS
from appliance.wire import exposition
from testing.background import PAUSE_SECS
from testing.running import eventually
from testing.texts import mixed_texts
from tests.gateway.conftest import Http

ARROW = {"Content-Type": "application/vnd.apache.arrow.stream"}
JSON = {"Content-Type": "application/json"}


def ipc(column: Any, name: str = "text", batches: int = 1) -> bytes:
    table = pa.table({name: column})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=max(1, len(table) // batches))
    return sink.getvalue().to_pybytes()


def rows(content: bytes) -> pa.Table:
    return pa.ipc.open_stream(content).read_all()


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_arrow_in_arrow_out_with_nulls_in_place(zoo: Http, kind: pa.DataType) -> None:
    texts = ["hello", None, "you", "hello"]
    column = pa.array(texts).cast(kind) if not pa.types.is_dictionary(kind) else pa.array(texts).dictionary_encode()
    reply = zoo.post("/instances/minilm/embed", data=ipc(column, batches=2), headers=ARROW)
    assert reply.status_code == 200, reply.text
    assert reply.headers["Content-Type"] == ARROW["Content-Type"]
    found = rows(reply.content).column("embeddings")
    assert [entry is None for entry in found.to_pylist()] == [False, True, False, False]
    wanted = np.array(zoo.post("/instances/minilm/embed", {"inputs": ["hello", "you", "hello"]}).json(), np.float32)
    np.testing.assert_allclose(np.array(found.drop_null().to_pylist(), np.float32), wanted, atol=2e-6)


def test_arrow_vectors_come_in_the_dtype_that_is_asked_for(zoo: Http) -> None:
    def vectors(query: str) -> pa.Array:
        answer = requests.post(f"{zoo.url}/embed?model=minilm{query}", ipc(["a", "b"]), headers=ARROW, timeout=60)
        assert answer.status_code == 200, answer.text
        return rows(answer.content).column("embeddings").combine_chunks()

    plain, small = vectors(""), vectors("&output_dtype=int8")
    assert small.type.value_type == pa.int8()
    np.testing.assert_allclose(small.flatten().to_numpy() / 127, plain.flatten().to_numpy(), atol=1 / 127)
    assert vectors("&output_dtype=ubinary&dimensions=64").type.list_size == 8
    query = "model=minilm&output_dtype=int8&normalize=false"
    tokens = requests.post(
        f"{zoo.url}/embed_all?model=minilm&output_dtype=float16", ipc(["hello world", "b"]), headers=ARROW, timeout=60
    )
    column = rows(tokens.content).column("token_embeddings")
    assert column.type.value_type.value_type == pa.float16()
    single = np.array(zoo.post("/instances/minilm/embed_all", {"inputs": "hello world"}).json()[0])
    np.testing.assert_allclose(np.array(column[0].as_py(), np.float32), single, atol=4e-3)
    refused = requests.post(f"{zoo.url}/embed?{query}", ipc(["a"]), headers=ARROW, timeout=60)
    assert (refused.status_code, "vectors of length 1" in refused.text) == (422, True)


def test_arrow_options_are_in_the_query(zoo: Http) -> None:
    query = "?model=minilm&normalize=false&truncate=true"
    reply = zoo.post(f"/embed{query}", data=ipc(["hello"]), headers=ARROW)
    plain = zoo.post("/embed", {"inputs": "hello", "model": "minilm", "normalize": False}).json()
    np.testing.assert_allclose(rows(reply.content).column(0).to_pylist(), plain, atol=2e-6)
    refused = zoo.post("/embed?model=minilm&truncate=false", data=ipc(["a", "word " * 2000]), headers=ARROW)
    assert refused.status_code == 422
    assert "(input 1)" in refused.json()["error"]
    headers = ARROW | {"x-arrow-on-error": "null"}
    kept = zoo.post("/embed?model=minilm&truncate=false", data=ipc(["a", "word " * 2000]), headers=headers)
    found = rows(kept.content)
    assert found.column("embeddings").null_count == 1
    assert "INVALID_ARGUMENT" in found.column("error")[1].as_py()


def test_sparse_arrow(zoo: Http) -> None:
    reply = zoo.post("/instances/sparse/embed_sparse", data=ipc(["hello", None]), headers=ARROW)
    found = rows(reply.content).column("sparse_embeddings").to_pylist()
    (wanted,) = zoo.post("/instances/sparse/embed_sparse", {"inputs": "hello"}).json()
    assert found[1] is None
    assert [entry["index"] for entry in found[0]] == [entry["index"] for entry in wanted]


def compressed(codec: str, content: bytes) -> bytes:
    if codec == "gzip":
        return gzip.compress(content)
    if codec == "lz4":
        return bytes(lz4.frame.compress(content))
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("codec", ["gzip", "lz4", "zstd"])
def test_compressed_bodies(zoo: Http, codec: str) -> None:
    content = compressed(codec, json.dumps({"inputs": ["hello", "you"]}).encode())
    headers = JSON | {"Content-Encoding": codec}
    reply = zoo.post("/instances/minilm/embed", data=content, headers=headers)
    assert reply.status_code == 200
    assert len(reply.json()) == 2


@pytest.mark.parametrize("codec", ["gzip", "lz4", "zstd"])
def test_a_bomb_is_refused_before_its_memory_is_spent(zoo: Http, codec: str) -> None:
    bomb = compressed(codec, b'{"inputs": "' + b"a" * 400_000_000 + b'"}')
    before = memory(zoo)
    with ThreadPoolExecutor(4) as pool:
        headers = JSON | {"Content-Encoding": codec}
        work = lambda _: zoo.post("/instances/minilm/embed", data=bomb, headers=headers)  # noqa: E731
        replies = list(pool.map(work, range(8)))
    assert {reply.status_code for reply in replies} == {413}
    assert memory(zoo) - before < 400e6  # of eight times 400 MB


def memory(zoo: Http) -> float:
    return float(sum(process.memory_info().rss for process in zoo.running.processes_of("gateway")))


def test_a_list_longer_than_a_message_comes_back_whole(zoo: Http) -> None:
    texts = [f"text number {number % 700}" for number in range(6000)]
    reply = zoo.post("/v1/embeddings", {"model": "minilm", "input": texts, "encoding_format": "base64"})
    data = reply.json()["data"]
    assert [item["index"] for item in data] == list(range(6000))
    vectors = np.array([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in data])
    np.testing.assert_allclose(vectors, vectors[np.arange(6000) % 700], atol=2e-6)  # over the ends of slices, too
    assert len(np.unique(vectors[:700].round(4), axis=0)) == 700


def test_a_bad_row_deep_in_a_long_list_is_named_and_nothing_else_comes(zoo: Http) -> None:
    texts = [f"text {number % 50}" for number in range(5000)]
    texts[4321] = "word " * 2000
    reply = zoo.post("/instances/minilm/embed", {"inputs": texts, "truncate": False})
    assert reply.status_code == 422
    assert "(input 4321)" in reply.json()["error"]


def test_sizes_over_the_limits_are_413(zoo: Http) -> None:
    large = b'{"inputs": "' + b"a" * (65 * 1024 * 1024) + b'"}'
    assert zoo.post("/instances/minilm/embed", data=large, headers=JSON).status_code == 413

    def pieces() -> Iterator[bytes]:  # chunked: no length is announced
        for _ in range(70):
            yield b"a" * 1024 * 1024

    try:
        assert zoo.post("/instances/minilm/embed", data=pieces(), headers=JSON).status_code == 413
    except requests.ConnectionError:
        pass  # refused while it was still sending
    nested = b'{"inputs": [' + b"[]," * 5_000_000 + b"[]]}"
    assert zoo.post("/instances/minilm/embed", data=nested, headers=JSON).status_code == 413
    assert zoo.get("/health").status_code == 200


def test_ten_megabytes_of_one_character_are_one_vector(zoo: Http) -> None:
    reply = zoo.post("/instances/minilm/embed", {"inputs": "a" * 10_000_000})
    assert reply.status_code == 200
    assert len(reply.json()) == 1
    reply = zoo.post("/instances/minilm/embed", {"inputs": ["\x00", "\u2028", "🙂" * 1000, "a\nb"]})
    assert reply.status_code == 200
    assert len(reply.json()) == 4


def raw(zoo: Http, content: bytes, patience: float = 40) -> bytes:
    with socket.create_connection(("127.0.0.1", zoo.running.http_port), timeout=patience) as client:
        client.sendall(content)
        received = b""
        while piece := client.recv(65536):
            received += piece
        return received


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: " + b"a" * 100_000 + b"\r\n\r\n", b"431"),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", b"414"),
        (b"POST /embed HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: unheard-of\r\n\r\n", b"501"),
        (b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n", b"400"),
    ],
)
def test_what_is_no_http_is_refused(zoo: Http, content: bytes, status: bytes) -> None:
    assert raw(zoo, content).split(b" ", 2)[1] == status


def test_a_slow_loris_loses_its_connection_and_nobody_else_waits(zoo: Http) -> None:
    head = b"POST /instances/minilm/embed HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    kinds = [head, head + b"Content-Length: 100\r\n\r\n{"]
    clients = [socket.create_connection(("127.0.0.1", zoo.running.http_port)) for _ in range(100)]
    began = time.monotonic()
    for at, client in enumerate(clients):
        client.sendall(kinds[at % 2])

    def closed(client: socket.socket) -> bool:
        client.setblocking(False)
        try:
            client.recv(4096)
            return True
        except BlockingIOError:
            return False
        except OSError:
            return True

    eventually(lambda: all(closed(client) for client in clients), timeout=60)
    print(f"{len(clients)} slow clients were gone after {time.monotonic() - began:.1f} s")
    for client in clients:
        client.close()
    assert zoo.post("/instances/minilm/embed", {"inputs": "a"}).status_code == 200


def test_a_client_that_leaves_takes_its_batch_along(zoo: Http) -> None:
    texts = [f"{text} {number}" for number, text in enumerate(mixed_texts(20_000, seed=9))]
    body = json.dumps({"inputs": texts}).encode()
    head = (
        "POST /instances/minilm/embed HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    port = zoo.running.instance("minilm")["prometheus_port"]

    def answered() -> float:
        """Texts, by the engine's own count."""
        work = exposition.work(requests.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text)
        assert work
        return work.answered

    before = answered()
    client = socket.create_connection(("127.0.0.1", zoo.running.http_port))
    client.sendall(head.encode() + body)
    eventually(lambda: answered() > before, timeout=20)
    client.close()

    def rests() -> bool:
        earlier = answered()
        time.sleep(2)  # a starved engine, too, answers a text in that time
        return answered() == earlier

    eventually(rests, timeout=20)
    assert answered() - before < len(texts)


def test_nothing_is_shorter_when_many_ask_at_once(zoo: Http) -> None:
    failures: list[str] = []

    def ask(number: int) -> None:
        texts = [f"text {number} {at}" for at in range(1 + number % 40)]
        path = ("/instances/minilm/embed", "/v1/embeddings")[number % 2]
        body = {"inputs": texts} if number % 2 == 0 else {"input": texts, "model": "minilm"}
        reply = zoo.post(path, body)
        found = reply.json() if number % 2 == 0 else reply.json()["data"]
        if reply.status_code != 200 or len(found) != len(texts):
            failures.append(f"{number}: {reply.status_code} {len(found)}")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(100)))
    assert not failures


@pytest.mark.timeout(600)
def test_a_killed_multiplexer_costs_no_request(zoo: Http) -> None:
    """One worker here: the gateway waits for the next process, which supervisord starts at once. Where the machine is
    so busy that it takes longer than the gateway waits, a request may be refused."""
    outcomes: list[int] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.wait(PAUSE_SECS):
            reply = zoo.post("/instances/minilm/embed", {"inputs": "a"})
            outcomes.append(reply.status_code)
            print(reply.text if reply.status_code != 200 else "", end="")

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    address = ("127.0.0.1", zoo.running.grpc_port)
    try:
        killed_at = time.monotonic()
        for process in zoo.running.processes_of("multiplexer"):
            process.kill()
            process.wait(60)
        before = len(outcomes)
        eventually(lambda: socket.create_connection(address).close() is None, 90)
        away_secs = time.monotonic() - killed_at
        time.sleep(4)
        eventually(lambda: outcomes[before:].count(200) > 20, 90)  # at once, but where the cores are busy
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    looks_secs = 2  # at most between two of the gateway's own looks for the process
    assert set(outcomes) <= ({200} if away_secs < RECONNECT_SECS - looks_secs else {200, 503}), away_secs
