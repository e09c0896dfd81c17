"""What an RPC needs; and a request is identified once, and then authorized."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.core import access
from appliance.core.access import ANONYMOUS, Key, Need
from appliance.core.problems import Kind, Problem
from appliance.core.settings import parse
from appliance.drivers import keysfile
from appliance.node.authentication import Authenticator, keys_path, rpc_need

RPCS = {
    "/grpc.health.v1.Healthy/Check": Need.INFERENCE,
    "/xgrpc.health.v1.Health/Check": Need.INFERENCE,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": Need.ANY,
    "/grpc.reflectionX.v1.ServerReflection/ServerReflectionInfo": Need.INFERENCE,
    "/grpc.health.v1.Health/Watch": Need.OPEN,
    "/tei.v1.Info/Info": Need.ANY,
    "/tei_multiplexer.v1.TeiMultiplexer/Info": Need.ANY,
    "/tei_multiplexer.v1.TeiMultiplexer/InfoX": Need.INFERENCE,
    "/tei.v1.Embed/Embed": Need.INFERENCE,
    "/tei.v1.Info/Embed": Need.INFERENCE,
    "": Need.INFERENCE,
    "/": Need.INFERENCE,
}


@pytest.mark.parametrize("method", RPCS)
def test_an_rpc_is_known_by_its_whole_name(method: str) -> None:
    assert rpc_need(method) is RPCS[method]


@pytest.fixture
def authenticator(tmp_path: Path) -> Authenticator:
    settings = parse({"open_health": True}, {}, {}, str(tmp_path))
    keysfile.write(keys_path(settings), (Key("reader", access.digest("tei-right"), "read"),))
    return Authenticator.of(settings)


def environ(key: str | None) -> dict[str, Any]:
    return {} if key is None else {"HTTP_X_API_KEY": key}


def test_a_key_names_its_owner_and_their_role(authenticator: Authenticator) -> None:
    principal = authenticator.identify(environ("tei-right"))
    assert (principal.name, principal.role, principal.refusal) == ("reader", "read", None)
    authenticator.authorize(principal, Need.READ)
    with pytest.raises(Problem) as refused:
        authenticator.authorize(principal, Need.ADMIN)
    assert refused.value.kind is Kind.FORBIDDEN


@pytest.mark.parametrize("key", [None, "", "tei-wrong"])
def test_without_a_key_only_what_is_open_is_allowed(authenticator: Authenticator, key: str | None) -> None:
    principal = authenticator.identify(environ(key))
    assert (principal.name, principal.role) == (ANONYMOUS, None)
    authenticator.authorize(principal, Need.OPEN)
    for need in set(Need) - {Need.OPEN}:
        with pytest.raises(Problem) as refused:
            authenticator.authorize(principal, need)
        assert refused.value.kind is Kind.UNAUTHENTICATED


def test_where_no_key_is_asked_for_everything_is_allowed(tmp_path: Path) -> None:
    authenticator = Authenticator.of(parse({}, {}, {}, str(tmp_path)))
    principal = authenticator.identify(environ("tei-any"))
    assert principal is access.NOBODY
    for need in Need:
        authenticator.authorize(principal, need)


class InternalCall:
    """What is used of the context of a call that came through a socket in the data folder."""

    def __init__(self, *metadata: tuple[str, str]) -> None:
        self.metadata = metadata

    def peer(self) -> str:
        return "unix:"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self.metadata


def test_a_caller_from_outside_does_not_say_who_he_is(authenticator: Authenticator) -> None:
    """Envoy sends calls on that it does not know."""
    metadata = (("authorization", "Bearer tei-right"), ("x-tei-scope", "somebody"), ("x-tei-express", "judge"))
    assert authenticator.caller_name(InternalCall(*metadata)) == "reader"


def test_of_a_call_that_was_admitted_to_the_lane_in_vain_nobody_knows_whose_it_is(authenticator: Authenticator) -> None:
    """Envoy takes its key away. All of them were anonymous, and had one scope of the cache together."""
    assert authenticator.caller_name(InternalCall(("x-tei-scope", "somebody"), ("x-tei-express", "admitted"))) is None


def test_the_gateway_says_who_asks_whatever_the_name(authenticator: Authenticator) -> None:
    assert authenticator.caller_name(InternalCall(("x-tei-scope", "J%C3%BCrgen"))) == "Jürgen"


@pytest.mark.parametrize("certificates", [False, True])
def test_the_first_key_is_made_on_this_machine_alone(tmp_path: Path, certificates: bool) -> None:
    """Where a certificate is needed, any that is allowed could make the first key, and lock all others out."""
    settings = parse({}, {}, {}, str(tmp_path))
    settings = replace(settings, tls=replace(settings.tls, require_client_cert=certificates))
    authenticator = Authenticator(settings, Authenticator.of(parse({}, {}, {}, str(tmp_path))).keys, None)
    authenticator.refuse_remote({"REMOTE_ADDR": "127.0.0.1"})
    with pytest.raises(Problem, match="The first key is made on the appliance's own machine") as refused:
        authenticator.refuse_remote({"REMOTE_ADDR": "192.0.2.7"})
    assert refused.value.kind is Kind.FORBIDDEN
    keysfile.write(keys_path(settings), (Key("admin", access.digest("tei-right"), "admin"),))
    authenticator.keys.looked_at = 0
    authenticator.refuse_remote({"REMOTE_ADDR": "192.0.2.7"})
