"""What the command line says of a control that does not answer, and for how long it waits for one that is away."""

import http.server
import json
import threading
from typing import Any

import pytest

from appliance.cli import control_client, models
from appliance.cli.connection import Identity
from appliance.cli.control_client import ControlClient
from appliance.core.problems import Problem
from testing.running import free_ports

ANSWERS: list[dict[str, Any]] = []


class Model(http.server.BaseHTTPRequestHandler):
    """Each request gets the next of ANSWERS."""

    def do_GET(self) -> None:
        body = json.dumps(ANSWERS.pop(0)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def answering_once(port: int, after_secs: float = 0) -> threading.Thread:
    """A control that is there after a moment, for one request."""

    def serve() -> None:
        with server:
            server.handle_request()

    def listen_and_serve() -> None:
        server.server_bind()
        server.server_activate()
        serve()

    server = http.server.HTTPServer(("127.0.0.1", port), Model, bind_and_activate=False)
    server.timeout = 20
    if after_secs:
        thread: threading.Thread = threading.Timer(after_secs, listen_and_serve)
    else:
        server.server_bind()
        server.server_activate()
        thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_a_control_that_was_never_there_is_not_waited_for_and_the_reason_is_short() -> None:
    (port,) = free_ports(1)
    client = ControlClient(f"http://127.0.0.1:{port}", Identity())
    with client.session, pytest.raises(Problem) as caught:
        client.call("GET", "/models")
    said = f"No answer from http://127.0.0.1:{port}: is the appliance up? ([Errno 111] Connection refused)"
    assert (caught.value.code, caught.value.message) == ("UNREACHABLE", said)


def test_who_follows_a_job_goes_on_when_control_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "POLL_SECS", 0.01)
    loading, loaded = ({"model_id": "a", "status": status, "progress": None} for status in ("loading", "verified"))
    ANSWERS[:] = [loading, loaded]
    (port,) = free_ports(1)
    client = ControlClient(f"http://127.0.0.1:{port}", Identity())
    first = answering_once(port)
    with client.session:
        model = client.model("a")
        first.join()
        later = answering_once(port, after_secs=0.5)
        assert models.follow_job(client, model) == loaded
        later.join()


def test_it_is_not_waited_for_longer_than_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_client, "RESTART_SECS", 0.3)
    ANSWERS[:] = [{}]
    (port,) = free_ports(1)
    client = ControlClient(f"http://127.0.0.1:{port}", Identity())
    only = answering_once(port)
    with client.session:
        client.model("a")
        only.join()
        with pytest.raises(Problem, match="Connection refused"):
            client.model("a")
