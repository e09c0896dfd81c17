"""A port for metrics that is taken costs the metrics, and never the model."""

import logging
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import requests

from appliance.drivers import ports
from appliance.engine import http
from appliance.wire.exposition import WORK_PATH
from appliance.wire.tei.v1 import tei_pb2 as tei
from testing.engines import FAMILIES, Engine
from testing.running import free_ports

pytestmark = pytest.mark.processes


def test_an_engine_whose_metrics_port_is_taken_serves_and_says_so(tmp_path: Path) -> None:
    engine = Engine(tmp_path, FAMILIES / "bert-cls")
    with socket.create_server(("127.0.0.1", engine.metrics_port)), engine:
        assert len(engine.stub("Embed").Embed(tei.EmbedRequest(inputs="a"), timeout=10).embeddings) == 32
        said = engine.log.read_text()
    assert f"Port {engine.metrics_port} on 127.0.0.1 cannot be used for metrics" in said
    assert "Traceback" not in said


def test_metrics_are_served_where_the_port_is_free_and_warned_of_where_not(caplog: pytest.LogCaptureFixture) -> None:
    (port,) = free_ports(1)
    with caplog.at_level(logging.WARNING):
        server = http.serve("127.0.0.1", port, lambda: "te_queue_size 0\n", lambda: "te_embed_count 7\n")
        assert server is not None
        pages = {"/metrics": "te_queue_size 0\n", "/?of=work": "te_queue_size 0\n", "/health": "OK"}
        for path, expected in {**pages, WORK_PATH: "te_embed_count 7\n"}.items():
            assert requests.get(f"http://127.0.0.1:{port}{path}", timeout=5).text == expected
        assert not caplog.text
        assert http.serve("127.0.0.1", port, str) is None
    server.shutdown()
    server.server_close()
    assert f"Port {port} on 127.0.0.1" in caplog.text


def checked(binary: Path, *flags: str) -> tuple[list[str], str]:
    """What a TEI that prints its arguments gets as arguments, and what is said on stderr."""
    command = [sys.executable, "-m", "appliance.tei", str(binary), *flags]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return ran.stdout.splitlines(), ran.stderr


@pytest.fixture
def router(tmp_path: Path) -> Path:
    binary = tmp_path / "router"
    binary.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    binary.chmod(0o755)
    return binary


def test_tei_gets_another_metrics_port_where_its_own_is_taken(router: Path) -> None:
    own, taken = free_ports(2)
    flags = ["--model-id", "a b", "--hostname", "127.0.0.1", "--port", str(own), "--prometheus-port", str(taken)]
    others = ["--json-output", "--pooling=cls"]
    with socket.create_server(("127.0.0.1", taken)):
        arguments, said = checked(router, *flags, *others)
    free = int(arguments[-1])
    assert free not in (own, taken)
    assert not ports.busy([free], "127.0.0.1")
    assert arguments == [*flags[:2], *flags[4:6], *others, "--hostname", "127.0.0.1", "--prometheus-port", str(free)]
    assert said == f"Port {taken} on 127.0.0.1 is taken: the metrics of this TEI are on port {free}\n"


@pytest.mark.parametrize("spelled", ["--prometheus-port {}", "--prometheus-port={}"])
def test_tei_keeps_its_flags_where_its_metrics_port_is_free(router: Path, spelled: str) -> None:
    (free,) = free_ports(1)
    flags = ["--model-id", "m", "--hostname", "127.0.0.1", *spelled.format(free).split()]
    assert checked(router, *flags) == (flags, "")
