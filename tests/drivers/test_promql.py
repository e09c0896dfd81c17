"""Values over time from a Prometheus: where they belong, what is missing, and what is said when it does not answer."""

import json
import math
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from appliance.core.problems import Problem
from appliance.drivers import promql
from appliance.drivers.promql import Prometheus


@pytest.fixture(autouse=True)
def none_rests() -> None:
    promql.resting.clear()


class FakePrometheus(HTTPServer):
    answer: tuple[int, bytes] = (200, b"")
    asked: list[str]
    takes_secs = 0.0


class Handler(BaseHTTPRequestHandler):
    server: FakePrometheus

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        time.sleep(self.server.takes_secs)
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
    found = Prometheus(url(server)).all_values({"up": "up"}, 1000, 1040, 10)["up"]
    assert [None if math.isnan(value) else value for value in found] == [1.5, None, None, 4.0]
    assert "start=1010&end=1040&step=10" in server.asked[0]
    server.answer = success()
    assert all(map(math.isnan, Prometheus(url(server)).all_values({"up": "up"}, 1000, 1040, 10)["up"]))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((400, b'{"status": "error", "error": "parse error"}'), "refused 'up': parse error"),
        ((502, b"<html>"), "does not answer"),
        ((200, b"[]"), "does not answer as a Prometheus does"),
        ((200, b'{"status": "success"}'), "does not answer as a Prometheus does"),
    ],
)
def test_what_it_says_instead_is_told_and_its_password_is_not(
    server: FakePrometheus, answer: tuple[int, bytes], words: str
) -> None:
    server.answer = answer
    with pytest.raises(Problem, match=words) as refused:
        Prometheus(url(server, "me:secret@")).all_values({"up": "up"}, 0, 60, 10)
    assert "secret" not in refused.value.message
    assert f"127.0.0.1:{server.server_address[1]}" in refused.value.message


def test_one_that_has_failed_is_left_alone_for_a_while(server: FakePrometheus) -> None:
    server.answer = (200, b"[]")
    for _ in range(3):
        with pytest.raises(Problem, match="does not answer as a Prometheus does"):
            Prometheus(url(server)).all_values({"up": "up", "down": "down"}, 0, 60, 10)
    assert len(server.asked) == 1
    server.answer = success()
    promql.resting.clear()
    assert set(Prometheus(url(server)).all_values({"up": "up", "down": "down"}, 0, 60, 10)) == {"up", "down"}


def test_all_queries_share_one_time_limit(server: FakePrometheus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promql, "TOGETHER_SECS", 0.5)
    server.answer, server.takes_secs = success(), 0.2
    with pytest.raises(Problem, match="does not answer: ReadTimeout"):
        Prometheus(url(server)).all_values({str(number): "up" for number in range(8)}, 0, 60, 10)
    assert len(server.asked) <= 4


def test_one_that_is_not_there_does_not_answer() -> None:
    with pytest.raises(Problem, match="does not answer: ConnectionError"):
        Prometheus("http://127.0.0.1:1").all_values({"up": "up"}, 0, 60, 10)
