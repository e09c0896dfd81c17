"""The messages of scripts/fuzz.py: valid requests of every RPC, and which of them is damaged how."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from appliance.wire.methods import METHODS, MULTIPLEXER, Method, Shape
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.vectors import length_delimited
from scripts.fuzz_arrow import BOMB_SHARE, BOMBS, ROWS, arrow_damaged, bomb
from scripts.fuzz_http2 import conversation
from scripts.fuzz_protobuf import damaged, fields
from testing.arrows import column, ipc
from testing.texts import mixed_texts

WHOLE = 20  # one message in so many is not damaged
TEXTS = [text for text in mixed_texts(60, seed=11) if len(text) < 90][:16]
LONG_TEXTS = [f"{text} " * 500 for text in TEXTS]  # over every model's limit
NOWHERE = "no such method"


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
    requests: dict[str, list[Message]] = {
        "Info": [tei.InfoRequest()],
        "Embed": [tei.EmbedRequest(inputs=one), tei.EmbedRequest(inputs=two, truncate=True, dimensions=64)],
        "EmbedSparse": [tei.EmbedSparseRequest(inputs=one, truncate=True), tei.EmbedSparseRequest(inputs=two)],
        "EmbedAll": [tei.EmbedAllRequest(inputs=one, truncate=True, truncation_direction="TRUNCATION_DIRECTION_LEFT")],
        "Predict": [tei.PredictRequest(inputs=one, raw_scores=True), tei.PredictRequest(inputs=two, truncate=True)],
        "PredictPair": [tei.PredictPairRequest(inputs=[one, two], truncate=True)],
        "Rerank": [tei.RerankRequest(query=one, texts=[two, three, one], return_text=True, truncate=True)],
        "Tokenize": [tei.EncodeRequest(inputs=one, add_special_tokens=True), tei.EncodeRequest(inputs=two)],
        "Decode": [tei.DecodeRequest(ids=[101, 7, 9, 102, 300], skip_special_tokens=True)],
    }
    if name == "RerankStream":
        return [tei.RerankStreamRequest(query=one, text=text, truncate=True) for text in (two, three)]
    return requests[base]


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
    rpcs = []
    for method in METHODS:
        instance, inner = instance_of(method), inner_requests(method.name, texts)
        target, reply = mux.Target(instance_name=instance).SerializeToString(), reply_of(method.name)
        wrapped = [length_delimited(1, target) + length_delimited(2, each.SerializeToString()) for each in inner]
        rpcs.append(Rpc(method.name, f"/{MULTIPLEXER}/{method.name}", method.shape, tuple(wrapped), reply))
        plain = tuple(each.SerializeToString() for each in inner)
        by_metadata = (("x-tei-instance", instance),)
        name = f"tei.v1 {method.name}"
        rpcs.append(Rpc(name, method.path, method.shape, plain, reply, by_metadata, share=0.5))
    for name, instance in (("EmbedArrow", "minilm"), ("EmbedSparseArrow", "splade"), ("EmbedAllArrow", "minilm")):
        rows = rows_of(texts)
        assert len(rows) == ROWS
        valid = tuple(arrow_requests(getattr(mux, f"{name}Request"), instance, rows))
        reply = getattr(mux, f"{name}Response")
        path = f"/{MULTIPLEXER}/{name}"
        rpcs.append(Rpc(name, path, Shape.UNARY, valid, reply, share=8, arrow=True))
        rpcs.append(Rpc(f"{name}Stream", f"{path}Stream", Shape.BIDI_STREAMING, valid, reply, share=3, arrow=True))
    check, path = health_pb2.HealthCheckRequest(service=MULTIPLEXER).SerializeToString(), "/grpc.health.v1.Health/Check"
    rpcs.append(Rpc("health Check", path, Shape.UNARY, (check,), health_pb2.HealthCheckResponse))
    for version in ("v1", "v1alpha"):
        path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
        asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=MULTIPLEXER).SerializeToString()
        rpcs.append(Rpc(f"reflection {version}", path, Shape.BIDI_STREAMING, (asked,), share=0.5))
    rpcs.append(Rpc(NOWHERE, f"/{MULTIPLEXER}/Embed/../X", Shape.UNARY, (b"",), share=0.5))
    return rpcs


RPCS = all_rpcs(TEXTS)
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


def make_call(seed: int, number: int) -> Sent:
    """Message ``number``: always the same for the same seed."""
    choice = random.Random(f"{seed}/{number}")
    whole = number % WHOLE == 0
    if not whole and choice.random() < 0.12:
        rpc = choice.choice(RPCS[:8])
        raw = conversation(choice, choice.choice((rpc.valid[0], damaged(choice, rpc.valid[0], rpc.valid[0]))))
        return Sent(None, (raw,), listen_secs=choice.choice((0.001, 0.05, 0.3)))
    rpc = choice.choices(RPCS, [each.share for each in RPCS])[0]
    if whole and rpc.name != NOWHERE:
        count = 1 if rpc.shape is Shape.UNARY else len(rpc.valid) if rpc.shape is Shape.CLIENT_STREAMING else 2
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
    return Sent(rpc, messages, metadata, cancel=rpc.shape is Shape.BIDI_STREAMING and choice.random() < 0.05)
