"""A request is taken from its socket as it comes, so that no thread has to wait for the rest of it."""

from __future__ import annotations

import io
import os
import socket
import ssl

from appliance.wire.http1 import request_size

READ_BYTES = 16 * 1024
AHEAD_BYTES = 64 * 1024  # a request that is not larger has a thread when all of it is there


def take_request(client: socket.socket, buffer: io.BytesIO) -> bool:
    """Move what has come from a socket, without waiting, to the end of the buffer, which begins with a request.

    False: more of the request has to come. True: it is there, or the head of one larger than AHEAD_BYTES, or its client
    sends no more.
    """
    if is_secure := isinstance(client, ssl.SSLSocket):
        client.setblocking(False)
    held = buffer.seek(0, os.SEEK_END)
    while held < AHEAD_BYTES:
        size = request_size(buffer.getvalue(), AHEAD_BYTES) if held else None
        if size is not None and size <= held:
            return True
        try:
            data = client.recv(READ_BYTES) if is_secure else client.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:  # whoever reads next meets it, too
            return True
        if not data:
            return True
        held += buffer.write(data)
    return True


def has_read_ahead(client: socket.socket, buffer: io.BytesIO) -> bool:
    """Whether bytes of the next request came with the last one: they do not make the socket readable any more."""
    return bool((isinstance(client, ssl.SSLSocket) and client.pending()) or buffer.getvalue())
