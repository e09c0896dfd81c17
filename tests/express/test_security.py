"""The express lane as strangers meet it: what a real Envoy remembers lets nobody in for longer than the pages say.

A caller is known when a call of his left the multiplexer's counter of requests as it was. Each test that says so of one
makes sure that Envoy answers, and that it would have let the call through.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest

from appliance.core.access import Key, digest
from appliance.core.settings import Settings
from appliance.core.tls_settings import TlsSettings
from appliance.drivers import envoy, keysfile
from appliance.export.envoy import bootstrap
from appliance.export.express_lane import ExpressLane, express_methods, paths
from appliance.express.__main__ import BOOTSTRAP, SCRIPT
from appliance.express.tables import Tables
from appliance.node.context import Node
from appliance.wire.envelope import CERTIFICATE_KEY, EXPRESS_ADMITTED, EXPRESS_JUDGE, EXPRESS_KEY, EXPRESS_SECS_KEY
from appliance.wire.envelope import INSTANCE_KEY as INSTANCE
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.certificates import Issued
from testing.running import SEED, eventually, free_ports
from tests.security import Caller, Secured, rpcs
from tests.security.peer import REFUSED, Ask, Outcome, context_of, knock, spoken
from tests.security.strangers import GOOD, HOSTS, HOUR, NOW, ROWS, Pki
from tests.security.test_roles import ANY_RPC, HELD_BY_NOBODY, MEETS, NO_RPC, ROLES, ways
from tests.security.test_tls import BREAK, V, everywhere, installed, tls_settings, weak

pytestmark = pytest.mark.processes

SECS = 15.0
REMEMBERED_SECS = 5.0  # the bound that docs/grpc.md states
MOMENT_SECS = 0.3  # that Envoy needs to read them
SLACK_SECS = 1.0  # between the moment that a test takes and the one that counts
STRAIGHT_SECS = 15.0
FOLLOWED_SECS = 10.0  # a tenth of a second is usual
JUDGING_SECS = 0.7  # Envoy counts a call before the multiplexer looks at its key
HELD_SECS = 3.0  # of a call: short of what the monitor takes for silence
LIFE_SECS = 6.0  # of a certificate that expires while it is in use
Sent = Sequence[tuple[str, str]]

LANE = SEED + "express = true\n"
INNER = tei.EmbedRequest(inputs="hello", truncate=True).SerializeToString()
WRAPPER = mux.Envelope(target=mux.Target(instance_name="minilm"), request=INNER).SerializeToString()
NAMED = ((INSTANCE, "minilm"),)
WAYS = {
    "wrapped": Ask("/tei_multiplexer.v1.TeiMultiplexer/Embed", WRAPPER),
    "native": Ask("/tei.v1.Embed/Embed", INNER, NAMED),
}
LANE_PATHS = [path for method in express_methods() for path in paths(method)]
OK, UNAUTHENTICATED, DENIED = (
    grpc.StatusCode.OK,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)
DENIALS = (UNAUTHENTICATED, DENIED)


def lane_answers(node: Secured) -> None:
    eventually(lambda: envoy.ask(node.folder / "express.sock", "GET", "/ready"))


def judged(node: Secured) -> int:
    """Calls that Envoy has sent to the multiplexer."""
    text = envoy.ask(node.folder / "express.sock", "GET", "/stats?filter=^cluster.multiplexer.upstream_rq_total$")
    assert text, "Envoy does not answer"
    return int(text.partition(":")[2])


def verdict(channel: grpc.Channel, ask: Ask, sent: Sent = ()) -> tuple[grpc.StatusCode, str]:
    """The code and words of one message sent to any method; OK when it is answered."""
    call = channel.stream_stream(ask.path)(iter([ask.message]), metadata=[*ask.sent, *sent], timeout=SECS)
    try:
        next(call, None)
    except grpc.RpcError as error:
        return error.code(), error.details()
    finally:
        call.cancel()
    return OK, ""


def embed(channel: grpc.Channel, way: str = "wrapped", sent: Sent = ()) -> grpc.StatusCode:
    ask = WAYS[way]
    try:
        channel.unary_unary(ask.path)(ask.message, metadata=[*ask.sent, *sent], timeout=SECS)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return OK


def straight(node: Secured, ask: Callable[[], Any], known: Callable[[], Any] | None = None) -> Any:
    """The answer of a call that the multiplexer did not see. known: makes the caller known, if ``ask`` does not."""
    until = time.monotonic() + STRAIGHT_SECS
    while time.monotonic() < until:
        if known:
            known()
        before = judged(node)
        answer = ask()
        if judged(node) == before:
            return answer
    raise AssertionError("every call went to the multiplexer")


def bearer(key: str) -> Sent:
    return (("authorization", f"Bearer {key}"),)


# -- an appliance that asks for keys ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """It asks for nothing yet, and a caller without a key is known to Envoy."""
    with Secured(tmp_path_factory.mktemp("keys"), "open_health = true\n", Caller(), seeds=LANE) as running:
        running.wait_ready("minilm", 60)
        lane_answers(running)
        yield running


@pytest.fixture(scope="module")
def closing(opened: Secured) -> float:
    """Makes the first key. For how many seconds after that a caller without one was let in."""
    with opened.channel() as channel:
        straight(opened, lambda: embed(channel))
        opened.caller = Caller(key=opened.key("admin", "admin"))
        return last_let_in(time.monotonic(), [lambda: embed(channel), lambda: embed(channel, "native")])


@pytest.fixture(scope="module")
def node(opened: Secured, closing: float) -> Secured:
    return opened


@pytest.fixture(scope="module")
def keys(node: Secured) -> dict[str, str]:
    """By role. The first one was made as users make it, and so is the one that must count at once."""
    found = {"admin": node.caller.key} | {role: f"tei-{role}-{'x' * 40}" for role in ROLES[1:]}
    path = node.folder / "keys.toml"
    keysfile.write(path, (*keysfile.read(path), *(Key(role, digest(found[role]), role) for role in ROLES[1:])))
    with node.channel(Caller()) as channel:
        eventually(lambda: embed(channel, "wrapped", bearer(found["inference"])) is OK)
    return found


@pytest.fixture(scope="module")
def headers(keys: dict[str, str]) -> dict[str, str | None]:
    return {**HELD_BY_NOBODY, **{role: f"Bearer {key}" for role, key in keys.items()}}


def last_let_in(since: float, asks: Sequence[Callable[[], grpc.StatusCode]], every: float = 0.0) -> float:
    """Seconds from then to the begin of the last call that was let in. Fails unless all are kept out in the end."""
    found = 0.0
    left = list(asks)
    end = max(since, time.monotonic()) + 3 * REMEMBERED_SECS
    while left:
        assert time.monotonic() < end, "still let in"
        time.sleep(every)
        for ask in tuple(left):
            began = time.monotonic()
            if ask() in DENIALS:
                left.remove(ask)
            else:
                found = began - since
    assert all(ask() in DENIALS for _ in range(3) for ask in asks)
    return found


def test_the_first_key_puts_out_who_has_none(closing: float) -> None:
    assert closing < REMEMBERED_SECS + SLACK_SECS


@pytest.mark.parametrize("caller", [*HELD_BY_NOBODY, *ROLES])
def test_every_rpc_lets_in_whom_it_should_twice(node: Secured, headers: dict[str, str | None], caller: str) -> None:
    """First as Envoy does not know him, and then as it may. Those whom it may know it sends straight to the replica."""
    header, wrong = headers[caller], []
    sent = [("authorization", header)] if header is not None else []
    with node.channel(Caller()) as channel:
        for path in (*(rpc.path for rpc in rpcs()), *NO_RPC):
            ask = Ask(path, INNER if path.startswith("/tei.v1.") else WRAPPER, NAMED)
            codes = {verdict(channel, ask, sent)[0] for _ in range(2)}
            if path.startswith("/grpc.health.v1."):
                right = not codes & {*DENIALS}  # open_health
            elif caller not in ROLES:
                right = codes == {UNAUTHENTICATED}
            elif caller in MEETS["any" if path in ANY_RPC else "inference"]:
                right = not codes & {*DENIALS, grpc.StatusCode.UNKNOWN}
            else:
                right = codes == {DENIED}
            if not right:
                wrong.append(f"{path}: {codes}")
        assert not wrong
        if caller in MEETS["inference"]:
            known = partial(embed, channel, "wrapped", sent)
            for path in LANE_PATHS:
                ask = Ask(path, INNER if path.startswith("/tei.v1.") else WRAPPER, NAMED)
                assert straight(node, partial(verdict, channel, ask, sent), known)[0] not in DENIALS


@pytest.mark.parametrize("way", WAYS)
def test_a_key_for_reading_embeds_nothing_beside_one_that_may(node: Secured, keys: dict[str, str], way: str) -> None:
    """On one connection, one after the other and all at once."""
    may, reads = bearer(keys["inference"]), bearer(keys["read"])
    ask = WAYS[way]
    with node.channel(Caller()) as channel:
        for _ in range(10):
            assert straight(node, lambda: embed(channel, way, may)) is OK
            before = judged(node)
            assert embed(channel, way, reads) is DENIED
            assert judged(node) == before + 1
        method = channel.unary_unary(ask.path)
        calls = [
            method.future(ask.message, metadata=[*ask.sent, *sent], timeout=SECS)
            for sent in itertools.chain(*[(may, reads)] * 40)
        ]
        assert [call.code() for call in calls] == [OK, DENIED] * 40


@pytest.mark.parametrize("spelling", ways(""))
@pytest.mark.parametrize("way", WAYS)
def test_a_key_may_be_sent_as_clients_send_it(node: Secured, keys: dict[str, str], way: str, spelling: str) -> None:
    with node.channel(Caller()) as channel:
        assert straight(node, lambda: embed(channel, way, [*ways(keys["inference"])[spelling].items()])) is OK
        for key, code in (("tei-unknown", UNAUTHENTICATED), (keys["read"], DENIED), (keys["inference"], OK)):
            assert [embed(channel, way, [*ways(key)[spelling].items()]) for _ in range(2)] == [code] * 2


@pytest.mark.parametrize("way", WAYS)
def test_two_different_keys_in_one_call_are_refused_by_name(node: Secured, keys: dict[str, str], way: str) -> None:
    """Also when Envoy knows each of them."""
    one, other = bearer(keys["admin"])[0], ("x-api-key", keys["inference"])
    with node.channel(Caller()) as channel:
        for _ in range(2):
            for alone in (one, other):
                assert straight(node, lambda alone=alone: embed(channel, way, [alone])) is OK
            for both in ([one, other], [other, one]):
                code, words = verdict(channel, WAYS[way], both)
                assert code is UNAUTHENTICATED
                assert "different keys in " in words
                assert {"authorization", "x-api-key"} <= set(words.replace(":", "").split())
                assert "tei-" not in words


@pytest.mark.parametrize("name", ["authorization", "api-key", "x-api-key"])
@pytest.mark.parametrize("way", WAYS)
def test_one_header_twice_is_never_known(node: Secured, keys: dict[str, str], way: str, name: str) -> None:
    """The multiplexer judges it each time, as without the lane. But for authorization, which HTTP allows once: Envoy
    joins the two with a comma, and that is no key, also where it is twice the same."""
    joined = name == "authorization"

    def header(key: str) -> tuple[str, str]:
        return name, f"Bearer {key}" if joined else key

    may, reads, unknown = (header(key) for key in (keys["inference"], keys["read"], "tei-unknown"))
    with node.channel(Caller()) as channel:
        for _ in range(2):
            assert straight(node, lambda: embed(channel, way, [may])) is OK
            for both in ([may, reads], [reads, may], [may, unknown], [unknown, may]):
                before = judged(node)
                code, words = verdict(channel, WAYS[way], both)
                assert (code, judged(node)) == (UNAUTHENTICATED, before + 1)
                assert ("This key is not known" if joined else f"different keys in {name}") in words
            before = judged(node)
            assert embed(channel, way, [may, may]) is (UNAUTHENTICATED if joined else OK)
            assert judged(node) == before + 1


def test_a_key_that_ends_stops_within_five_seconds(node: Secured, keys: dict[str, str]) -> None:
    """Counted from when its end was told: revoked, made one for reading, and revoked while a call of it was judged long
    ago and is answered only later. None of them gains by what it says of the seconds."""
    path = node.folder / "keys.toml"
    before = keysfile.read(path)
    new = {name: f"tei-{name}-{'x' * 40}" for name in ("ended", "reads", "waits", "stays")}
    own = {name: Key(name, digest(key), "inference") for name, key in new.items()}
    keysfile.write(path, (*before, *own.values()))
    (replica,) = node.processes_of("minilm")
    with node.channel(Caller()) as channel, ThreadPoolExecutor() as threads:
        ended, reads, waits, stays = (
            partial(embed, channel, "wrapped", [*bearer(key), (EXPRESS_SECS_KEY, "3600")]) for key in new.values()
        )
        for ask in (ended, reads):
            assert straight(node, ask) is OK
        replica.send_signal(signal.SIGSTOP)
        try:
            sent = judged(node)
            waiting = threads.submit(waits)
            eventually(lambda: judged(node) > sent)
            time.sleep(JUDGING_SECS)
            keysfile.write(path, (*before, replace(own["reads"], role="read"), own["stays"]))
            told = time.monotonic()
            time.sleep(HELD_SECS)  # an answer that comes late must not make the key known from then on
        finally:
            replica.send_signal(signal.SIGCONT)
        assert waiting.result() is OK
        assert last_let_in(told, [ended, reads, waits]) < REMEMBERED_SECS + SLACK_SECS
        assert straight(node, stays) is OK
    keysfile.write(path, before)


def test_a_new_key_works_at_once(node: Secured, keys: dict[str, str]) -> None:
    sent = bearer(node.key("new", "inference"))
    with node.channel(Caller()) as channel:
        assert [embed(channel, way, sent) for way in WAYS] == [OK, OK]
        for way in WAYS:
            assert straight(node, lambda way=way: embed(channel, way, sent)) is OK


def test_health_is_open_through_envoy_and_nothing_else_is(node: Secured, keys: dict[str, str]) -> None:
    for header in (*HELD_BY_NOBODY.values(), f"Bearer {keys['read']}"):
        sent = [("authorization", header)] if header is not None else []
        with node.channel(Caller()) as channel:
            before = judged(node)
            assert verdict(channel, Ask("/grpc.health.v1.Health/Check"), sent) == (OK, "")
            assert judged(node) == before + 1
            assert {embed(channel, way, sent) for way in WAYS} <= set(DENIALS)


# -- what a caller says of himself ------------------------------------------------------------------------------------

HIS = "the certificate of one who may come in"
ADMITTED, TO_JUDGE = (EXPRESS_KEY, EXPRESS_ADMITTED), (EXPRESS_KEY, EXPRESS_JUDGE)
FOR_ENVOY = {
    "x-envoy-retry-on": "5xx,gateway-error",
    "x-envoy-retry-grpc-on": "unavailable,cancelled",
    "x-envoy-max-retries": "9",
    "x-envoy-upstream-alt-stat-name": "stolen",
    "x-envoy-upstream-rq-timeout-ms": "1",
    "x-envoy-upstream-rq-per-try-timeout-ms": "1",
    "x-envoy-upstream-stream-duration-ms": "1",
    "x-envoy-hedge-on-per-try-timeout": "true",
    "x-envoy-expected-rq-timeout-ms": "1",
    "x-envoy-original-path": WAYS["native"].path,
    "x-envoy-original-method": "POST",
    "x-envoy-internal": "true",
    "x-envoy-force-trace": "true",
    "x-envoy-decorator-operation": "stolen",
    "x-envoy-external-address": "127.0.0.1",
    "x-envoy-attempt-count": "1",
    "x-envoy-ip-tags": "internal",
    "x-envoy-peer-metadata": "x",
    "x-envoy-ratelimited": "true",
}
CLAIMS: dict[str, Sent] = {
    "admitted": [ADMITTED],
    "admitted twice": [ADMITTED, ADMITTED],
    "admitted, then to be judged": [ADMITTED, TO_JUDGE],
    "to be judged, then admitted": [TO_JUDGE, ADMITTED],
    "admitted many times": [ADMITTED] * 50,
    "both in one": [(EXPRESS_KEY, f"{EXPRESS_JUDGE}, {EXPRESS_ADMITTED}")],
    "nothing of it": [(EXPRESS_KEY, "")],
    "for an hour": [(EXPRESS_SECS_KEY, "3600"), ADMITTED],
    "another's certificate": [(CERTIFICATE_KEY, HIS)],
    "another's certificate twice": [(CERTIFICATE_KEY, HIS)] * 2,
    "another's certificate, admitted": [(CERTIFICATE_KEY, HIS), ADMITTED],
    "another's certificate, to be judged": [(CERTIFICATE_KEY, HIS), TO_JUDGE],
    "words for Envoy": [*FOR_ENVOY.items()],
    "words for Envoy, admitted": [*FOR_ENVOY.items(), ADMITTED],
    "from here": [("x-forwarded-for", "127.0.0.1"), ("x-forwarded-proto", "https"), ("x-real-ip", "127.0.0.1")],
}
NO_HEADERS: dict[str, Sent] = {
    "upper case": [("X-TEI-Express", EXPRESS_ADMITTED)],
    "a line break in the name": [("x-mine\r\nx-tei-express", EXPRESS_ADMITTED)],
    "a line break in a value": [("x-mine", "1\r\nx-tei-express: admitted")],
    "a line feed in a key": [("api-key", "a\nb")],
    "a zero byte in a key": [("api-key", "a\0b")],
    "a blank behind the name": [("x-tei-express ", EXPRESS_ADMITTED)],
}


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


def said(claim: str, pki: Pki) -> Sent:
    forwarded = f'Cert="{quote(pki.good.cert_path.read_text(), safe="")}"'
    return [(name, forwarded if value == HIS else value) for name, value in CLAIMS[claim]]


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_caller_gains_nothing_by_what_he_says_of_himself(
    node: Secured, keys: dict[str, str], pki: Pki, claim: str
) -> None:
    """Who may not come in is told the same, and for who may nothing changes."""
    claimed = said(claim, pki)
    with node.channel(Caller()) as channel:
        for way in WAYS:
            assert straight(node, lambda way=way: embed(channel, way, bearer(keys["inference"]))) is OK
            for sent in ((), bearer("tei-unknown"), bearer(keys["read"])):
                wanted = verdict(channel, WAYS[way], sent)
                assert wanted[0] in DENIALS
                assert [verdict(channel, WAYS[way], [*claimed, *sent]) for _ in range(2)] == [wanted] * 2
            may = [*claimed, *bearer(keys["inference"])]
            assert straight(node, lambda way=way, may=may: embed(channel, way, may)) is OK
    assert not envoy.ask(node.folder / "express.sock", "GET", "/stats?filter=stolen")


def test_what_is_no_header_is_no_call(node: Secured, keys: dict[str, str]) -> None:
    """Also of one who may call; Envoy takes a second to close such a connection."""
    may = WAYS["native"]
    may = replace(may, sent=(*may.sent, *bearer(keys["inference"])))
    asks = [replace(may, sent=(*may.sent, *sent)) for sent in NO_HEADERS.values()]
    with ThreadPoolExecutor(len(asks)) as threads:
        outcomes = threads.map(lambda ask: knock(node, "grpc", None, ask=ask).outcome, asks)
    assert dict(zip(NO_HEADERS, outcomes, strict=True)) == dict.fromkeys(NO_HEADERS, Outcome.CLOSED)
    assert knock(node, "grpc", None, ask=may).outcome is Outcome.SERVED


# -- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def caller(pki: Pki) -> Caller:
    return Caller(trusts=pki.ca, shows=pki.good)


@pytest.fixture(scope="module")
def walled(tmp_path_factory: pytest.TempPathFactory, pki: Pki, caller: Caller) -> Iterator[Secured]:
    """Who shows a certificate with a listed name comes in."""
    folder = tmp_path_factory.mktemp("walled")
    installed(folder, pki.server, pki.ca)
    with Secured(folder, tls_settings(folder), caller, seeds=LANE, environ=caller.environ) as running:
        running.wait_ready("minilm", 60)
        lane_answers(running)
        yield running


@pytest.fixture(scope="module")
def unlisted(pki: Pki, caller: Caller) -> Caller:
    """Of the right authority."""
    return replace(caller, shows=pki.ca.issue("searcher"))


@pytest.fixture(scope="module")
def expiring(walled: Secured, pki: Pki, caller: Caller) -> Iterator[tuple[Caller, float, Future[float]]]:
    """A caller, when his certificate expires, and for how many seconds after that calls of his connection come in: he
    calls on in the background, so that no test waits for it."""
    until = (datetime.now(UTC) + timedelta(seconds=LIFE_SECS)).replace(microsecond=0)
    ends = time.monotonic() + (until - datetime.now(UTC)).total_seconds()
    short = replace(caller, shows=pki.ca.issue("search", not_before=NOW - HOUR, not_after=until))

    def late() -> float:
        with walled.channel(short) as channel:
            assert embed(channel) is OK
            asks = [partial(embed, channel, way) for way in WAYS]
            return last_let_in(ends, asks, every=0.05)

    with ThreadPoolExecutor(1) as threads:
        yield short, ends, threads.submit(late)


@pytest.mark.usefixtures("expiring")  # so that it begins
@pytest.mark.parametrize("row", ROWS)
def test_who_is_let_in(walled: Secured, pki: Pki, caller: Caller, row: str) -> None:
    """On the way through the multiplexer and on both of the lane, before he can be known and after."""
    make, wanted = ROWS[row]
    context = context_of(replace(caller, shows=make(pki)))
    for ask in (None, *WAYS.values(), *WAYS.values()):
        assert knock(walled, "grpc", context, ask=ask).outcome in wanted
    if wanted is GOOD:
        for ask in WAYS.values():
            last = straight(walled, lambda ask=ask: knock(walled, "grpc", context, ask=ask).outcome)
            assert last is Outcome.SERVED


def test_a_name_that_is_not_listed_embeds_nothing_beside_one_that_is(walled: Secured, unlisted: Caller) -> None:
    with walled.channel() as channel, walled.channel(unlisted) as other:
        for _, way in itertools.product(range(10), WAYS):
            assert straight(walled, lambda way=way: embed(channel, way)) is OK
            assert embed(other, way) is DENIED


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_caller_gains_nothing_by_what_he_says_behind_his_certificate(
    walled: Secured, unlisted: Caller, pki: Pki, claim: str
) -> None:
    claimed = said(claim, pki)
    with walled.channel() as channel, walled.channel(unlisted) as other:
        for way in WAYS:
            assert straight(walled, lambda way=way: embed(channel, way)) is OK
            wanted = verdict(other, WAYS[way])
            assert wanted[0] is DENIED
            assert [verdict(other, WAYS[way], claimed) for _ in range(2)] == [wanted] * 2
            assert straight(walled, lambda way=way: embed(channel, way, claimed)) is OK


@pytest.mark.parametrize("language", ["http", "http/2"])
def test_nobody_is_served_in_the_clear(walled: Secured, language: str) -> None:
    lane_answers(walled)
    listener = "grpc" if language == "http/2" else "rest"
    with grpc_socket(walled) as plain:
        assert spoken(plain, listener, "") is Outcome.CLOSED


def grpc_socket(node: Secured) -> socket.socket:
    return socket.create_connection(("127.0.0.1", node.grpc_port), timeout=SECS)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
@pytest.mark.parametrize("version", [V.TLSv1_1, V.TLSv1_2, V.TLSv1_3])
def test_which_versions_are_spoken(walled: Secured, caller: Caller, version: ssl.TLSVersion) -> None:
    context = weak(context_of(caller, minimum_version=version, maximum_version=version))
    for ask in WAYS.values():
        outcome = knock(walled, "grpc", context, ask=ask).outcome
        assert outcome is (Outcome.CLOSED if version is V.TLSv1_1 else Outcome.SERVED)


@pytest.fixture
def newest(tmp_path: Path, pki: Pki) -> Iterator[int]:
    """The port of an Envoy that is told to speak TLS 1.3 alone, without an appliance behind it."""
    server = pki.server
    tls = TlsSettings(cert_file=str(server.chain), key_file=str(server.key_path), min_version="1.3")
    (port,) = free_ports(1)
    settings = Settings(data_dir=str(tmp_path), state_file=str(tmp_path / "state.toml"), grpc_port=port, tls=tls)
    lane = ExpressLane.of(settings, "127.0.0.1", 2, SCRIPT.read_text(), (0.1, 1))
    binary = envoy.binary()
    assert binary
    (tmp_path / "express").mkdir()
    tables = Tables(Node.at(settings), lane, binary)
    tables.follow()
    path = tables.put(BOOTSTRAP, bootstrap(lane))
    process = subprocess.Popen(envoy.command(binary, path, threads=1))
    try:
        eventually(lambda: envoy.ask(tmp_path / "express.sock", "GET", "/ready"))
        yield port
    finally:
        process.terminate()
        process.wait(SECS)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_the_least_version_holds(newest: int, caller: Caller) -> None:
    spoken_versions = set()
    for version in (V.TLSv1_1, V.TLSv1_2, V.TLSv1_3):
        context = weak(context_of(caller, minimum_version=version, maximum_version=version))
        with socket.create_connection(("127.0.0.1", newest), timeout=SECS) as plain, contextlib.suppress(ssl.SSLError):
            with context.wrap_socket(plain, server_hostname="localhost") as wrapped:
                spoken_versions.add(wrapped.version())
    assert spoken_versions == {"TLSv1.3"}


@pytest.mark.parametrize("version", [V.TLSv1_2, V.TLSv1_3])
def test_no_session_is_resumed(walled: Secured, caller: Caller, version: ssl.TLSVersion) -> None:
    """A resumed one is not looked at again."""
    context = context_of(caller, minimum_version=version, maximum_version=version)
    first = knock(walled, "grpc", context, ask=WAYS["wrapped"])
    again = knock(walled, "grpc", context, session=first.session, ask=WAYS["wrapped"])
    assert (first.outcome, again.outcome, again.resumed) == (Outcome.SERVED, Outcome.SERVED, False)


# -- files that change ------------------------------------------------------------------------------------------------


@pytest.fixture
def files(walled: Secured, pki: Pki) -> Iterator[Path]:
    """The folder of the certificates in use, which are put back."""
    folder = walled.config.parent
    yield folder
    installed(folder, pki.server, pki.ca)
    comes_to(walled, walled.caller, Outcome.SERVED, pki.server)


def comes_to(node: Secured, caller: Caller, outcome: Outcome, server: Issued | None = None) -> None:
    """Six new connections in a row end so, before long."""
    eventually(lambda: everywhere(node, "grpc", caller, outcome, server), FOLLOWED_SECS)


def in_place(source: Path, target: Path) -> None:
    shutil.copy(source, target)


def by_rename(source: Path, target: Path) -> None:
    fresh = target.with_name("fresh")
    shutil.copy(source, fresh)
    os.replace(fresh, target)


@pytest.mark.parametrize(
    ("put", "names"),
    [(in_place, HOSTS), (by_rename, HOSTS), (by_rename, [*HOSTS, "URI:spiffe://node/appliance"])],
    ids=["in place", "by rename", "and a URI"],
)
def test_replaced_certificates_are_shown_to_new_connections(
    walled: Secured, pki: Pki, files: Path, put: Callable[[Path, Path], None], names: list[str]
) -> None:
    """The certificate comes first, and then its key; connections that are open go on."""
    fresh = pki.ca.issue("node", names, key="rsa")
    with walled.channel() as channel:
        assert straight(walled, lambda: embed(channel)) is OK
        put(fresh.chain, files / "server.pem")
        looked_at(walled)
        assert everywhere(walled, "grpc", walled.caller, Outcome.SERVED, pki.server)
        put(fresh.key_path, files / "server.key")
        comes_to(walled, walled.caller, Outcome.SERVED, fresh)
        for way in WAYS:
            assert straight(walled, lambda way=way: embed(channel, way)) is OK
            context = context_of(walled.caller)
            assert knock(walled, "grpc", context, ask=WAYS[way]).outcome is Outcome.SERVED


def looked_at(node: Secured) -> None:
    """Envoy has been told to look at the files of `[tls]` as they are now, and had a moment to do it."""
    changed = max(path.stat().st_mtime_ns for path in node.config.parent.iterdir() if path.suffix in (".pem", ".key"))
    told = node.folder / "express" / "server.json"
    eventually(lambda: told.stat().st_mtime_ns > changed, FOLLOWED_SECS)
    time.sleep(MOMENT_SECS)


@pytest.mark.parametrize("how", BREAK)
def test_a_broken_replacement_keeps_the_old_and_then_is_in_the_way_of_nothing(
    walled: Secured, pki: Pki, files: Path, unlisted: Caller, how: str
) -> None:
    strangers = [replace(walled.caller, shows=shown) for shown in (pki.other.issue("search"), pki.self_signed(), None)]
    with walled.channel() as channel:
        assert straight(walled, lambda: embed(channel)) is OK
        BREAK[how](files, pki)
        looked_at(walled)
        assert everywhere(walled, "grpc", walled.caller, Outcome.SERVED, pki.server)
        for stranger, ask in itertools.product(strangers, (None, *WAYS.values())):
            assert knock(walled, "grpc", context_of(stranger), ask=ask).outcome is Outcome.CLOSED
        assert knock(walled, "grpc", context_of(unlisted), ask=WAYS["wrapped"]).outcome in REFUSED
        assert embed(channel) is OK
        installed(files, pki.server, pki.ca)
        looked_at(walled)
        shutil.copy(pki.other.pem, files / "clients.pem")
        comes_to(walled, walled.caller, Outcome.CLOSED)
        comes_to(walled, strangers[0], Outcome.SERVED, pki.server)


@pytest.mark.parametrize("put", [in_place, by_rename])
def test_clients_of_an_authority_that_was_replaced_stay_out(
    walled: Secured, pki: Pki, files: Path, put: Callable[[Path, Path], None]
) -> None:
    """Also those whom Envoy knows."""
    new = replace(walled.caller, shows=pki.other.issue("search"))
    with walled.channel() as channel:
        assert straight(walled, lambda: embed(channel)) is OK
        put(pki.other.pem, files / "clients.pem")
        comes_to(walled, walled.caller, Outcome.CLOSED)
        for ask in WAYS.values():
            assert knock(walled, "grpc", context_of(walled.caller), ask=ask).outcome is Outcome.CLOSED
            assert knock(walled, "grpc", context_of(new), ask=ask).outcome is Outcome.SERVED
        assert embed(channel) is OK  # a connection that is open goes on


def test_an_authority_below_another_may_be_the_one_that_is_trusted(walled: Secured, pki: Pki, files: Path) -> None:
    between = pki.ca.intermediate("Between")
    shutil.copy(between.pem, files / "clients.pem")
    below = replace(walled.caller, shows=between.issue("search"))
    comes_to(walled, walled.caller, Outcome.CLOSED)
    comes_to(walled, below, Outcome.SERVED)


def test_a_certificate_that_expires_stops_within_five_seconds(
    walled: Secured, expiring: tuple[Caller, float, Future[float]]
) -> None:
    """On a connection that is open; new ones are refused at once."""
    short, ends, late = expiring
    assert late.result() < REMEMBERED_SECS + SLACK_SECS
    assert time.monotonic() > ends
    for ask in (None, *WAYS.values()):
        assert knock(walled, "grpc", context_of(short), ask=ask).outcome is Outcome.CLOSED


# -- files of the lane ------------------------------------------------------------------------------------------------


def test_what_the_lane_writes_has_no_secret_and_is_for_its_user_alone(
    node: Secured, walled: Secured, keys: dict[str, str], pki: Pki
) -> None:
    lines = pki.server.key_path.read_text().splitlines()[1:-1]
    secrets = [*keys.values(), *lines, "PRIVATE KEY"]
    for running in (node, walled):
        written = sorted((running.folder / "express").rglob("*"))
        assert {"bootstrap.json", "clusters.json", "routes.json", "candidate.json"} <= {path.name for path in written}
        assert stat.S_IMODE((running.folder / "express").stat().st_mode) == 0o700
        assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in written if path.is_file()} == {
            path.name: 0o600 for path in written
        }
        assert stat.S_IMODE((running.folder / "express.sock").stat().st_mode) == 0o600
        for path in (*written, *(running.folder / "logs").glob("express*.log")):
            text = path.read_text()
            assert not [secret for secret in secrets if secret in text], path
    assert {"server.json", "clients.json"} <= {path.name for path in (walled.folder / "express").iterdir()}
