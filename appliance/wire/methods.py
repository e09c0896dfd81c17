"""The RPCs of `TeiMultiplexer` that are TEI's own plus a target: one row each, in three shapes of relay."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

MULTIPLEXER = "tei_multiplexer.v1.TeiMultiplexer"


class Shape(StrEnum):
    UNARY = "unary"  # one request, one reply
    BIDI_STREAMING = "bidi_streaming"  # requests and replies in the same order, one for one
    CLIENT_STREAMING = "client_streaming"  # many requests, one reply


@dataclass(frozen=True)
class Method:
    """One RPC: its name in `TeiMultiplexer`, its shape, and the TEI service that answers it."""

    name: str
    shape: Shape
    service: str
    package: str = "tei.v1"

    @property
    def service_name(self) -> str:
        return f"{self.package}.{self.service}"

    @property
    def path(self) -> str:
        """The path of the method at a replica, where TEI has it under the same name."""
        return f"/{self.service_name}/{self.name}"

    @property
    def snake_name(self) -> str:
        """As the fields and files of protocols are written: embed_sparse."""
        return re.sub(r"(?<!^)([A-Z])", r"_\1", self.name).lower()

    @property
    def needs_request(self) -> bool:
        """Info carries only a target; TEI's InfoRequest is empty."""
        return self.service != "Info"


def pair(name: str, service: str, package: str = "tei.v1") -> tuple[Method, Method]:
    stream = Method(f"{name}Stream", Shape.BIDI_STREAMING, service, package)
    return Method(name, Shape.UNARY, service, package), stream


METHODS: tuple[Method, ...] = (
    Method("Info", Shape.UNARY, "Info"),
    *pair("Embed", "Embed"),
    *pair("EmbedSparse", "Embed"),
    *pair("EmbedAll", "Embed"),
    *pair("Predict", "Predict"),
    *pair("PredictPair", "Predict"),
    Method("Rerank", Shape.UNARY, "Rerank"),
    Method("RerankStream", Shape.CLIENT_STREAMING, "Rerank"),
    *pair("Tokenize", "Tokenize"),
    *pair("Decode", "Tokenize"),
)
# Of the embedded engine: several kinds of vectors in one pass.
HYBRID = Method("EmbedHybrid", Shape.UNARY, "Hybrid", "tei_appliance.v1")
# Of the embedded engine, relayed as TEI's own: vectors of images.
IMAGES = pair("EmbedImage", "Images", "tei_appliance.v1")
SERVICES = tuple(dict.fromkeys(method.service for method in METHODS))
