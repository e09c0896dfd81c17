"""Whether keys count: each port of the appliance that runs is asked with a key and without one."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import grpc
import requests

from appliance.cli.client import Control, Identity, Multiplexer
from appliance.core.problems import Problem
from appliance.core.settings import Settings
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux

PATIENCE_SECS = 5.0  # programs look at the key file 50 times a second; this is for those that are just starting
ASK_SECS = 2.0
POLL_SECS = 0.1


@dataclass(frozen=True)
class Tried:
    """Ports that are as they should be, and why the others are not."""

    good: list[int]
    wrong: dict[int, str]


def can_be_asked(settings: Settings) -> bool:
    """Not where a client certificate is needed that we do not have."""
    return bool(Identity.of(settings).certificate) or not settings.tls.require_client_cert


def tried(settings: Settings, key: str = "", patience_secs: float = PATIENCE_SECS) -> Tried:
    """Each port, with some patience: wrong is one that lets in callers without a key, or does not know this one."""
    until = time.monotonic() + patience_secs
    found = {port: wrong_at(settings, port, key) for port in sorted(settings.own_ports)}
    while any(found.values()) and time.monotonic() < until:
        time.sleep(POLL_SECS)
        found = {port: why and wrong_at(settings, port, key) for port, why in found.items()}
    return Tried([port for port, why in found.items() if not why], {port: why for port, why in found.items() if why})


def wrong_at(settings: Settings, port: int, key: str) -> str:
    """Nothing when all is well."""
    nobody = replace(Identity.of(settings), key="")
    try:
        if lets_in(settings, port, nobody):
            return "it asks for no key"
        if key and not lets_in(settings, port, replace(nobody, key=key)):
            return "it does not know the key"
    except Problem as problem:  # a file of TLS that we cannot read
        return f"it cannot be asked: {problem.message}"
    except (requests.RequestException, grpc.RpcError) as error:
        return f"it does not answer: {error.details() if isinstance(error, grpc.Call) else error}"
    return ""


def lets_in(settings: Settings, port: int, identity: Identity) -> bool:
    """Whether a caller gets further than to the question who he is. Raises: what the library has for no answer."""
    if port != settings.grpc_port:
        with (asked := Control.on_port(settings, port, identity)).session:
            return asked.session.get(f"{asked.url}/openapi.json", timeout=ASK_SECS).status_code != 401
    with Multiplexer.of(settings, identity) as multiplexer:
        try:
            multiplexer.stub.Info(mux.InfoRequest(), timeout=ASK_SECS)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
            return error.code() is not grpc.StatusCode.UNAUTHENTICATED
    return True
