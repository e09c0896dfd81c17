"""The kernel's messages about sockets, as bytes."""

import errno
import socket
import struct
from collections.abc import Iterator

import pytest

from appliance.wire.inet_diag import Listener, listeners, request

V4, V6 = socket.inet_aton("127.0.0.1"), socket.inet_pton(socket.AF_INET6, "::ffff:127.0.0.1")
DONE = struct.pack("=IHHIIi", 20, 3, 2, 1, 0, 0)


def row(family: int, address: bytes, port: int, inode: int, more: bytes = b"") -> bytes:
    """As in linux/inet_diag.h. more: attributes behind it."""
    ends = struct.pack(">HH", port, 0) + address.ljust(16, b"\0") + bytes(16) + struct.pack("=III", 0, 1, 2)
    message = struct.pack("=BBBB", family, 10, 0, 0) + ends + struct.pack("=IIIII", 0, 0, 128, 0, inode) + more
    padding = bytes(-len(message) % 4)
    return struct.pack("=IHHII", 16 + len(message), 20, 2, 1, 0) + message + padding


def test_a_request_asks_for_all_that_listen() -> None:
    message = request(socket.AF_INET6)
    assert struct.unpack_from("=IHH", message) == (len(message), 20, 0x301)
    assert struct.unpack_from("=BBBxI", message, 16) == (10, 6, 0, 1 << 10)
    assert len(message) == 16 + 56


def test_rows_are_read_across_messages_until_the_end() -> None:
    first = row(socket.AF_INET, V4, 8080, 7, b"\5\0\x08\0\1") + row(socket.AF_INET, V4, 65535, 2**32 - 1)

    def replies() -> Iterator[bytes]:
        yield first
        yield row(socket.AF_INET6, V6, 1, 9) + DONE
        raise AssertionError("nothing comes after the end: to read on would be to wait for ever")

    assert list(listeners(replies())) == [Listener(V4, 8080, 7), Listener(V4, 65535, 2**32 - 1), Listener(V6, 1, 9)]


def test_a_refusal_is_raised_with_its_number() -> None:
    refused = struct.pack("=IHHIIi", 36, 2, 0, 1, 0, -errno.ENOENT) + bytes(16)
    with pytest.raises(OSError, match="sock_diag") as refusal:
        list(listeners(iter([refused])))
    assert refusal.value.errno == errno.ENOENT
