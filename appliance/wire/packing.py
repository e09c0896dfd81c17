"""Several messages of a stream in one: of the embedded engine, which else spends more on gRPC than on short texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from appliance.wire.tei_appliance.v1.packed_pb2 import Packed
from appliance.wire.vectors import length_delimited

SERVICE = "tei_appliance.v1.PackedEmbed"
METHODS = ("EmbedStream", "EmbedSparseStream")
PATHS = {f"/tei.v1.Embed/{name}": f"/{SERVICE}/{name}" for name in METHODS}  # of the stream, and of its packed form
UNARY_PATHS = {stream: path.removesuffix("Stream") for stream, path in PATHS.items()}  # likewise, for one message
# Of one message. What is answered is told by the message, so a message has no more to compute than one long text.
MOST_MESSAGES, MOST_BYTES = 32, 2048


def pack(messages: Iterable[bytes]) -> bytes:
    """A serialized `Packed`."""
    return b"".join(length_delimited(1, message) for message in messages)


def unpack(raw: bytes) -> Sequence[bytes]:
    """The messages of a `Packed`. Raises: google.protobuf.message.DecodeError."""
    return Packed.FromString(raw).messages


def packed(messages: Sequence[bytes]) -> Iterator[bytes]:
    """All of them, as few as possible together in each; a long one is alone."""
    begin, size = 0, 0
    for at, message in enumerate(messages):
        if at > begin and (at - begin == MOST_MESSAGES or size + len(message) > MOST_BYTES):
            yield pack(messages[begin:at])
            begin, size = at, 0
        size += len(message)
    if messages:
        yield pack(messages[begin:])
