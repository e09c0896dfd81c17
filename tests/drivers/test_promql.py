"""Values over time from a Prometheus: where they belong, what is missing, and what is said when it does not answer."""

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from appliance.core.problems import Problem
from appliance.drivers.promql import Prometheus


class FakePrometheus(HTTPServer):
    answer: tuple[int, bytes] = (200, b"")
    asked: list[str]


class Handler(BaseHTTPRequestHandler):
    server: FakePrometheus

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        status, body = self.server.answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[FakePrometheus]:
    with FakePrometheus(("127.0.0.1", 0), Handler) as fake:
        fake.asked = []
        threading.Thread(target=fake.serve_forever, daemon=True).start()
        yield fake
        fake.shutdown()


def url(server: FakePrometheus, user: str = "") -> str:
    return f"http://{user}127.0.0.1:{server.server_address[1]}/"


def success(*values: tuple[float, str]) -> tuple[int, bytes]:
    result = [{"metric": {}, "values": values}] if values else []
    return 200, json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}).encode()


def test_each_value_has_its_place_and_what_is_missing_is_nan(server: FakePrometheus) -> None:
    server.answer = success((1010, "1.5"), (1030, "NaN"), (1040, "4"))
    found = Prometheus(url(server)).values("up", 1000, 1040, 10)
    assert [None if math.isnan(value) else value for value in found] == [1.5, None, None, 4.0]
    assert "start=1010&end=1040&step=10" in server.asked[0]
    server.answer = success()
    assert all(map(math.isnan, Prometheus(url(server)).values("up", 1000, 1040, 10)))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((400, b'{"status": "error", "error": "parse error"}'), "refused 'up': parse error"),
        ((502, b"<html>"), "does not answer"),
    ],
)
def test_what_it_says_instead_is_told_and_its_password_is_not(
    server: FakePrometheus, answer: tuple[int, bytes], words: str
) -> None:
    server.answer = answer
    with pytest.raises(Problem, match=words) as refused:
        Prometheus(url(server, "me:secret@")).values("up", 0, 60, 10)
    assert "secret" not in refused.value.message
    assert f"127.0.0.1:{server.server_address[1]}" in refused.value.message


def test_one_that_is_not_there_does_not_answer() -> None:
    with pytest.raises(Problem, match="does not answer: ConnectionError"):
        Prometheus("http://127.0.0.1:1").values("up", 0, 60, 10)
