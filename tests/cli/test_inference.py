"""What inference from a terminal reads, in any locale, and how `bench` comes to its endpoint."""

import io
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from appliance.cli import main
from appliance.cli.bench import Options, open_channel
from appliance.cli.inference import read_lines
from appliance.core.problems import Problem

METHOD = "/any/Method"


class Listening(grpc.GenericRpcHandler):
    """Answers each call with its key."""

    def service(self, details: Any) -> Any:
        key = dict(details.invocation_metadata).get("authorization", "")
        return grpc.unary_unary_rpc_method_handler(lambda request, context: key.encode())


@pytest.fixture
def endpoint() -> Iterator[str]:
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads, handlers=[Listening()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


@pytest.mark.parametrize("key", ["", "secret"])
def test_bench_sends_the_key(endpoint: str, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Where keys are asked for, it was refused whatever TEI_APPLIANCE_KEY was."""
    monkeypatch.setenv("TEI_APPLIANCE_KEY", key)
    with open_channel(Options(endpoint=endpoint, instance="a")) as channel:
        answer = channel.unary_unary(METHOD)(b"", timeout=30, wait_for_ready=True)
    assert answer == (b"Bearer secret" if key else b"")


@pytest.mark.parametrize("address", ["localhost", "https://localhost", "localhost:", "localhost:x", ":1"])
def test_an_endpoint_without_a_port_is_named(address: str) -> None:
    """int() was asked for the port, and its error came out."""
    with pytest.raises(Problem, match="has no port: give host:port"):
        open_channel(Options(endpoint=address, instance="a", insecure=True))


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_lines_are_utf_8_whatever_the_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """Through a pipe each letter beyond ASCII became two, or an error."""
    raw = "ein Fluß\r\n東京\rdrei\n\n".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding=encoding))
    (tmp_path / "texts").write_bytes(raw)
    assert read_lines("-") == read_lines(str(tmp_path / "texts")) == ["ein Fluß", "東京", "drei"]


def test_what_is_no_utf_8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Fluß".encode("latin-1")), encoding="latin-1"))
    with pytest.raises(Problem, match="Cannot read -: 'utf-8' codec"):
        read_lines("-")


def test_an_argument_that_is_no_text_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The traceback of UnicodeEncodeError."""
    monkeypatch.setenv("TEI_MANAGER_DATA_DIR", str(tmp_path))
    assert main.main(["logs", "caf\udce9"], tmp_path) == 1
    assert capsys.readouterr().err == r"appliance: an argument is no UTF-8: '\udce9'" + "\n"
