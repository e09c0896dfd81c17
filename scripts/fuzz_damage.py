"""Damage to messages, for scripts/fuzz.py: to protobuf, Arrow IPC and HTTP/2; and small ones that expand to large ones.

Each takes a choice (random.Random), a valid message and another one; the same choice does the same damage.
"""

import random
import struct
from collections.abc import Callable, Sequence
from functools import cache

import lz4.frame
import numpy as np
import pyarrow as pa
from hpack import Encoder

from appliance.drivers import http2
from appliance.wire.methods import MULTIPLEXER
from appliance.wire.vectors import length_delimited, varint
from testing.arrows import ipc

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

ROWS = 13  # of a valid request; in batches of 5, the last of which has 3
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
    for rows in (ROWS, 5, 3):
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


AT_ONCE = 200  # calls, as a peer makes them that opens and resets streams (CVE-2023-44487)

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
