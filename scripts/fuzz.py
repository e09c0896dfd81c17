"""Malformed messages to every RPC of a busy multiplexer, and whether anything breaks, hangs or grows.

    python scripts/fuzz.py [messages] [seed] [first]

Valid calls of each RPC are damaged as protobuf, as Arrow IPC, or as HTTP/2, and sent over many connections at once;
message n is the same for the same seed, and ``first`` begins at a later one. Every 20th is left whole, and its answer
must be the right one. Violations: a process that died, a call that outlived its deadline by over 100 ms, an answer that
no request may get (UNKNOWN, INTERNAL, UNAVAILABLE), a traceback in a log, work that goes on when all calls have ended,
a wrong value, over 50 MB of memory that stay. Exit status 1 if there was any. Memory is what a process has for itself:
pages of mapped weights, which the kernel reads when a rare word first comes, are files.
"""

import random
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import lz4.frame
import numpy as np
import psutil
import pyarrow as pa
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hpack import Decoder, Encoder

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from appliance.core.program import MARKER  # noqa: E402
from appliance.drivers import http2, processes  # noqa: E402
from appliance.wire.methods import METHODS, MULTIPLEXER, Method, Shape  # noqa: E402
from appliance.wire.tei.v1 import tei_pb2 as tei  # noqa: E402
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux  # noqa: E402
from appliance.wire.vectors import length_delimited, varint  # noqa: E402
from tests.engine.serving import FAMILIES  # noqa: E402
from tests.multiplexer.arrows import column, ipc  # noqa: E402
from tests.running import RunningAppliance  # noqa: E402
from tests.texts import mixed_texts  # noqa: E402

CLIENTS = 16
DEADLINE_SECS = 10.0
GRACE_SECS = 0.1
AT_ONCE = 200  # calls, as a peer makes them that opens and resets streams (CVE-2023-44487)
WHOLE = 20  # one message in so many is not damaged
GROWTH_MB = 50.0
TIDY_SECS = 12.0  # until our processes have given back what they do not need
WIDE = (
    *(("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500), ("grpc.enable_retries", 0)),
    *(("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)),
)
READERS = ("multiplexer", "minilm", "labels", "ranker", "splade")
STILL_OPEN = "OPEN"
FORBIDDEN = ("UNKNOWN", "INTERNAL", "UNAVAILABLE", "ABORTED", "DATA_LOSS", "UNAUTHENTICATED", STILL_OPEN)
TRACE = "Traceback (most recent call last)"
GRPCS_TRACE = "Invalid encoding on"  # grpc's word on a header that is no text (grpcio 1.85)
MODELS = {"labels": "bert-classify", "ranker": "bert-rerank", "splade": "bert-splade"}
TEXTS = [text for text in mixed_texts(60, seed=11) if len(text) < 90][:16]
LONG_TEXTS = [f"{text} " * 500 for text in TEXTS]  # over every model's limit

NOWHERE = "no such method"
# -- what is damaged: valid requests of every RPC ----------------------------------------------------------------------


@dataclass(frozen=True)
class Rpc:
    """One RPC with requests that it answers. reply: its message type; None where the answer is not compared."""

    name: str
    path: str
    shape: Shape
    valid: tuple[bytes, ...]
    reply: Any = None
    metadata: tuple[tuple[str, str], ...] = ()
    share: float = 1.0
    arrow: bool = False

    def like(self, message: bytes) -> bytes:
        """One that is answered alike: of Arrow requests, every second is a noop, and all are of the same texts."""
        return self.valid[self.valid.index(message) % 2] if self.arrow else message


def inner_requests(name: str, texts: list[str]) -> list[Message]:
    """TEI's own requests for a method of `wire.methods`."""
    base, (one, two, three) = name.removesuffix("Stream"), texts[:3]
    found: dict[str, list[Message]] = {
        "Info": [tei.InfoRequest()],
        "Embed": [tei.EmbedRequest(inputs=one), tei.EmbedRequest(inputs=two, truncate=True, dimensions=64)],
        "EmbedSparse": [tei.EmbedSparseRequest(inputs=one, truncate=True), tei.EmbedSparseRequest(inputs=two)],
        "EmbedAll": [tei.EmbedAllRequest(inputs=one, truncate=True, truncation_direction="TRUNCATION_DIRECTION_LEFT")],
        "Predict": [tei.PredictRequest(inputs=one, raw_scores=True), tei.PredictRequest(inputs=two, truncate=True)],
        "PredictPair": [tei.PredictPairRequest(inputs=[one, two], truncate=True)],
        "Rerank": [tei.RerankRequest(query=one, texts=[two, three, one], return_text=True, truncate=True)],
        "Tokenize": [tei.EncodeRequest(inputs=one, add_special_tokens=True), tei.EncodeRequest(inputs=two)],
        "Decode": [tei.DecodeRequest(ids=[101, 7, 9, 102, 300, 70000], skip_special_tokens=True)],
    }
    if name == "RerankStream":
        return [tei.RerankStreamRequest(query=one, text=text, truncate=True) for text in (two, three)]
    return found[base]


def instance_of(method: Method) -> str:
    return {"Predict": "labels", "Rerank": "ranker"}.get(
        method.service, "splade" if method.name.startswith("EmbedSparse") else "minilm"
    )


def reply_of(name: str) -> Any:
    base = name.removesuffix("Stream")
    return getattr(tei, {"PredictPair": "Predict", "Tokenize": "Encode"}.get(base, base) + "Response")


def rows_of(texts: list[str]) -> list[str | None]:
    return [*texts[:5], None, texts[8], texts[5], "東京 " * 60, texts[0], None, texts[6], texts[7]]


def arrow_requests(request: Any, instance: str, rows: list[str | None]) -> Iterator[bytes]:
    target = mux.Target(instance_name=instance)
    for kind in ("string", "large", "view", "dictionary", "dictionary of views"):
        texts = column(rows, kind.split()[0])
        if kind == "dictionary of views":
            texts = pa.DictionaryArray.from_arrays(texts.indices, texts.dictionary.cast(pa.string_view()))
        for compression in (None, "lz4", "zstd", "frame"):
            table = pa.table({"n": pa.array(range(len(rows))), "text": texts})
            for per_batch in (None, 5):
                raw = ipc(table, compression, per_batch)
                options = {"truncation_direction": "TRUNCATION_DIRECTION_LEFT"} if per_batch else {"noop": True}
                yield request(target=target, arrow_ipc=raw, truncate=True, **options).SerializeToString()


def all_rpcs(texts: list[str]) -> list[Rpc]:
    found = []
    for method in METHODS:
        instance, inner = instance_of(method), inner_requests(method.name, texts)
        target, reply = mux.Target(instance_name=instance).SerializeToString(), reply_of(method.name)
        wrapped = [length_delimited(1, target) + length_delimited(2, each.SerializeToString()) for each in inner]
        found.append(Rpc(method.name, f"/{MULTIPLEXER}/{method.name}", method.shape, tuple(wrapped), reply))
        plain = tuple(each.SerializeToString() for each in inner)
        by_metadata = (("x-tei-instance", instance),)
        name = f"tei.v1 {method.name}"
        found.append(Rpc(name, method.path, method.shape, plain, reply, by_metadata, share=0.5))
    for name, instance in (("EmbedArrow", "minilm"), ("EmbedSparseArrow", "splade")):
        valid = tuple(arrow_requests(getattr(mux, f"{name}Request"), instance, rows_of(texts)))
        reply = getattr(mux, f"{name}Response")
        path = f"/{MULTIPLEXER}/{name}"
        found.append(Rpc(name, path, Shape.UNARY, valid, reply, share=8, arrow=True))
        found.append(Rpc(f"{name}Stream", f"{path}Stream", Shape.STREAM, valid, reply, share=3, arrow=True))
    check, path = health_pb2.HealthCheckRequest(service=MULTIPLEXER).SerializeToString(), "/grpc.health.v1.Health/Check"
    found.append(Rpc("health Check", path, Shape.UNARY, (check,), health_pb2.HealthCheckResponse))
    for version in ("v1", "v1alpha"):
        path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
        asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=MULTIPLEXER).SerializeToString()
        found.append(Rpc(f"reflection {version}", path, Shape.STREAM, (asked,), share=0.5))
    found.append(Rpc(NOWHERE, f"/{MULTIPLEXER}/Embed/../X", Shape.UNARY, (b"",), share=0.5))
    return found


# -- damage to protobuf ------------------------------------------------------------------------------------------------

LIES = (0, 1, 127, 128, 2**14, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
BAD_TEXTS = (
    *(b"\xed\xa0\x80", b"\xc0\x80", b"\xff\xfe\x00", b"\x80" * 9, b"\xf4\x90\x80\x80", b"ok \xe6\x9d", b"\x00" * 50),
    *(b" \t\r\n" * 40, b"a" + "\u0301".encode() * 4000, "\u202e\u2066x".encode(), "🚀".encode() * 3000),
    *(b"word " * 30_000, b"[UNK][CLS][SEP]<s></s>", b"", b"%s%n{0}${jndi:x}\x1b[2J", b"minilm\n", b"../../etc/passwd"),
)
MOST_FIELDS = 300  # that are looked at
Field = tuple[int, int, int]  # where its tag, its content and the next field begin
Damage = Callable[[random.Random, bytes, bytes], bytes]  # (choice, a message, another one)


def number_at(raw: bytes, at: int) -> tuple[int, int]:
    """(a varint, where it ends). Raises: IndexError."""
    value = shift = 0
    while True:
        value |= (raw[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if raw[at - 1] < 0x80:
            return value, at


def fields(raw: bytes) -> list[Field]:
    """The fields of a message, as far as they can be read."""
    found: list[Field] = []
    at = 0
    try:
        while at < len(raw) and len(found) < MOST_FIELDS:
            tag, content = number_at(raw, at)
            if tag & 7 == 2:
                length, content = number_at(raw, content)
                end = content + length
            else:
                end = content + {1: 8, 5: 4}[tag & 7] if tag & 7 else number_at(raw, content)[1]
            if end > len(raw):
                break
            found.append((at, content, end))
            at = end
    except (IndexError, KeyError):
        pass
    return found


def flipped(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    damaged = bytearray(raw or b"\x00")
    for _ in range(choice.choice((1, 1, 2, 8))):
        damaged[choice.randrange(len(damaged))] ^= 1 << choice.randrange(8)
    return bytes(damaged)


def cut(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    return raw[: choice.randrange(len(raw) + 1)]


def spliced(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    return raw[: choice.randrange(len(raw) + 1)] + other[choice.randrange(len(other) + 1) :]


def inserted(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    at = choice.randrange(len(raw) + 1)
    return raw[:at] + choice.randbytes(choice.choice((1, 3, 40, 5000))) + raw[at:]


def lied(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    """One length or number says something else, also with more bytes than a varint may have."""
    found = fields(raw)
    if not found:
        return varint(choice.choice(LIES)) + raw
    begin, content, end = choice.choice(found)
    tag, after = number_at(raw, begin)
    false = choice.choice((*LIES, end - content + 1, max(0, end - content - 1)))
    written = choice.choice((varint(false), varint(false), b"\xff" * 10 + b"\x01", b"\x80" * 12))
    return raw[:after] + written + (raw[content:] if tag & 7 == 2 else raw[end:])


def retagged(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    """Another wire type, or another field number, for one field."""
    found = fields(raw)
    if not found:
        return flipped(choice, raw, other)
    begin = choice.choice(found)[0]
    tag, after = number_at(raw, begin)
    kind = tag & ~7 | choice.randrange(8)
    another = choice.choice((0, 1, 2, 3, 15, 19_000, 2**29 - 1, 2**32)) << 3 | tag & 7
    return raw[:begin] + varint(choice.choice((kind, another))) + raw[after:]


def repeated(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    found = fields(raw)
    if not found:
        return raw + other
    begin, _, end = choice.choice(found)
    times = min(choice.choice((1, 2, 40, 5000)), 300_000 // (end - begin))
    return raw + raw[begin:end] * times


def shuffled(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    """Fields in another order, some missing, some of another message."""
    parts = [raw[begin:end] for begin, _, end in fields(raw)] + [other[begin:end] for begin, _, end in fields(other)]
    return b"".join(choice.sample(parts, choice.randrange(len(parts) + 1)))


def deep(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    depth, number = choice.choice((5, 99, 101, 1000)), choice.choice((1, 2, 7))
    if choice.random() < 0.5:
        return raw + varint(number << 3 | 3) * depth * 20 + varint(number << 3 | 4) * choice.choice((0, depth * 20))
    for _ in range(depth):
        raw = length_delimited(number, raw)
    return raw


def many(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    """One field very often: empty, packed, or unknown."""
    number, count = choice.choice((1, 2, 3, 4, 6, 500)), choice.choice((100, 10_000, 200_000))
    small = choice.choice((b"\x00", b"\x01a", b"\x02\x08\x01"))
    if choice.random() < 0.5:
        return raw + length_delimited(number, choice.choice((b"\x05", b"\xff\x01", b"\xff\xff\xff\xff\x0f")) * count)
    return raw + (varint(number << 3 | 2) + small) * count


def worded(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    """A text that is none, or an odd one, under a right length."""
    found = [each for each in fields(raw) if raw[each[0]] & 7 == 2]
    if not found:
        return length_delimited(1, choice.choice(BAD_TEXTS))
    begin, _, end = choice.choice(found)
    return raw[: number_at(raw, begin)[1]] + varint(len(bad := choice.choice(BAD_TEXTS))) + bad + raw[end:]


def noise(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    return choice.randbytes(choice.choice((0, 1, 2, 30, 3000)))


def within(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    """Damage inside of one field, whose length then fits: what only the replica's own parser sees."""
    found = [each for each in fields(raw) if raw[each[0]] & 7 == 2]
    if not found:
        return flipped(choice, raw, other)
    begin, content, end = choice.choice(found)
    inner = damaged(choice, raw[content:end], other)
    return raw[: number_at(raw, begin)[1]] + varint(len(inner)) + inner + raw[end:]


EVERYWHERE: tuple[Damage, ...] = (flipped, cut, spliced, inserted, lied, retagged, repeated, shuffled, worded, noise)
DAMAGES: tuple[Damage, ...] = (*EVERYWHERE, lied, retagged, deep, many, *(within,) * 8)


def damaged(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    for _ in range(choice.choice((1, 1, 1, 2, 3))):
        raw = choice.choice(DAMAGES)(choice, raw, other)
    return raw[:2_000_000]


# -- damage to Arrow ---------------------------------------------------------------------------------------------------

WORDS = (0, 1, -1, 2, 5, 8, 12, 13, 64, 127, -128, 2**15, 2**31 - 1, -(2**31), 2**32, 2**40, 2**62, 2**63 - 1, -(2**63))
CONTINUES = b"\xff\xff\xff\xff"
Part = tuple[bytes, bytes]  # metadata and body of one message of an IPC stream


def parts_of(raw: bytes) -> list[Part]:
    found, at = [], 0
    reader = pa.ipc.MessageReader.open_stream(pa.py_buffer(raw))
    for message in reader:
        size = int.from_bytes(raw[at + 4 : at + 8], "little")
        body = message.body.size if message.body else 0
        found.append((raw[at + 8 : at + 8 + size], raw[at + 8 + size : at + 8 + size + body]))
        at += 8 + size + body
    return found


def joined(parts: Sequence[Part]) -> bytes:
    return (
        b"".join(CONTINUES + struct.pack("<i", len(about)) + about + body for about, body in parts)
        + CONTINUES
        + bytes(4)
    )


def rewritten(choice: random.Random, raw: bytes, widths: Sequence[int] = (1, 4, 4, 8, 8)) -> bytes:
    """Some aligned numbers of 1, 4 or 8 bytes say something else: counts, offsets, lengths, types, bitmaps."""
    changed = bytearray(raw)
    for _ in range(choice.choice((1, 1, 2, 4)) if len(raw) >= 8 else 0):
        width = choice.choice(widths)
        at = choice.randrange(len(raw) // width) * width
        before = int.from_bytes(raw[at : at + width], "little", signed=True)
        after = choice.choice((*WORDS, before + 1, before - 1, -before, before + 8, before * 2, choice.getrandbits(63)))
        changed[at : at + width] = (after % 2 ** (8 * width)).to_bytes(width, "little")
    return bytes(changed)


def counted(choice: random.Random, about: bytes) -> bytes:
    """The row count says something else wherever it stands, in the batch and in its columns."""
    false = choice.choice((0, 1, 4, 6, 12, 14, 1000, 2**31, 2**40, 2**63 - 1, 2**64 - 1))
    for rows in (len(rows_of(TEXTS)), 5, 3):
        about = about.replace(struct.pack("<q", rows), struct.pack("<Q", false))
    return about


def stream_damaged(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    """One IPC stream with one or two of its messages changed, lost, doubled, or under a false length."""
    parts = parts_of(raw)
    for _ in range(choice.choice((1, 1, 2))):
        at = choice.randrange(len(parts))
        about, body = parts[at]
        match choice.randrange(10):
            case 0 | 1:
                parts[at] = (rewritten(choice, about), body)
            case 2 | 3:
                parts[at] = (about, rewritten(choice, body))
            case 4:
                parts[at] = (about, flipped(choice, body, b""))
            case 5:
                parts = [(counted(choice, about), body) for about, body in parts]
            case 6:  # the plain length in front of a compressed buffer, or its first offsets
                parts[at] = (about, rewritten(choice, body[:64], (8,)) + body[64:])
            case 7:
                parts = choice.sample(parts, len(parts)) + parts[: choice.randrange(3)]
            case 8:
                parts[at] = choice.choice(((about, body[: len(body) // 2]), (about[:-8], body), (about, body * 2)))
            case 9:
                parts[at] = choice.choice(parts_of(other))
        parts = parts or parts_of(raw)
    made = joined(parts)
    if choice.random() < 0.15:
        at = choice.choice((0, 4, 8))
        made = made[:at] + struct.pack("<i", choice.choice((0, -1, 7, 2**31 - 1, -(2**31)))) + made[at + 4 :]
    return made


def frame_damaged(choice: random.Random, raw: bytes) -> bytes:
    """An LZ4 frame that lies about its content, is cut, is not alone, or has other flags."""
    made = bytearray(lz4.frame.compress(raw, content_checksum=choice.random() < 0.5, store_size=True))
    match choice.randrange(5):
        case 0:
            made[6:14] = struct.pack("<Q", choice.choice(LIES))
        case 1:
            made[choice.randrange(min(16, len(made)))] ^= 1 << choice.randrange(8)
        case 2:
            made[15:19] = struct.pack("<I", choice.choice(LIES) % 2**32)
        case 3:
            made += choice.choice((bytes(made), b"\x50\x2a\x4d\x18\xff\xff\xff\x7f", bytes(90)))
        case 4:
            return flipped(choice, cut(choice, bytes(made), b""), b"")
    return bytes(made)


@cache
def bomb(kind: str) -> bytes:
    """Small streams that are large when expanded: some are refused for that, some for what they would answer."""
    million = 1_000_000
    match kind:
        case "nulls" | "dictionary" | "empty":
            blank = pa.py_buffer(bytes(4 * million + 4))
            valid = pa.py_buffer(bytes(million // 8)) if kind == "nulls" else None
            rows = pa.Array.from_buffers(pa.string(), million, [valid, blank, pa.py_buffer(b"")])
            few = pa.DictionaryArray.from_arrays(np.zeros(million, np.int8), pa.array(["river"]))
            return ipc(pa.table({"text": few if kind == "dictionary" else rows}), "zstd")
        case "one text":
            return ipc(pa.table({"text": ["a" * 50 * million]}), "zstd")
        case "frame":
            return lz4.frame.compress(bytes(400 * million))
    return ipc(pa.table({"text": ["a" * million] * 400}), "zstd" if kind == "many zstd" else "lz4")


BOMBS = ("nulls", "dictionary", "empty", "one text", "frame", "many zstd", "many lz4")
BOMB_SHARE = 0.002
ONE_BOMB = threading.Lock()  # at a time: it is their own size that is measured, not this machine's


def arrow_damaged(choice: random.Random, request: bytes, other: bytes) -> bytes:
    """An Arrow request with a damaged stream in it; some are damaged as protobuf, instead."""
    if choice.random() < 0.1:
        return damaged(choice, request, other)
    (target, raw, *rest), (_, another, *_) = ([each[a:c] for a, _, c in fields(each)] for each in (request, other))
    plain, second = (unframed(part[number_at(part, 1)[1] :]) for part in (raw, another))
    if choice.random() < 0.1:
        made = choice.choice(EVERYWHERE)(choice, plain, second)
    else:
        made = stream_damaged(choice, plain, second)
    if choice.random() < 0.1:
        made = frame_damaged(choice, made)
    return b"".join((target, length_delimited(2, made), *rest))


def unframed(raw: bytes) -> bytes:
    plain: bytes = lz4.frame.decompress(raw) if raw[:4] == b"\x04\x22\x4d\x18" else raw
    return plain


# -- damage to HTTP/2 --------------------------------------------------------------------------------------------------

Frame = tuple[int, int, int, bytes]  # kind, flags, stream, payload
HEADERS = [(":method", "POST"), (":scheme", "http"), (":path", f"/{MULTIPLEXER}/Embed"), (":authority", "localhost")]
HEADERS += [("te", "trailers"), ("content-type", "application/grpc"), ("grpc-timeout", "10S"), ("user-agent", "fuzz")]
ODD_HEADERS = """:path=/ :path=//// :method=GET :method=\0 :scheme=ftp :new=x :status=200 grpc-timeout=-1S te=x x-null=
    grpc-timeout=99999999999999H grpc-timeout=x grpc-timeout=0n content-type=text/html connection=close upgrade=h2c
    grpc-encoding=gzip grpc-encoding=snappy grpc-encoding=identity content-length=7 x-a-bin=%%% X-A=b :path=LONG
    x-tei-instance= x-odd=BREAKx:y x-odd=\0 host=a/b grpc-tags-bin=AA expect=100-continue transfer-encoding=chunked
    x-tei-instance=\xff traceparent=\xc3\x28 authorization=Bearer x-arrow-on-error=nullnull accept=* x-long=LONG"""
HELLOS = (
    *(b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300)),
    *(http2.PREFACE[:-1], http2.PREFACE * 3, http2.PREFACE + bytes(9), http2.PREFACE + b"\xff" * 4000),
)


def conversation(choice: random.Random, message: bytes) -> bytes:
    """All that a peer sends on a connection of its own: a valid call, damaged as HTTP/2."""
    if choice.random() < 0.05:
        return choice.choice(HELLOS)
    headers = list(HEADERS)
    for _ in range(choice.choice((0, 0, 1, 2))):
        name, _, value = choice.choice(ODD_HEADERS.split()).rpartition("=")
        odd = (name, value.replace("LONG", "y" * 20_000).replace("BREAK", "\r\n"))
        headers = [pair for pair in headers if pair[0] != name or choice.random() < 0.3] + [odd]
        if choice.random() < 0.3:
            choice.shuffle(headers)
    block = Encoder().encode(headers, huffman=choice.random() < 0.5)
    prefix = struct.pack(
        ">BI", choice.choice((0, 0, 0, 1, 2, 255)), choice.choice((len(message),) * 4 + (0, 2**31, 2**32 - 1))
    )
    frames: list[Frame] = [(http2.SETTINGS, 0, 0, b"")]
    frames += [(http2.HEADERS, http2.END_HEADERS, 1, block)]
    frames += [(http2.DATA, choice.choice((1, 1, 0)), 1, (prefix + message)[:16384])]
    for _ in range(choice.choice((0, 1, 1, 2))):
        frames = frames_damaged(choice, frames)
    raw = http2.PREFACE + b"".join(http2.frame(*each) for each in frames)
    for _ in range(choice.choice((0, 0, 1))):
        raw = choice.choice((flipped, cut, inserted, lengthened))(choice, raw, b"")
    return raw[:1_000_000]


def lengthened(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    """The first frame after the preface says another length."""
    at = len(http2.PREFACE)
    return raw[:at] + choice.randbytes(choice.choice((1, 3))) + raw[at + 3 :]


def frames_damaged(choice: random.Random, frames: list[Frame]) -> list[Frame]:
    at = choice.randrange(len(frames))
    kind, flags, stream, payload = frames[at]
    call, block = frames[: at + 1], next((each[3] for each in frames if each[0] == http2.HEADERS), b"")
    more: list[Frame] = []
    match choice.randrange(12):
        case 0:
            frames[at] = (choice.randrange(256), flags, stream, payload)
        case 1:
            frames[at] = (kind, choice.randrange(256), stream, payload)
        case 2:
            frames[at] = (kind, flags, choice.choice((0, 2, 3, 2**31 - 1, 2**32 - 1)), payload)
        case 3:
            frames[at] = (kind, flags, stream, flipped(choice, payload, b""))
        case 4:
            more = [(http2.PING, 0, 0, bytes(choice.choice((8, 8, 7))))] * choice.choice((1, 1000))
        case 5:
            settings = struct.pack(">HI", choice.randrange(1, 9), choice.choice(LIES) % 2**32)
            more = [(http2.SETTINGS, 0, 0, settings[: choice.choice((6, 6, 5))])] * choice.choice((1, 500))
        case 6:
            for each in range(3, 2 * AT_ONCE, 2):
                more += [(http2.HEADERS, http2.END_HEADERS, each, block), (http2.RST_STREAM, 0, each, bytes(4))]
        case 7:  # continuation flood (CVE-2024-27919)
            more = [(http2.HEADERS, 0, 5, block)] + [(http2.CONTINUATION, 0, 5, b"\x00\x01a\x7f" + b"b" * 127)] * 500
        case 8:
            grant = struct.pack(">I", choice.choice((0, 1, 2**31 - 1)))
            more = [(http2.WINDOW_UPDATE, 0, choice.choice((0, 1, 9)), grant)] * choice.choice((1, 200))
        case 9:
            more = [(http2.GOAWAY, 0, 0, bytes(8)), (5, 4, 1, bytes(4) + block), (2, 0, 1, b"\x80\x00\x00\x01\xff")]
        case 10:
            more = [(http2.DATA, 0, 1, choice.choice((b"", bytes(16384))))] * choice.choice((3, 60))
        case 11:
            more = [(http2.HEADERS, http2.END_HEADERS | 1, 1, block), (http2.RST_STREAM, 0, 1, bytes(4))]
    return call + more + frames[at + 1 :]


def listened(raw: bytes, port: int, listen_secs: float) -> tuple[str, str]:
    """Send it all, listen for a while, end our side, and wait until the server has ended its own: (code, details)."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_SECS) as connection:
        try:
            connection.sendall(raw)
            connection.settimeout(listen_secs)
            while b"grpc-status" not in found and (chunk := connection.recv(65536)):
                found += chunk
        except (TimeoutError, ConnectionError):
            pass
        try:
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(DEADLINE_SECS + GRACE_SECS)
            while chunk := connection.recv(65536):
                found += chunk
        except TimeoutError:
            return STILL_OPEN, "the server did not end the connection that we had ended"
        except OSError:
            pass  # reset
    return said(found)


def said(found: bytes) -> tuple[str, str]:
    """(the status of the first call that ended, else RESET, GOAWAY or closed; the server's words)."""
    at, decoder, word = 0, Decoder(), "closed"
    while len(found) - at >= 9:
        end = at + 9 + int.from_bytes(found[at : at + 3], "big")
        if found[at + 3] == http2.HEADERS and end <= len(found):
            block = decoder.decode(http2.unpadded(found[at + 4], found[at + 9 : end]), raw=True)
            headers = {bytes(key): bytes(value) for key, value in block}
            if status := headers.get(b"grpc-status"):
                code = next(code for code in grpc.StatusCode if code.value[0] == int(status))
                return code.name, headers.get(b"grpc-message", b"").decode(errors="replace")
        if word == "closed":
            word = {http2.RST_STREAM: "RESET", http2.GOAWAY: "GOAWAY"}.get(found[at + 3], word)
        at = end
    return word, ""


# -- sending -----------------------------------------------------------------------------------------------------------

RPCS = all_rpcs(TEXTS)
CONNECTIONS = "HTTP/2 bytes"
ODD_METADATA = """x-tei-instance= x-tei-instance=splade x-tei-model=no/such x-arrow-on-error=Null traceparent=00-zz
    connection=close authorization=Bearer host=elsewhere content-length=3 te=gzip x-odd=~~~~ x-tei-instance=LONG
    transfer-encoding=chunked upgrade=h2c expect=100-continue trailer=x x-a-bin=BYTES"""


@dataclass(frozen=True)
class Sent:
    """One call: what goes to which RPC, and how it is made."""

    rpc: Rpc | None  # None: `messages` is all that is sent on a connection of its own
    messages: tuple[bytes, ...]
    metadata: tuple[tuple[str, Any], ...] = ()
    whole: bool = False
    cancel: bool = False
    bomb: bool = False
    listen_secs: float = 0.0


def made(seed: int, number: int) -> Sent:
    """Message ``number``: always the same for the same seed."""
    choice = random.Random(f"{seed}/{number}")
    whole = number % WHOLE == 0
    if not whole and choice.random() < 0.12:
        rpc = choice.choice(RPCS[:8])
        raw = conversation(choice, choice.choice((rpc.valid[0], damaged(choice, rpc.valid[0], rpc.valid[0]))))
        return Sent(None, (raw,), listen_secs=choice.choice((0.001, 0.05, 0.3)))
    rpc = choice.choices(RPCS, [each.share for each in RPCS])[0]
    if whole and rpc.name != NOWHERE:
        count = 1 if rpc.shape is Shape.UNARY else len(rpc.valid) if rpc.shape is Shape.GATHER else 2
        messages = rpc.valid if count == len(rpc.valid) else tuple(choice.choices(rpc.valid, k=count))
        return Sent(rpc, messages, rpc.metadata, whole=True)
    if rpc.arrow and choice.random() < BOMB_SHARE:
        request = choice.choice(rpc.valid)
        begin, _, end = fields(request)[1]  # arrow_ipc
        raw = request[:begin] + length_delimited(2, bomb(choice.choice(BOMBS))) + request[end:]
        return Sent(rpc, (raw,), rpc.metadata, bomb=True)
    damage = arrow_damaged if rpc.arrow else damaged
    count = 1 if rpc.shape is Shape.UNARY else choice.choice((0, 1, 1, 2, 3, 6))
    bad = choice.randrange(count or 1)
    messages = tuple(
        damage(choice, choice.choice(rpc.valid), choice.choice(rpc.valid))
        if at == bad or choice.random() < 0.2
        else choice.choice(rpc.valid)
        for at in range(count)
    )
    metadata: tuple[tuple[str, Any], ...] = rpc.metadata
    if choice.random() < 0.1:
        name, _, value = choice.choice(ODD_METADATA.split()).partition("=")
        metadata += ((name, bytes(range(256)) if value == "BYTES" else value.replace("LONG", "m" * 5000)),)
    if rpc.arrow and choice.random() < 0.3:
        metadata += (("x-arrow-on-error", "null"),)
    return Sent(rpc, messages, metadata, cancel=rpc.shape is Shape.STREAM and choice.random() < 0.05)


def called(channel: grpc.Channel, sent: Sent) -> list[bytes]:
    """The replies. Raises: grpc.RpcError."""
    assert sent.rpc is not None
    many_requests, many_replies = sent.rpc.shape is not Shape.UNARY, sent.rpc.shape is Shape.STREAM
    sides = ("stream" if many_requests else "unary", "stream" if many_replies else "unary")
    start = getattr(channel, "_".join(sides))(sent.rpc.path)
    options = {"timeout": DEADLINE_SECS, "metadata": sent.metadata}
    if not many_replies:
        return [start(iter(sent.messages) if many_requests else sent.messages[0], **options)]
    replies, found = start(iter(sent.messages), **options), []
    for reply in replies:
        found.append(reply)
        if sent.cancel:
            replies.cancel()
    return found


def told(message: Message) -> list[Any]:
    """The numbers and texts of a reply, without its times."""
    found: list[Any] = []
    for about, value in message.ListFields():
        if about.name == "arrow_ipc":
            with pa.ipc.open_stream(value) as reader:
                found += [each for rows in reader.read_all().to_pydict().values() for each in flat(rows)]
        elif about.name != "metadata":
            found += flat(value)
    return found


def flat(value: Any) -> Iterator[Any]:
    if isinstance(value, Message):
        yield from told(value)
    elif isinstance(value, dict):
        yield from flat(list(value.values()))
    elif isinstance(value, str | bytes | int | float) or value is None:
        yield value
    else:
        for each in value:
            yield from flat(each)


def near(one: Any, other: Any) -> bool:
    return abs(one - other) < 1e-3 if isinstance(one, float) and isinstance(other, float) else bool(one == other)


@dataclass
class Tally:
    """What came of all calls. Filled by several threads."""

    answers: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    slowest: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    examples: dict[tuple[str, str], str] = field(default_factory=dict)  # the first of (RPC, code)
    violations: list[str] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)  # messages that nobody answered
    compared: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, number: int, sent: Sent, code: str, seconds: float, details: str) -> None:
        name = sent.rpc.name if sent.rpc else CONNECTIONS
        details = " ".join(details.split())[:300]
        with self.lock:
            self.answers[name][code] += 1
            self.slowest[name] = max(self.slowest[name], seconds)
            self.examples.setdefault((name, code), f"message {number}: {details}")
            if code == "UNAVAILABLE" and sent.rpc:
                self.lost.append(number)
            if seconds > DEADLINE_SECS + GRACE_SECS:
                self.violations.append(f"message {number} to {name} took {seconds:.2f} s: {code} {details}")
            if sent.whole and code != "OK":
                self.violations.append(f"message {number} to {name} is valid, and was refused: {code} {details}")

    def compare(self, number: int, name: str, found: list[Any], right: list[Any]) -> None:
        same = len(found) == len(right) and all(map(near, found, right))
        with self.lock:
            self.compared += 1
            if not same:
                self.violations.append(f"message {number} to {name} is valid, and was answered with other values")

    def forbidden(self) -> Iterator[str]:
        for (name, code), example in sorted(self.examples.items()):
            transports = name == CONNECTIONS and code in ("INTERNAL", "UNAVAILABLE")
            if code in FORBIDDEN and not transports:
                yield f"{self.answers[name][code]} times {code} from {name}, as {example}"

    def table(self) -> None:
        print(f"\n{'RPC':24}  {'messages':>8}  {'slowest ms':>10}  answers")
        for name, codes in sorted(self.answers.items()):
            listed = ", ".join(f"{code} {count}" for code, count in codes.most_common())
            print(f"{name:24}  {codes.total():8}  {self.slowest[name] * 1000:10.0f}  {listed}")
        codes = sum(self.answers.values(), Counter())
        listed = ", ".join(f"{code} {count}" for code, count in codes.most_common())
        print(f"{'all':24}  {codes.total():8}  {max(self.slowest.values()) * 1000:10.0f}  {listed}")


class Client:
    """One connection. right: the values of each valid message, by RPC."""

    def __init__(self, port: int, right: dict[tuple[str, bytes], list[Any]], tally: Tally) -> None:
        self.port, self.right, self.tally = port, right, tally

    def learn(self) -> None:
        """What every valid message is answered with."""
        with grpc.insecure_channel(f"127.0.0.1:{self.port}", WIDE) as channel:
            for rpc in RPCS:
                if rpc.reply:
                    valid = rpc.valid[:2] if rpc.arrow else rpc.valid
                    for key, reply in self.answered(channel, Sent(rpc, valid, rpc.metadata)):
                        self.right[rpc.name, key] = told(reply)

    def stretch(self) -> None:
        """The largest valid calls, and many at once: memory is compared with what the processes need anyway."""
        with grpc.insecure_channel(f"127.0.0.1:{self.port}", WIDE) as channel:
            for rpc in filter(lambda rpc: rpc.reply, all_rpcs(LONG_TEXTS)):
                try:
                    called(channel, Sent(rpc, rpc.valid[1:2] or rpc.valid, rpc.metadata))
                except grpc.RpcError as error:  # no truncation was asked for
                    if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                        raise
            embed = next(rpc for rpc in RPCS if rpc.name == "Embed")
            start = channel.unary_unary(embed.path)
            for call in [start.future(embed.valid[0], timeout=60) for _ in range(AT_ONCE)]:
                call.result()

    def answered(self, channel: grpc.Channel, sent: Sent) -> list[tuple[bytes, Message]]:
        """Every message, or all together where they get one reply, with its reply."""
        assert sent.rpc is not None
        if sent.rpc.shape is Shape.UNARY:
            raw = [called(channel, Sent(sent.rpc, (each,), sent.metadata))[0] for each in sent.messages]
        else:
            raw = called(channel, sent)
        keys = [b"".join(sent.messages)] if sent.rpc.shape is Shape.GATHER else sent.messages
        return [(key, sent.rpc.reply.FromString(each)) for key, each in zip(keys, raw, strict=True)]

    def run(self, seed: int, numbers: Sequence[int]) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{self.port}", WIDE) as channel:
            for number in numbers:
                sent = made(seed, number)
                if sent.bomb:
                    with ONE_BOMB:
                        self.send(channel, number, sent)
                else:
                    self.send(channel, number, sent)

    def send(self, channel: grpc.Channel, number: int, sent: Sent) -> None:
        began, code, details = time.monotonic(), "OK", ""
        found: list[tuple[bytes, Message]] = []
        try:
            if sent.rpc is None:
                code, details = listened(sent.messages[0], self.port, sent.listen_secs)
            elif sent.whole and sent.rpc.reply:
                found = self.answered(channel, sent)
            else:
                called(channel, sent)
        except grpc.RpcError as error:
            code, details = error.code().name, error.details() or ""
        except OSError as error:
            code, details = "UNAVAILABLE", str(error)
        self.tally.note(number, sent, code, time.monotonic() - began, details)
        for key, reply in found:
            assert sent.rpc is not None
            self.tally.compare(number, sent.rpc.name, told(reply), self.right[sent.rpc.name, sent.rpc.like(key)])


# -- watching ----------------------------------------------------------------------------------------------------------


class Watch:
    """The processes of an appliance: which have died, and the memory of those that read what callers send."""

    def __init__(self, running: RunningAppliance, tally: Tally) -> None:
        self.running, self.tally, self.box = running, tally, running.box()
        self.seen = self.pids()
        self.watched = {name: process for name, process in self.seen.items() if name.startswith(READERS)}
        self.before = {name: megabytes(process) for name, process in self.watched.items()}
        self.peak = dict(self.before)
        self.deaths: list[str] = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)

    def pids(self) -> dict[str, psutil.Process]:
        """By name, replica, launch and, for workers of a process, pid."""
        found = {}
        for process, marker in processes.marked(MARKER, f"{self.box}:", except_under=()):
            name = marker.partition(":")[2].replace(":", "-")
            found[f"{name} {process.pid}" if name in found else name] = process
        return found

    def look(self) -> None:
        """Until `ended`: peaks, and who is gone, with the messages that were lost about then."""
        while not self.ended.wait(0.05):
            for name, process in list(self.watched.items()):
                try:
                    self.peak[name] = max(self.peak[name], megabytes(process))
                except psutil.NoSuchProcess:
                    del self.watched[name]
                    time.sleep(0.5)
                    with self.tally.lock:
                        lost = sorted(self.tally.lost[-2 * CLIENTS :])
                    self.deaths.append(f"{name} (process {process.pid}) died; not answered: messages {lost}")
                    time.sleep(5)
                    self.watched |= {name: process for name, process in self.pids().items() if name.startswith(READERS)}

    def stop(self) -> list[str]:
        """What was violated."""
        seconds = self.until_idle()
        time.sleep(TIDY_SECS)
        self.ended.set()
        self.thread.join()
        found = list(self.deaths)
        now = self.pids()
        for name, process in self.seen.items():
            if name not in now or now[name].pid != process.pid:
                found.append(f"{name} was process {process.pid} and is {now[name].pid if name in now else 'gone'}")
        print(f"\n{'memory in MB':24}  {'before':>8}  {'after':>8}  {'peak':>8}  {'files':>8}  {'threads':>8}")
        for name, before in self.before.items():
            if name in now:
                after = megabytes(now[name])
                files = now[name].memory_info().shared / 1e6
                sizes = f"{before:8.1f}  {after:8.1f}  {self.peak[name]:8.1f}  {files:8.1f}"
                print(f"{name:24}  {sizes}  {now[name].num_threads():8}")
                if after - before > GROWTH_MB:
                    found.append(f"{name} has grown by {after - before:.1f} MB")
        print(f"idle {seconds:.1f} s after the last answer")
        if seconds > DEADLINE_SECS:
            found.append(f"work went on for over {seconds:.1f} s after the last answer")
        return found

    def until_idle(self) -> float:
        """Seconds until the readers have stopped computing, at most some more than the deadline."""
        began = time.monotonic()
        while (seconds := time.monotonic() - began) < 2 * DEADLINE_SECS:
            before = sum(busy(process) for process in self.watched.values())
            time.sleep(0.5)
            if sum(busy(process) for process in self.watched.values()) - before < 0.1:
                break
        return seconds


def megabytes(process: psutil.Process) -> float:
    memory = process.memory_info()
    return float(memory.rss - memory.shared) / 1e6


def busy(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def tracebacks(running: RunningAppliance) -> Iterator[str]:
    """From the logs."""
    for path in sorted((running.folder / "logs").glob("*")):
        lines = path.read_text(errors="replace").splitlines()
        found = [at for at, line in enumerate(lines) if TRACE in line and GRPCS_TRACE not in line]
        if found:
            yield f"{len(found)} tracebacks in {path.name}, the first: {' | '.join(lines[found[0] :][:25])[:2000]}"


def wrong_vectors(running: RunningAppliance) -> Iterator[str]:
    """MiniLM against sentence-transformers' own vectors."""
    right = np.load(ROOT / "tests" / "data" / "minilm.npz")["vectors"][:20].astype(np.float32)
    right /= np.linalg.norm(right, axis=1, keepdims=True)
    target, stub = mux.Target(instance_name="minilm"), running.stub()
    for text, wanted in zip(mixed_texts(1000)[:20], right, strict=True):
        request = mux.EmbedRequest(target=target, request=tei.EmbedRequest(inputs=text, truncate=True))
        try:
            found = np.array(stub.Embed(request, timeout=DEADLINE_SECS).embeddings, np.float32)
        except grpc.RpcError as error:
            yield f"a valid Embed at the end: {error.code().name} {error.details()}"
            continue
        if float(found @ wanted) < 0.9999:
            yield f"another vector than sentence-transformers' for {text[:40]!r}"


def main(messages: int, seed: int, first: int) -> int:
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder, RunningAppliance(Path(folder)) as running:
        for name, model in MODELS.items():
            running.create(name, model_id=str(FAMILIES / model), **({"pooling": name} if name == "splade" else {}))
        for name in ("minilm", *MODELS):
            running.wait_ready(name)
        right: dict[tuple[str, bytes], list[Any]] = {}
        clients = [Client(running.grpc_port, right, tally) for _ in range(CLIENTS)]
        clients[0].learn()
        clients[0].stretch()
        time.sleep(TIDY_SECS)
        watch = Watch(running, tally)
        watch.thread.start()
        began = time.monotonic()
        threads = [
            threading.Thread(target=client.run, args=(seed, range(first + at, first + messages, CLIENTS)))
            for at, client in enumerate(clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.monotonic() - began
        tally.table()
        violations = [*watch.stop(), *tally.forbidden(), *tally.violations, *tracebacks(running)]
        violations += wrong_vectors(running)
    print(f"{messages} messages in {took:.0f} s, seed {seed}; {tally.compared} valid replies compared")
    print(f"processes that died: {len(watch.deaths)}")
    for each in violations[:60]:
        print(f"VIOLATED: {each}")
    print(f"violations: {len(violations)}")
    return 1 if violations else 0


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(*(given + [100_000, 7, 0][len(given) :])))
