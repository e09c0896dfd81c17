"""TLS as strangers meet it: every kind of certificate at every listener, judged by a client of the test's own."""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from http.client import HTTPSConnection
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import requests
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from appliance.control.streaming import ADMITTED_SECS
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub
from testing.certificates import Authority, Issued
from testing.running import TINY, eventually, free_ports
from tests.security import Caller, Secured, nobody, routes
from tests.security.peer import INFO, LISTENERS, REFUSED, SECS, Outcome, context_of, knock, port_of, spoken
from tests.security.strangers import GOOD, HOSTS, HOUR, NOW, ROWS, Pki

pytestmark = pytest.mark.processes

LIFE_SECS = 4.0  # of a certificate that shall expire while it is in use
HANDSHAKE_ENDS_SECS = 10.0
SILENCE_ENDS_SECS = 13.0
SUBJECTS = ["search", "CN=batch,O=Example"]
SANS = ["search.example.com", "spiffe://node/search"]
CASES = list(itertools.product(ROWS, LISTENERS))


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def shown(pki: Pki) -> dict[str, Issued | None]:
    """What each row shows."""
    return {name: make(pki) for name, (make, _) in ROWS.items()}


@pytest.fixture(scope="module")
def caller(pki: Pki) -> Caller:
    return Caller(trusts=pki.ca, shows=pki.good)


def tls_settings(folder: Path, extra: str = "") -> str:
    return (
        f'[tls]\ncert_file = "{folder / "server.pem"}"\nkey_file = "{folder / "server.key"}"\n'
        f'client_ca_file = "{folder / "clients.pem"}"\nrequire_client_cert = true\n'
        f"allowed_subjects = {SUBJECTS}\nallowed_sans = {SANS}\n{extra}\n"
    )


def installed(folder: Path, server: Issued, authority: Authority) -> Path:
    """The files of `[tls]` in a folder, where a test can replace them."""
    shutil.copy(server.chain, folder / "server.pem")
    shutil.copy(server.key_path, folder / "server.key")
    shutil.copy(authority.pem, folder / "clients.pem")
    return folder


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, pki: Pki, caller: Caller) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    installed(folder, pki.server, pki.ca)
    with Secured(folder, tls_settings(folder), caller, environ=caller.environ) as running:
        running.wait_ready("minilm", 60)
        yield running


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory, pki: Pki, caller: Caller) -> Iterator[Secured]:
    """With TLS 1.3 alone, open to probes, and on all addresses."""
    folder = tmp_path_factory.mktemp("probed")
    installed(folder, pki.server, pki.ca)
    settings = 'open_health = true\nbind = "0.0.0.0"\n' + tls_settings(folder, 'min_version = "1.3"')
    with Secured(folder, settings, caller, seeds="") as running:
        yield running


# -- the table --------------------------------------------------------------------------------------------------------


def test_the_table_has_every_row_on_every_listener() -> None:
    assert len(ROWS) >= 20
    assert len(CASES) == len(ROWS) * 3


@pytest.mark.parametrize(("row", "listener"), CASES)
def test_who_is_let_in(node: Secured, caller: Caller, shown: dict[str, Issued | None], row: str, listener: str) -> None:
    context = context_of(replace(caller, shows=shown[row]))
    assert knock(node, listener, context).outcome in ROWS[row][1]


@pytest.mark.parametrize("listener", LISTENERS)
@pytest.mark.parametrize("language", ["http", "http/2"])
def test_nobody_is_served_in_the_clear(node: Secured, listener: str, language: str) -> None:
    with socket.create_connection(("127.0.0.1", port_of(node, listener)), timeout=SECS) as plain:
        outcome = spoken(plain, "grpc" if language == "http/2" else "rest", "")
    assert outcome in (Outcome.CLOSED, Outcome.TOLD)


def weak(context: ssl.SSLContext) -> ssl.SSLContext:
    """A client that would still speak the versions that OpenSSL switched off."""
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    return context


V = ssl.TLSVersion
VERSIONS = {
    ("node", "1.1"): REFUSED,
    ("node", "1.2"): GOOD,
    ("node", "1.3"): GOOD,
    ("probed", "1.1"): REFUSED,
    ("probed", "1.2"): REFUSED,
    ("probed", "1.3"): GOOD,
}


@pytest.mark.parametrize("listener", LISTENERS)
@pytest.mark.parametrize(("which", "version"), VERSIONS)
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_which_versions_are_spoken(
    request: pytest.FixtureRequest, caller: Caller, which: str, version: str, listener: str
) -> None:
    node: Secured = request.getfixturevalue(which)
    only = {"1.1": V.TLSv1_1, "1.2": V.TLSv1_2, "1.3": V.TLSv1_3}[version]
    context = weak(context_of(caller, minimum_version=only, maximum_version=only))
    path = "/grpc.health.v1.Health/Check" if listener == "grpc" else ""
    assert knock(node, listener, context, path).outcome in VERSIONS[which, version]


# -- time -------------------------------------------------------------------------------------------------------------


@dataclass
class Held:
    """Connections that a client keeps, and what it would resume them with once its certificate has expired."""

    until: datetime
    context: ssl.SSLContext
    connections: list[ssl.SSLSocket]


def hello(context: ssl.SSLContext) -> bytes:
    """The first message of a client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def begun(node: Secured, listener: str, sent: Iterable[bytes]) -> list[socket.socket]:
    """Connections on which that was sent, and no more will be."""
    found = []
    for first in sent:
        connection = socket.create_connection(("127.0.0.1", port_of(node, listener)), timeout=SECS)
        connection.sendall(first)
        found.append(connection)
    return found


@pytest.fixture(scope="module")
def silent(node: Secured) -> Iterator[tuple[float, dict[str, list[socket.socket]]]]:
    """Since when, and on each listener: clients that connect and say nothing, more than there are threads."""
    found = {listener: begun(node, listener, [b""] * 80) for listener in LISTENERS}
    yield time.monotonic(), found
    for connection in itertools.chain(*found.values()):
        connection.close()


def assert_ended(connections: Iterable[socket.socket], until: float) -> None:
    for connection in connections:
        connection.settimeout(max(0.1, until - time.monotonic()))
        try:
            while connection.recv(65536):
                pass  # its hello, an alert
        except ConnectionError:
            pass


@pytest.fixture(scope="module")
def stuck(node: Secured, caller: Caller) -> Iterator[tuple[float, dict[str, list[socket.socket]]]]:
    """Since when, and on each listener: clients that sent half a message, or one and no second."""
    whole = hello(context_of(caller))
    found = {listener: begun(node, listener, [whole[:100], whole] * 4) for listener in LISTENERS}
    yield time.monotonic(), found
    for connection in itertools.chain(*found.values()):
        connection.close()


@pytest.fixture(scope="module")
def held(node: Secured, pki: Pki, caller: Caller) -> Iterator[dict[tuple[str, ssl.TLSVersion], Held]]:
    """A session of TLS 1.2 is forgotten with a connection that ends in disorder, so these stay open."""
    until = datetime.now(UTC) + timedelta(seconds=LIFE_SECS)
    short = pki.ca.issue("search", not_before=NOW - HOUR, not_after=until)
    found = {}
    for listener, version in itertools.product(LISTENERS, (V.TLSv1_2, V.TLSv1_3)):
        context = context_of(replace(caller, shows=short), minimum_version=version, maximum_version=version)
        context.set_alpn_protocols(["h2"] if listener == "grpc" else ["http/1.1"])
        connections = [
            context.wrap_socket(
                socket.create_connection(("127.0.0.1", port_of(node, listener)), timeout=SECS),
                server_hostname="localhost",
            )
            for _ in range(6)  # on both workers
        ]
        found[listener, version] = Held(until, context, connections)
    yield found
    for each in found.values():
        for connection in each.connections:
            connection.close()


@pytest.mark.parametrize("listener", LISTENERS)
def test_a_handshake_that_never_ends_is_ended_and_keeps_nobody_waiting(
    node: Secured,
    caller: Caller,
    held: dict[tuple[str, ssl.TLSVersion], Held],  # these first, so that all wait at the same time
    silent: tuple[float, dict[str, list[socket.socket]]],
    stuck: tuple[float, dict[str, list[socket.socket]]],
    listener: str,
) -> None:
    since, connections = stuck
    began = time.monotonic()
    assert knock(node, listener, context_of(caller)).outcome is Outcome.SERVED
    assert time.monotonic() - began < 4.0
    assert_ended(connections[listener], since + HANDSHAKE_ENDS_SECS)


@pytest.mark.parametrize("version", [V.TLSv1_2, V.TLSv1_3])
@pytest.mark.parametrize("listener", LISTENERS)
def test_a_session_does_not_outlive_its_certificate(
    node: Secured, held: dict[tuple[str, ssl.TLSVersion], Held], listener: str, version: ssl.TLSVersion
) -> None:
    found = held[listener, version]
    time.sleep(max(0.0, (found.until - datetime.now(UTC)).total_seconds()) + 0.1)
    for connection in found.connections:
        again = knock(node, listener, found.context, session=connection.session)
        assert again.outcome in REFUSED, f"resumed: {again.resumed}"


@pytest.mark.parametrize("listener", LISTENERS)
def test_who_says_nothing_is_sent_away_too(silent: tuple[float, dict[str, list[socket.socket]]], listener: str) -> None:
    since, connections = silent
    assert_ended(connections[listener], since + SILENCE_ENDS_SECS)


# -- files that change ------------------------------------------------------------------------------------------------


class Stream:
    """EmbedStream, one text at a time."""

    def __init__(self, node: Secured) -> None:
        self.texts: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.channel = node.channel()
        self.call = TeiMultiplexerStub(self.channel).EmbedStream(self.requests())

    def requests(self) -> Iterator[mux.EmbedRequest]:
        while (text := self.texts.get()) is not None:
            yield mux.EmbedRequest(
                target=mux.Target(instance_name="minilm"), request=tei.EmbedRequest(inputs=text, truncate=True)
            )

    def answers(self) -> bool:
        self.texts.put("hello")
        return len(next(self.call).embeddings) == 384

    def close(self) -> None:
        self.texts.put(None)
        self.channel.close()


class KeptAlive:
    """A connection to one of the HTTP listeners that is used again and again."""

    def __init__(self, node: Secured, listener: str) -> None:
        self.connection = HTTPSConnection(
            "localhost", port_of(node, listener), timeout=SECS, context=context_of(node.caller)
        )
        self.connection.connect()
        self.server = self.shown()

    def shown(self) -> bytes | None:
        connection: Any = self.connection.sock
        shown: bytes | None = connection.getpeercert(binary_form=True) if connection else None
        return shown

    def close(self) -> None:
        self.connection.close()

    def answers(self) -> bool:
        self.connection.request("GET", "/openapi.json")
        answer = self.connection.getresponse()
        answer.read()
        return answer.status == 200 and self.shown() == self.server  # not connected anew


@pytest.fixture
def open_connections(node: Secured) -> Iterator[list[Stream | KeptAlive]]:
    stream = Stream(node)
    connections: list[Stream | KeptAlive] = [stream, KeptAlive(node, "rest"), KeptAlive(node, "gateway")]
    assert all(each.answers() for each in connections)
    yield connections
    for each in connections:
        each.close()


@pytest.fixture
def files(node: Secured, pki: Pki) -> Iterator[Path]:
    """The folder of the certificates in use, which are put back."""
    folder = node.config.parent
    yield folder
    installed(folder, pki.server, pki.ca)
    for listener in LISTENERS:
        # A process that meets no connection now would still show the last test's certificate to the next test.
        eventually(partial(everywhere, node, listener, node.caller, Outcome.SERVED, pki.server, knocks=24))


def everywhere(
    node: Secured, listener: str, caller: Caller, outcome: Outcome, server: Issued | None = None, knocks: int = 6
) -> bool:
    """Whether that is so for each of the processes behind a listener, as far as some connections can tell."""
    heard = [knock(node, listener, context_of(caller)) for _ in range(knocks)]
    der = ssl.PEM_cert_to_DER_cert(server.cert_path.read_text()) if server else None
    return all(each.outcome is outcome and (der is None or each.server == der) for each in heard)


def test_replaced_certificates_are_shown_to_new_connections(
    node: Secured, pki: Pki, files: Path, open_connections: list[Stream | KeptAlive]
) -> None:
    fresh = pki.ca.issue("node", HOSTS, key="rsa")
    shutil.copy(fresh.chain, files / "server.pem")
    for listener in LISTENERS:  # its key is not there yet
        assert everywhere(node, listener, node.caller, Outcome.SERVED, pki.server)
    shutil.copy(fresh.key_path, files / "server.key")
    for listener in LISTENERS:
        assert everywhere(node, listener, node.caller, Outcome.SERVED, fresh)
    assert all(each.answers() for each in open_connections)


BREAK: dict[str, Callable[[Path, Pki], object]] = {
    "no certificate": lambda files, pki: (files / "server.pem").write_text("nonsense"),
    "another key": lambda files, pki: shutil.copy(pki.good.key_path, files / "server.key"),
    "no key file": lambda files, pki: (files / "server.key").unlink(),
    "empty authority": lambda files, pki: (files / "clients.pem").write_text(""),
    "no authority file": lambda files, pki: (files / "clients.pem").unlink(),
}


@pytest.mark.parametrize("how", BREAK)
def test_a_broken_replacement_keeps_the_old(
    node: Secured, pki: Pki, files: Path, open_connections: list[Stream | KeptAlive], how: str
) -> None:
    BREAK[how](files, pki)
    stranger = replace(node.caller, shows=pki.other.issue("search"))
    for listener in LISTENERS:
        assert everywhere(node, listener, node.caller, Outcome.SERVED, pki.server)
        assert knock(node, listener, context_of(stranger)).outcome is Outcome.CLOSED
    assert all(each.answers() for each in open_connections)


def test_clients_of_an_authority_that_was_replaced_stay_out(
    node: Secured, pki: Pki, files: Path, open_connections: list[Stream | KeptAlive]
) -> None:
    shutil.copy(pki.other.pem, files / "clients.pem")
    new = replace(node.caller, shows=pki.other.issue("search"))
    for listener in LISTENERS:
        assert everywhere(node, listener, node.caller, Outcome.CLOSED)
        assert everywhere(node, listener, new, Outcome.SERVED, pki.server)
    assert all(each.answers() for each in open_connections)


def test_an_authority_below_another_may_be_the_one_that_is_trusted(node: Secured, pki: Pki, files: Path) -> None:
    """The three listeners agree, and nobody who stands beside it is let in."""
    between = pki.ca.intermediate("Between")
    shutil.copy(between.pem, files / "clients.pem")
    below = replace(node.caller, shows=between.issue("search"))
    for listener in LISTENERS:
        assert everywhere(node, listener, node.caller, Outcome.CLOSED)
        assert everywhere(node, listener, below, Outcome.SERVED)


# -- the rest of the appliance ----------------------------------------------------------------------------------------


def test_the_command_line_comes_in_with_a_certificate(node: Secured) -> None:
    status = node.cli("status")
    assert (status.returncode, "minilm" in status.stdout) == (0, True), status.stderr
    measured = node.cli("bench", "-i", "minilm", "--num-texts", "4", "--batch-size", "2")
    assert measured.returncode == 0, measured.stderr
    embedded = node.cli("embed", "hello")
    assert (embedded.returncode, embedded.stdout.count(",")) == (0, 383), embedded.stderr


def test_the_command_line_trusts_the_very_certificate_of_the_configuration(node: Secured, files: Path) -> None:
    """Without TEI_APPLIANCE_CA, and also when openssl wrote its description above the certificate."""
    (files / "server.pem").write_text("Certificate:\n    Data:\n" + (files / "server.pem").read_text())
    del (environ := {**node.environ, **node.caller.environ})["TEI_APPLIANCE_CA"]
    for verb in (["status"], ["embed", "hello"]):
        done = subprocess.run(node.command(*verb), env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_who_may_open_the_socket_of_control_needs_no_certificate(node: Secured) -> None:
    """The health check of the image, and the verbs of keys."""
    environ = {key: value for key, value in node.environ.items() if not key.startswith("TEI_APPLIANCE_")}
    for verb, answer in ((["status", "--ready"], "ready\n"), (["keys", "list"], "No key is asked for\n")):
        done = subprocess.run(node.command(*verb), env=environ, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, answer), done.stderr


@pytest.mark.parametrize("verb", [["status"], ["embed", "hello"]])
def test_the_command_line_is_refused_without_one(node: Secured, verb: list[str]) -> None:
    environ = {key: value for key, value in node.environ.items() if not key.startswith("TEI_APPLIANCE_CERT")}
    done = subprocess.run(node.command(*verb), env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr


def test_probes_are_let_in_without_a_certificate_and_nobody_else(probed: Secured) -> None:
    stranger = nobody(probed.caller)
    urls = {"rest": probed.url, "gateway": probed.gateway_url}
    let_in = set()
    with requests.Session() as session:
        session.trust_env, session.verify = False, str(stranger.trusts.pem) if stranger.trusts else True
        for route in routes():
            answer = session.request(route.verb, urls[route.listener] + route.path, timeout=SECS)
            if answer.status_code != 401:
                let_in.add((route.listener, route.template))
        gateway = probed.gateway_url
        assert session.get(f"{gateway}/health", timeout=SECS).status_code == 200
        assert session.get(f"{probed.url}/health", timeout=SECS).status_code == 200
        assert session.get(f"{probed.url}/ready", timeout=SECS).status_code == 200
        for path in ("//health", "/health/", "/Health", "/health;x", "/ready/health"):
            for url in urls.values():
                assert session.get(url + path, timeout=SECS).status_code == 401
        # What instances there are is nothing for strangers.
        assert session.get(f"{gateway}/instances/none/health", timeout=SECS).status_code == 401
        for header in ("X-TEI-Instance", "X-TEI-Model"):
            assert session.get(f"{gateway}/health", headers={header: "none"}, timeout=SECS).status_code == 401
    assert let_in == {("rest", "/health"), ("rest", "/ready"), ("gateway", "/health"), ("gateway", "/ping")}
    for path in (INFO, "/grpc.health.v1.Health/Check", "/a.b/C"):
        assert knock(probed, "grpc", context_of(stranger), path).outcome is Outcome.CLOSED


def test_probes_are_not_let_in_unless_it_is_said(node: Secured) -> None:
    stranger = context_of(nobody(node.caller))
    for listener, path in (("rest", "/health"), ("rest", "/ready"), ("gateway", "/health")):
        assert knock(node, listener, stranger, path).outcome is Outcome.CLOSED


def test_a_box_that_is_open_to_the_network_says_so(tmp_path: Path, pki: Pki, probed: Secured) -> None:
    """TLS alone asks nobody who he is."""
    installed(tmp_path, pki.server, pki.ca)
    settings = f'bind = "0.0.0.0"\n[tls]\ncert_file = "{tmp_path}/server.pem"\nkey_file = "{tmp_path}/server.key"\n'
    with Secured(tmp_path, settings, Caller(trusts=pki.ca), seeds="") as running:
        eventually(lambda: "WARNING" in running.output.read_text())
        events = [event["event"] for event in running.get("/events").json()]
    assert "no authentication" in running.output.read_text()
    assert "open_to_the_network" in events
    assert "WARNING" not in probed.output.read_text()
    assert "open_to_the_network" not in [event["event"] for event in probed.get("/events").json()]


# What stops `appliance up`: (lines of [tls], the key that is named).
WRONG: dict[str, tuple[str, str]] = {
    "no key": ('cert_file = "{d}/server.pem"', "tls.key_file"),
    "no certificate": ('key_file = "{d}/server.key"', "tls.cert_file"),
    "an empty table": ("", "tls.cert_file"),
    "a key that is not known": ('{both}\nclient_ca = "{d}/clients.pem"', "tls.client_ca"),
    "names without certificates": ('{both}\nallowed_subjects = ["a"]', "tls.allowed_subjects"),
    "certificates of nobody": ("{both}\nrequire_client_cert = true", "tls.client_ca_file"),
    "a certificate that is not there": (
        'cert_file = "{d}/none.pem"\nkey_file = "{d}/server.key"',
        "tls.cert_file",
    ),
    "a key file that is a folder": ('cert_file = "{d}/server.pem"\nkey_file = "{d}"', "tls.key_file"),
    "a key of another": ('cert_file = "{d}/server.pem"\nkey_file = "{d}/other.key"', "tls.key_file"),
    "a key behind a pass phrase": ('cert_file = "{d}/server.pem"\nkey_file = "{d}/locked.key"', "tls.key_file"),
    "an authority that is none": (
        '{both}\nrequire_client_cert = true\nclient_ca_file = "{d}/server.key"',
        "tls.client_ca_file",
    ),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory, pki: Pki) -> dict[str, subprocess.CompletedProcess[str]]:
    folder = installed(tmp_path_factory.mktemp("wrong"), pki.server, pki.ca)
    shutil.copy(pki.good.key_path, folder / "other.key")
    key = load_pem_private_key(pki.server.key_path.read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"a pass phrase"))
    (folder / "locked.key").write_bytes(locked)
    ports = free_ports(3)

    def up(row: tuple[int, tuple[str, str]]) -> subprocess.CompletedProcess[str]:
        number, (lines, _) = row
        both = f'cert_file = "{folder}/server.pem"\nkey_file = "{folder}/server.key"'
        config = folder / f"{number}.toml"
        config.write_text(
            f'data_dir = "{folder}/data-{number}"\napi_port = {ports[0]}\ngrpc_port = {ports[1]}\n'
            f"http_port = {ports[2]}\n[tls]\n{lines.format(d=folder, both=both)}\n"
        )
        command = [sys.executable, "-m", "appliance", "--config", str(config), "up"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=PIPE, stderr=PIPE, text=True)
        try:
            process.wait(25.0)
        except subprocess.TimeoutExpired:  # it has come up
            process.terminate()
        return subprocess.CompletedProcess(command, process.wait(), *process.communicate())

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(WRONG, pool.map(up, enumerate(WRONG.values())), strict=True))


@pytest.mark.parametrize("what", WRONG)
def test_half_a_configuration_starts_nothing(refused: dict[str, subprocess.CompletedProcess[str]], what: str) -> None:
    done, key = refused[what], WRONG[what][1]
    assert (done.returncode, done.stdout) == (1, "")
    assert key in done.stderr
    assert "Traceback" not in done.stderr
    assert "pass phrase:" not in done.stderr  # nobody is there to type it


def test_many_connections_at_once_do_not_end_the_multiplexer(node: Secured) -> None:
    """grpc (1.85, its issue 36693) crashes when it gets new certificates while it takes another connection."""
    before = {process.pid for process in node.processes_of("multiplexer")}
    for _ in range(40):
        connections = []
        for _ in range(40):
            with contextlib.suppress(OSError):
                connections.append(socket.create_connection(("127.0.0.1", node.grpc_port), timeout=2))
        time.sleep(0.02)
        for connection in connections:
            connection.close()
    assert before == {process.pid for process in node.processes_of("multiplexer")}
    assert knock(node, "grpc", context_of(node.caller)).outcome is Outcome.SERVED


def test_events_are_streamed_through_tls_for_as_long_as_the_certificate_counts(node: Secured) -> None:
    answer = node.call("GET", f"{node.url}/events/stream", params={"since": 0}, stream=True)
    with contextlib.closing(answer):
        told = (json.loads(line[6:]) for line in answer.iter_lines(chunk_size=1) if line.startswith(b"data: "))
        assert next(told)["seq"] == 1
        time.sleep(ADMITTED_SECS + 1)  # it is looked at again
        assert node.post("/instances", {"name": "streamed", "model_id": TINY, "start": "on_demand"}).status_code == 201
        assert any((each["event"], each["instance"]) == ("created", "streamed") for each in told)
    assert node.delete("/instances/streamed").status_code == 200
