"""TEI's dialect (TEI 1.9): its error bodies, and the fields that several of its routes share, with TEI's defaults.

The routes are in `tei_embedding`, `tei_scoring`, `tei_tokens`, `tei_info` and `tei_root`. TEI's limit on the number of
texts in one request does not apply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import falcon

from appliance.core import fields as check
from appliance.gateway import responses, shapes
from appliance.gateway.refusals import ErrorForm, ErrorResponse, Reason, Refusal
from appliance.gateway.selection import Selection
from appliance.wire.tei.v1 import tei_pb2 as tei

# Without an error_type TEI answers in plain text, because no handler of its own has run yet.
ERROR_FORMS = {
    Reason.MALFORMED: ErrorForm(400, None),
    Reason.SHAPE: ErrorForm(422, None),
    Reason.MEDIA: ErrorForm(415, None),
    Reason.LARGE: ErrorForm(413, None),
    Reason.EMPTY: ErrorForm(400, "Empty"),
    Reason.VALIDATION: ErrorForm(422, "Validation"),
    Reason.TOKENIZER: ErrorForm(422, "Tokenizer"),
    Reason.TOKEN_IDS: ErrorForm(400, "Validation"),
    Reason.BACKEND: ErrorForm(424, "Backend"),
    Reason.OVERLOADED: ErrorForm(429, "Overloaded"),
    Reason.NOT_FOUND: ErrorForm(404, "NotFound"),
    Reason.NOT_CACHED: ErrorForm(404, "NotCached"),
    Reason.FINGERPRINT: ErrorForm(409, "FingerprintDiffers"),
    Reason.NO_PATH: ErrorForm(404, "NotFound"),
    Reason.METHOD: ErrorForm(405, "MethodNotAllowed"),
    Reason.UNAUTHENTICATED: ErrorForm(401, "Unauthenticated"),
    Reason.FORBIDDEN: ErrorForm(403, "Forbidden"),
    Reason.UNAVAILABLE: ErrorForm(503, "Unhealthy"),
    Reason.TIMEOUT: ErrorForm(504, "Timeout"),
    Reason.INTERNAL: ErrorForm(500, "Internal"),
}


def render(refusal: Refusal) -> ErrorResponse:
    form = ERROR_FORMS[refusal.reason]
    if form.error_type is None:
        return ErrorResponse(form.status, "text/plain; charset=utf-8", refusal.message.encode())
    body = {"error": refusal.message, "error_type": form.error_type}
    return ErrorResponse(form.status, falcon.MEDIA_JSON, responses.dumps(body))


def model_of(body: dict[str, Any]) -> str | None:
    model: str | None = shapes.get(body, "model", shapes.string)
    return model


@dataclass(frozen=True)
class EncodingOptions:
    """How texts become tokens. truncate None: as the instance has it by default."""

    truncate: bool | None
    truncation_direction: int
    prompt_name: str | None

    def message_fields(self) -> dict[str, Any]:
        """The fields of the same names in a request message."""
        return {**self.pair_fields(), "prompt_name": self.prompt_name}

    def pair_fields(self) -> dict[str, Any]:
        """The same for messages that score pairs of texts, which take no prompt."""
        return {"truncate": self.truncate, "truncation_direction": self.truncation_direction}


def encoding_options(body: dict[str, Any], selection: Selection) -> EncodingOptions:
    direction = shapes.get(body, "truncation_direction", shapes.DIRECTION, "right", null=False)
    return EncodingOptions(
        truncate=shapes.get(body, "truncate", check.boolean, selection.auto_truncate),
        truncation_direction=direction_value(direction),
        prompt_name=shapes.get(body, "prompt_name", shapes.string),
    )


def direction_value(direction: str) -> int:
    left = direction.lower() == "left"
    return tei.TRUNCATION_DIRECTION_LEFT if left else tei.TRUNCATION_DIRECTION_RIGHT
