"""TLS to other machines: what cannot be had is said, and holds up nobody else."""

import socket
import threading
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from appliance.core.tls_settings import RemoteTlsSettings
from appliance.drivers.http2 import Connection
from appliance.drivers.reachability import Reachability
from appliance.drivers.remotetls import RemoteCertificates
from appliance.wire.http2 import SETTINGS, frame
from testing.certificates import Authority

NOBODYS = ["a..b", ".example", "x" * 70, "a\0b", ""]


def address_of(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> RemoteCertificates:
    authority = Authority(tmp_path_factory.mktemp("tls"), "one")
    return RemoteCertificates(RemoteTlsSettings(ca_file=str(Path(authority.pem))))


@pytest.mark.parametrize("name", NOBODYS)
def test_a_name_that_no_certificate_can_have_is_a_connection_that_fails(
    certificates: RemoteCertificates, name: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(OSError, match="no name that a certificate"):
        Connection(address_of(listener), partial(certificates.secure, name))


def test_such_a_name_does_not_end_the_watch_of_the_others(
    certificates: RemoteCertificates, caplog: pytest.LogCaptureFixture
) -> None:
    watching, told = Reachability(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        ends = [watching.watch(address_of(first), lambda _: None, partial(certificates.secure, "a..b"))]
        ends.append(watching.watch(address_of(second), lambda accepted: told.set()))
        watching.run(0.05)
        with closing(second.accept()[0]) as accepted:
            accepted.sendall(frame(SETTINGS, 0, 0, b""))
            for _ in range(100):
                watching.run(0.05)
                if told.is_set():
                    break
        for end in ends:
            end()
        watching.run(0.01)
    assert told.is_set()
    assert caplog.text.count("No connection with TLS to 127.0.0.1") == 1
