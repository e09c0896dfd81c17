"""Every field that the gateway takes is documented with the limits of its check, and no other."""

from typing import Any

import pytest

from appliance.core import fields as check
from appliance.core.fields import Check
from appliance.gateway import cohere_embed, hybrid, image_inputs, openai, search_rerank, shapes, unmet_options
from appliance.gateway.refusals import Refusal
from appliance.gateway.routes import ROUTES
from appliance.gateway.schemas import SCHEMAS
from appliance.gateway.vector_formats import OUTPUT_DTYPE
from tests.core.limits import beyond, within

CHECKS: dict[str, Check] = {
    "model": shapes.string,
    "user": shapes.string,
    "prompt_name": shapes.string,
    "query": shapes.string,
    "rank_fields": shapes.strings,
    "encoding_format": shapes.ENCODING_FORMAT,
    "dimensions": shapes.DIMENSIONS,
    "top_n": shapes.TOP_N,
    "max_tokens": shapes.UINT,
    "max_tokens_per_doc": shapes.UINT,
    "max_chunks_per_doc": shapes.ONE,
    "truncation_direction": shapes.DIRECTION,
    **dict.fromkeys(
        ("truncate", "normalize", "raw_scores", "return_text", "return_documents", "add_special_tokens"), check.boolean
    ),
    "skip_special_tokens": check.boolean,
    "input_type": cohere_embed.INPUT_TYPE,
    "output_dimension": shapes.DIMENSIONS,
    "output_dtype": OUTPUT_DTYPE,
    "on_error": hybrid.ON_ERROR,
    "fusion": search_rerank.FUSION,
    "task": openai.PURPOSE,
    "truncation": openai.truncation,
    "normalized": check.boolean,
    "late_chunking": unmet_options.NO_LATE_CHUNKING,
    "return_multivector": unmet_options.ONE_VECTOR,
    "embed_dtype": unmet_options.EMBED_DTYPE,
    "truncate_prompt_tokens": unmet_options.OF_VLLM["truncate_prompt_tokens"],
    "use_activation": check.boolean,
    "modality": image_inputs.MODALITY,
}
# Where a dialect has other values than the rest.
OTHER_CHECKS: dict[tuple[str, str], Check] = {
    ("CohereEmbedRequest", "truncate"): cohere_embed.TRUNCATE,
    ("EmbeddingsRequest", "truncate"): openai.truncation,
    ("EmbeddingsRequest", "input_type"): openai.PURPOSE,
    ("EmbeddingsRequest", "dimensions"): shapes.UINT,
    ("PoolingRequest", "task"): unmet_options.POOLING_TASK,
    **{
        (body, "add_special_tokens"): unmet_options.OF_VLLM["add_special_tokens"]
        for body in ("EmbeddingsRequest", "PoolingRequest", "ScoreRequest")
    },
}
TEXTS = {
    "input",
    "prompt",
    "text_1",
    "text_2",
    "instances",
    "embedding_types",
    "inputs",
    "texts",
    "images",
    "documents",
    "ids",
    "source_sentence",
    "sentences",
}  # bounded all together
TABLES = {"parameters", "weights"}
EITHER = {"dense", "sparse", "tokens", "rerank", "candidates"}  # true, or options: tests/gateway/test_hybrid.py
REFUSED_LATER = {  # by the engine, which knows the width; by the gateway, which knows how much the model takes
    "dimensions": [0],
    "output_dimension": [0],
    "max_tokens": [0],
    "max_tokens_per_doc": [0],
}


def fields_of(schema: Any) -> list[tuple[str, Any]]:
    """Also of tables within."""
    found = []
    for name, inner in schema["properties"].items():
        found += [(name, inner)] if "properties" not in inner else [*fields_of(inner), (name, inner)]
    return found


REQUESTS = [route.operation.request for route in ROUTES if route.operation and route.operation.request]
FIELDS = [
    (request, name, schema) for request in dict.fromkeys(REQUESTS) for name, schema in fields_of(SCHEMAS[request])
]


def test_every_documented_field_has_a_check() -> None:
    assert {name for _, name, _ in FIELDS} == set(CHECKS) | TEXTS | TABLES | EITHER


@pytest.mark.parametrize(("request_name", "name", "schema"), FIELDS)
def test_a_field_has_the_limits_of_its_check(request_name: str, name: str, schema: Any) -> None:
    if name not in CHECKS:
        return  # texts: below
    kinds = schema.get("type")
    plain = {key: value for key, value in schema.items() if key not in ("description", "default")}
    if isinstance(kinds, list):
        plain["type"] = next(kind for kind in kinds if kind != "null")
    if "enum" in plain:
        plain["enum"] = [value for value in plain["enum"] if value is not None]
    assert plain == OTHER_CHECKS.get((request_name, name), CHECKS[name]).schema


@pytest.mark.parametrize("name", CHECKS)
def test_a_value_is_taken_at_each_limit_and_refused_beyond(name: str) -> None:
    for value in within(CHECKS[name].schema):
        CHECKS[name](value)
    for value in beyond(CHECKS[name].schema):
        if value not in REFUSED_LATER.get(name, []):
            with pytest.raises(ValueError, match="must "):
                CHECKS[name](value)


def test_inputs_are_taken_at_each_limit_and_refused_beyond() -> None:
    for value in within(shapes.INPUTS_SCHEMA):
        assert shapes.inputs({"inputs": value}, "inputs")
    for value in beyond(shapes.INPUTS_SCHEMA):
        with pytest.raises(Refusal):
            shapes.inputs({"inputs": value}, "inputs")
