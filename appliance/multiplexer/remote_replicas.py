"""Replicas on other machines: how connections to them are made, and what proves them."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from appliance.core.problems import invalid, quoted
from appliance.core.routing import Replica
from appliance.core.settings import Settings
from appliance.drivers.grpccalls import deadline_check
from appliance.drivers.http2 import CONNECT_SECS, Connection
from appliance.files.securesocket import Secure
from appliance.wire.calls import CallFailed, timeout_header
from appliance.wire.envelope import CACHE_BYPASS, CACHE_KEY, HOP_KEY, INSTANCE_KEY
from appliance.wire.tei.v1.tei_pb2 import InfoResponse

if TYPE_CHECKING:
    from appliance.drivers.remotetls import RemoteCertificates

log = logging.getLogger(__name__)


class RemoteReplicas:
    """Raises: Problem for certificates, or a file with a key, that cannot be used."""

    def __init__(self, settings: Settings) -> None:
        self.certificates: RemoteCertificates | None = None
        if settings.remote_tls.on:
            from appliance.drivers.remotetls import RemoteCertificates  # only now: few need it

            self.certificates = RemoteCertificates(settings.remote_tls)
        self.to_peers: list[tuple[str, str]] = []
        if settings.cache.scope == "key":  # to a peer all our callers are one
            self.to_peers.append((CACHE_KEY, CACHE_BYPASS))
        if settings.peer_key_file:
            self.to_peers.append(("authorization", f"Bearer {key_in(settings.peer_key_file)}"))

    def secure(self, replica: Replica) -> Secure | None:
        """How a connection to a replica gets TLS; None where it has none."""
        if self.certificates is None or replica.is_local:
            return None
        return partial(self.certificates.secure, replica.server_name)

    def connect(self, replica: Replica) -> Connection:
        """A new connection to the address of a replica, on this machine or another. Raises: OSError."""
        if replica.is_local:
            return Connection(replica.address)
        # TEI makes nothing of these; an appliance learns which instance is meant, and that it has to have it itself.
        metadata = [(INSTANCE_KEY, replica.instance), (HOP_KEY, "1"), *(self.to_peers if replica.is_peer else ())]
        # A peer looks after its own replicas: when it is lost, no call of ours has ended it.
        return Connection(replica.address, self.secure(replica), metadata, repeatable=replica.is_peer)

    def info(self, replica: Replica, connection: Connection) -> InfoResponse | None:
        """What the process says of itself to which a new connection leads; None where that is not this replica: its
        address may belong to another program by now. Raises: OSError when it does not answer."""
        info = ask_info(connection)
        if info.model_id == replica.model_id:
            return info
        log.error(
            'What listens at %s serves %s, and not %s: it gets no calls for "%s"',
            *(replica.address, quoted(info.model_id), quoted(replica.model_id), replica.instance),
        )
        return None


def ask_info(connection: Connection) -> InfoResponse:
    """Raises: OSError unless there is an answer within the time for a connection."""
    call = connection.begin("/tei.v1.Info/Info", (b"",), [("grpc-timeout", timeout_header(CONNECT_SECS))])
    try:
        (reply,) = connection.replies(call, deadline_check(CONNECT_SECS, "no answer to Info after {:g} s"))
        return InfoResponse.FromString(reply)
    except (CallFailed, ValueError, DecodeError) as error:
        raise ConnectionAbortedError(f"it does not say what it serves: {error}") from error


def key_in(file: str) -> str:
    """Raises: Problem."""
    try:
        return Path(file).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise invalid(f"peer_key_file {file}: {error}") from error
