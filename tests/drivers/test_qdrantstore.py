"""What is Qdrant's own: what is left out, and what happens where nobody answers."""

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from appliance.core.cachestore import Failure, StoreFailed
from testing.cachestores import FINGERPRINT, failure, key_of, qdrant, row, rows

pytestmark = pytest.mark.processes

SLACK_SECS = 15.0  # for a busy machine; a call that waits without a bound takes longer
SECS = 20.0
DEADLINE_SECS = 0.2


@pytest.fixture
def silent() -> Iterator[int]:
    """A port where a connection is taken and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_qdrant_that_says_nothing_is_slow(silent: int) -> None:
    store = qdrant(f"http://:secret-token@127.0.0.1:{silent}", DEADLINE_SECS)
    store.breaker.pause_secs = 60.0  # longer than this test: nobody asks again in it
    begun = time.monotonic()
    with pytest.raises(StoreFailed) as raised:
        store.get_many(FINGERPRINT, [key_of("x")])
    assert raised.value.failure is Failure.SLOW
    assert time.monotonic() - begun < DEADLINE_SECS + SLACK_SECS
    assert "token" not in str(raised.value)
    with pytest.raises(StoreFailed, match="not asked again yet") as again:
        store.put_many(FINGERPRINT, rows("x", 1))
    assert again.value.failure is Failure.AWAY
    store.close()


def test_no_qdrant_at_the_address_is_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    store = qdrant(f"http://127.0.0.1:{port}", 5.0)
    assert failure(lambda: store.get_many(FINGERPRINT, [key_of("x")])) is Failure.AWAY
    store.close()


class Nothing(BaseHTTPRequestHandler):
    """Answers each request with a result that is none, as a proxy may."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b'{"result": null, "status": "ok", "time": 0.0}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        pass


def test_an_answer_that_is_none_is_a_failure_of_the_store() -> None:
    """The client asserts that there is a result: that ended the thread that writes, and failed the call that read."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Nothing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = qdrant(f"http://127.0.0.1:{server.server_port}", 5.0)
        assert failure(lambda: store.get_many(FINGERPRINT, [key_of("x")])) is Failure.AWAY
        assert failure(lambda: store.put_many(FINGERPRINT, rows("x", 1))) is Failure.AWAY
        store.close()
        server.shutdown()


def test_qdrant_is_given_no_more_than_it_needs(tmp_path: Path) -> None:
    store = qdrant(str(tmp_path / "qdrant"), SECS)
    key, value = row("asked", 4)
    store.put_many(FINGERPRINT, {key: value})
    points, _ = store.client.scroll(f"tei-1-{FINGERPRINT}-4", with_payload=True)
    assert [set(point.payload or {}) for point in points] == [{"key", "at_ms", "chars", "tokens", "head"}]
    store.close()


def test_qdrant_takes_a_point_that_was_changed_for_absent(tmp_path: Path) -> None:
    store = qdrant(str(tmp_path / "qdrant"), SECS)
    put = rows("changed", 2, 4)
    store.put_many(FINGERPRINT, put)
    name = f"tei-1-{FINGERPRINT}-4"
    points, _ = store.client.scroll(name, with_payload=True, with_vectors=True)
    point = points[0]
    changed = bytes.fromhex((point.payload or {})["key"])
    store.client.set_payload(name, {"head": "AAAA"}, points=[point.id])
    assert store.get_many(FINGERPRINT, list(put)) == {key: value for key, value in put.items() if key != changed}
    store.close()


def test_qdrant_stores_no_more_widths_than_it_may_have_collections(tmp_path: Path) -> None:
    store = qdrant(str(tmp_path / "qdrant"), SECS)
    put = [rows(f"width-{width}", 1, width) for width in range(1, 12)]
    for each in put:
        store.put_many(FINGERPRINT, each)
    assert [len(store.get_many(FINGERPRINT, list(each))) for each in put] == [1] * 8 + [0] * 3
    store.close()


def test_a_collection_that_somebody_deletes_is_made_again(tmp_path: Path) -> None:
    store = qdrant(str(tmp_path / "qdrant"), SECS)
    put = rows("made", 2, 4)
    store.put_many(FINGERPRINT, put)
    for _ in range(2):
        store.client.delete_collection(f"tei-1-{FINGERPRINT}-4")
        assert store.get_many(FINGERPRINT, list(put)) == {}
        store.put_many(FINGERPRINT, put)
        assert store.get_many(FINGERPRINT, list(put)) == put
    store.client.delete_collection(f"tei-1-{FINGERPRINT}-4")
    store.put_many(FINGERPRINT, put)  # it does not know yet: these are lost, as a cache may
    store.put_many(FINGERPRINT, put)
    assert store.get_many(FINGERPRINT, list(put)) == put
    store.close()
