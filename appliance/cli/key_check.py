"""Whether keys count: each port of a running appliance is called with a key and without one."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import grpc
import requests

from appliance.cli.connection import Identity
from appliance.cli.control_client import ControlClient
from appliance.cli.multiplexer_client import MultiplexerClient
from appliance.core.problems import Problem
from appliance.core.settings import Settings
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux

PATIENCE_SECS = 5.0  # programs look at the key file 50 times a second; this is for those that are just starting
CALL_SECS = 2.0
POLL_SECS = 0.1


@dataclass(frozen=True)
class PortCheck:
    """Ports that are as they should be, and why the others are not."""

    good: list[int]
    wrong: dict[int, str]


def can_check(settings: Settings) -> bool:
    """Not where a client certificate is needed and the environment names none."""
    return bool(Identity.from_environment(settings).certificate) or not settings.tls.require_client_cert


def check_ports(settings: Settings, key: str = "", patience_secs: float = PATIENCE_SECS) -> PortCheck:
    """Each port, with some patience: wrong is one that lets in callers without a key, or does not know this one."""
    until = time.monotonic() + patience_secs
    faults = {port: fault_of(settings, port, key) for port in sorted(settings.own_ports)}
    while any(faults.values()) and time.monotonic() < until:
        time.sleep(POLL_SECS)
        faults = {port: fault and fault_of(settings, port, key) for port, fault in faults.items()}
    good = [port for port, fault in faults.items() if not fault]
    return PortCheck(good, {port: fault for port, fault in faults.items() if fault})


def fault_of(settings: Settings, port: int, key: str) -> str:
    """What is wrong at the port; empty when all is well."""
    without_key = replace(Identity.from_environment(settings), key="")
    try:
        if lets_in(settings, port, without_key):
            return "it asks for no key"
        if key and not lets_in(settings, port, replace(without_key, key=key)):
            return "it does not know the key"
    except Problem as problem:  # a file of TLS that we cannot read
        return f"it cannot be asked: {problem.message}"
    except (requests.RequestException, grpc.RpcError) as error:
        return f"it does not answer: {error.details() if isinstance(error, grpc.Call) else error}"
    return ""


def lets_in(settings: Settings, port: int, identity: Identity) -> bool:
    """Whether the caller passes authentication. Raises: the libraries' own errors when there is no answer."""
    if port != settings.grpc_port:
        with (client := ControlClient.on_port(settings, port, identity)).session:
            return client.session.get(f"{client.url}/openapi.json", timeout=CALL_SECS).status_code != 401
    with MultiplexerClient.from_settings(settings, identity) as multiplexer:
        try:
            multiplexer.stub.Info(mux.InfoRequest(), timeout=CALL_SECS)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
            return error.code() is not grpc.StatusCode.UNAUTHENTICATED
    return True
