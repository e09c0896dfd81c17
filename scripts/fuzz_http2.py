"""Damage to a call as HTTP/2, for scripts/fuzz.py: frames, headers, and bytes that are no HTTP/2 at all."""

import random
import struct
from typing import NamedTuple

from hpack import Encoder

from appliance.wire import http2
from appliance.wire.methods import MULTIPLEXER
from scripts.fuzz_protobuf import LIES, cut, flipped, inserted

AT_ONCE = 200  # calls, as a peer makes them that opens and resets streams (CVE-2023-44487)
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


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


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
    frames: list[Frame] = [Frame(http2.SETTINGS, 0, 0, b"")]
    frames += [Frame(http2.HEADERS, http2.END_HEADERS, 1, block)]
    frames += [Frame(http2.DATA, choice.choice((1, 1, 0)), 1, (prefix + message)[:16384])]
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
    """One frame changed, or others put behind it."""
    at = choice.randrange(len(frames))
    kind, flags, stream, payload = frames[at]
    call, block = frames[: at + 1], next((frame.payload for frame in frames if frame.kind == http2.HEADERS), b"")
    more: list[Frame] = []
    match choice.randrange(12):
        case 0:
            frames[at] = Frame(choice.randrange(256), flags, stream, payload)
        case 1:
            frames[at] = Frame(kind, choice.randrange(256), stream, payload)
        case 2:
            frames[at] = Frame(kind, flags, choice.choice((0, 2, 3, 2**31 - 1, 2**32 - 1)), payload)
        case 3:
            frames[at] = Frame(kind, flags, stream, flipped(choice, payload, b""))
        case 4:
            more = [Frame(http2.PING, 0, 0, bytes(choice.choice((8, 8, 7))))] * choice.choice((1, 1000))
        case 5:
            settings = struct.pack(">HI", choice.randrange(1, 9), choice.choice(LIES) % 2**32)
            more = [Frame(http2.SETTINGS, 0, 0, settings[: choice.choice((6, 6, 5))])] * choice.choice((1, 500))
        case 6:
            for each in range(3, 2 * AT_ONCE, 2):
                more += [
                    Frame(http2.HEADERS, http2.END_HEADERS, each, block),
                    Frame(http2.RST_STREAM, 0, each, bytes(4)),
                ]
        case 7:  # continuation flood (CVE-2024-27919)
            more = [Frame(http2.HEADERS, 0, 5, block)] + [
                Frame(http2.CONTINUATION, 0, 5, b"\x00\x01a\x7f" + b"b" * 127)
            ] * 500
        case 8:
            grant = struct.pack(">I", choice.choice((0, 1, 2**31 - 1)))
            more = [Frame(http2.WINDOW_UPDATE, 0, choice.choice((0, 1, 9)), grant)] * choice.choice((1, 200))
        case 9:
            more = [
                Frame(http2.GOAWAY, 0, 0, bytes(8)),
                Frame(5, 4, 1, bytes(4) + block),
                Frame(2, 0, 1, b"\x80\x00\x00\x01\xff"),
            ]
        case 10:
            more = [Frame(http2.DATA, 0, 1, choice.choice((b"", bytes(16384))))] * choice.choice((3, 60))
        case 11:
            more = [Frame(http2.HEADERS, http2.END_HEADERS | 1, 1, block), Frame(http2.RST_STREAM, 0, 1, bytes(4))]
    return call + more + frames[at + 1 :]
