"""The gateway described as OpenAPI 3.1: what `/openapi.json` and `/docs` show, and what the tests hold it to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from appliance import __version__
from appliance.core import access
from appliance.core import fields as check
from appliance.core.fields import Schema
from appliance.gateway import cohere_embed, quantized, shapes

JSON = "application/json"


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def record(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def maybe(schema: Schema) -> Schema:
    """That, or null."""
    if "enum" in schema:
        return schema | {"enum": [*schema["enum"], None]}
    return schema | {"type": [schema["type"], "null"]}


STRING: Schema = shapes.string.schema
NUMBER: Schema = {"type": "number"}  # never null: what is no number is refused (`gateway/multiplexer_replies.py`)
WHOLE: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = check.boolean.schema
MODEL: Schema = maybe(STRING) | {
    "description": "An instance's name or a model id; not needed for the only instance",
}
INPUT: Schema = shapes.INPUTS_SCHEMA | {
    "description": "A text, the ids of its tokens, or a list of such. Ids become the text that they spell, which the "
    "answer says in the header X-TEI-Token-Ids; an instance with token_ids = refuse takes none",
}
ENCODING = {
    "truncate": maybe(FLAG),
    "truncation_direction": shapes.DIRECTION.schema | {"default": "right"},
    "prompt_name": maybe(STRING),
}
WITHOUT_PROMPT = {name: schema for name, schema in ENCODING.items() if name != "prompt_name"}
PREDICTIONS = array(record(("score", "label"), score=NUMBER, label=STRING))
DOCUMENT = {"anyOf": [shapes.TEXT_SCHEMA, record(("text",), text=shapes.TEXT_SCHEMA)]}

SCHEMAS: dict[str, Schema] = {
    "OpenAIError": record(
        ("error",),
        error=record(("message", "type", "code"), message=STRING, type=STRING, param=maybe(STRING), code=maybe(STRING)),
        detail=STRING,
    ),
    "CohereError": record(("message",), id=STRING, message=STRING, detail=STRING),
    "OllamaError": record(("error",), error=STRING),
    "TEIError": record(("error", "error_type"), error=STRING, error_type=STRING),
    "EmbeddingsRequest": record(
        ("input",),
        input=INPUT,
        model=MODEL,
        encoding_format=maybe(shapes.ENCODING_FORMAT.schema) | {"default": "float"},
        dimensions=maybe(shapes.DIMENSIONS.schema),
        user=maybe(STRING),
    ),
    "Embeddings": record(
        ("object", "data", "model", "usage"),
        object={"const": "list"},
        data=array(
            record(
                ("object", "embedding", "index"),
                object={"const": "embedding"},
                embedding={"anyOf": [array(NUMBER), STRING]},
                index=WHOLE,
            )
        ),
        model=STRING,
        usage=record(("prompt_tokens", "total_tokens"), prompt_tokens=WHOLE, total_tokens=WHOLE),
    ),
    "Model": record(
        ("id", "object"), id=STRING, object={"const": "model"}, created=WHOLE, owned_by=STRING, root=STRING
    ),
    "Models": record(("object", "data"), object={"const": "list"}, data=array(ref("Model"))),
    "CohereRerankRequest": record(
        ("query", "documents"),
        model=MODEL,
        query=STRING,
        documents=shapes.TEXTS_SCHEMA | {"items": DOCUMENT},
        top_n=maybe(shapes.TOP_N.schema),
        return_documents=maybe(FLAG),
        rank_fields=maybe(shapes.strings.schema),
    ),
    "CohereRerank": record(
        ("id", "results"),
        id=STRING,
        model=STRING,
        results=array(record(("index", "relevance_score"), index=WHOLE, relevance_score=NUMBER)),
        meta=record(),
        usage=record(),
    ),
    "CohereEmbedRequest": record(
        ("texts",),
        texts=shapes.TEXTS_SCHEMA,
        model=MODEL,
        input_type=maybe(cohere_embed.INPUT_TYPE.schema),
        embedding_types=maybe(array(quantized.EMBEDDING_TYPE.schema)),
        truncate=maybe(cohere_embed.TRUNCATE.schema),
        output_dimension=maybe(shapes.DIMENSIONS.schema),
    ),
    "CohereEmbed": record(
        ("id", "embeddings", "texts", "response_type"),
        id=STRING,
        embeddings={"anyOf": [array(array(NUMBER)), record()]},
        texts=array(STRING),
        meta=record(),
        response_type=STRING,
    ),
    "ScoreRequest": record(
        ("text_1", "text_2"),
        text_1={"anyOf": [shapes.TEXT_SCHEMA, shapes.TEXTS_SCHEMA]},
        text_2={"anyOf": [shapes.TEXT_SCHEMA, shapes.TEXTS_SCHEMA]},
        model=MODEL,
    ),
    "Scores": record(
        ("object", "data"), object={"const": "list"}, data=array(record(("index", "score"), index=WHOLE, score=NUMBER))
    ),
    "Pooled": record(
        ("object", "data"),
        object={"const": "list"},
        data=array(record(("index", "data"), index=WHOLE, data={"anyOf": [array(NUMBER), STRING]})),
    ),
    "OllamaEmbedRequest": record(
        ("model", "input"), model=STRING, input=INPUT, truncate=maybe(FLAG), dimensions=maybe(shapes.DIMENSIONS.schema)
    ),
    "OllamaEmbed": record(
        ("model", "embeddings"), model=STRING, embeddings=array(array(NUMBER)), prompt_eval_count=WHOLE
    ),
    "OllamaPrompt": record(("model", "prompt"), model=STRING, prompt=shapes.TEXT_SCHEMA),
    "OllamaVector": record(("embedding",), embedding=array(NUMBER)),
    "OllamaTags": record(("models",), models=array(record(("name", "model"), name=STRING, model=STRING, size=WHOLE))),
    "VertexRequest": record(("instances",), instances=array({"type": "object"})),
    "Vertex": record(("predictions",), predictions=array({})),
    "EmbedRequest": record(
        ("inputs",),
        inputs=INPUT,
        model=MODEL,
        normalize={**FLAG, "default": True},
        dimensions=maybe(shapes.DIMENSIONS.schema),
        **ENCODING,
    ),
    "EncodeRequest": record(("inputs",), inputs=INPUT, model=MODEL, **ENCODING),
    "PredictRequest": record(
        ("inputs",),
        inputs={"anyOf": [shapes.TEXT_SCHEMA, shapes.PAIR_SCHEMA, shapes.TEXTS_SCHEMA | {"items": shapes.PAIR_SCHEMA}]},
        model=MODEL,
        raw_scores=FLAG,
        **WITHOUT_PROMPT,
    ),
    "RerankRequest": record(
        ("query", "texts"),
        query=STRING,
        texts=shapes.TEXTS_SCHEMA | {"items": STRING},
        model=MODEL,
        raw_scores=FLAG,
        return_text=FLAG,
        **WITHOUT_PROMPT,
    ),
    "SimilarityRequest": record(
        ("inputs",),
        inputs=record(
            ("source_sentence", "sentences"),
            source_sentence=shapes.TEXT_SCHEMA,
            sentences=shapes.TEXTS_SCHEMA | {"maxItems": shapes.MOST_TEXTS - 1},  # with the source as many as elsewhere
        ),
        parameters={"type": ["object", "null"], "properties": ENCODING},
        model=MODEL,
    ),
    "TokenizeRequest": record(
        ("inputs",),
        inputs={"anyOf": [shapes.TEXT_SCHEMA, shapes.TEXTS_SCHEMA]},
        add_special_tokens={**FLAG, "default": True},
        prompt_name=maybe(STRING),
        model=MODEL,
    ),
    "DecodeRequest": record(
        ("ids",),
        ids={"anyOf": [shapes.IDS_SCHEMA, shapes.TEXTS_SCHEMA | {"items": shapes.IDS_SCHEMA}]},
        skip_special_tokens={**FLAG, "default": True},
        model=MODEL,
    ),
    "Info": record(("model_id", "model_type", "max_input_length"), model_id=STRING, max_input_length=WHOLE),
    "Vectors": array(array(NUMBER)),
    "TokenVectors": array(array(array(NUMBER))),
    "SparseVectors": array(array(record(("index", "value"), index=WHOLE, value=NUMBER))),
    "Predictions": {"anyOf": [PREDICTIONS, array(PREDICTIONS)]},
    "Ranks": array(record(("index", "score"), index=WHOLE, text=STRING, score=NUMBER)),
    "Similarities": array(NUMBER),
    "Tokens": array(
        array(
            record(
                ("id", "text", "special"),
                id=WHOLE,
                text=STRING,
                special=FLAG,
                start={"type": ["integer", "null"]},
                stop={"type": ["integer", "null"]},
            )
        )
    ),
    "Texts": array(STRING),
}


class HttpOperation(NamedTuple):
    """A route in words. request, reply: the names of their schemas; None for what has no body."""

    method: str
    summary: str
    request: str | None
    reply: str | None


EXAMPLES: dict[str, Any] = {
    "EmbeddingsRequest": {"input": ["hello world", "bonjour"]},
    "CohereRerankRequest": {"query": "capital of France", "documents": ["Paris", "Berlin"], "top_n": 1},
    "CohereEmbedRequest": {"texts": ["hello world"], "input_type": "search_query", "embedding_types": ["float"]},
    "ScoreRequest": {"text_1": "capital of France", "text_2": ["Paris", "Berlin"]},
    "OllamaEmbedRequest": {"model": "minilm", "input": ["hello world"]},
    "OllamaPrompt": {"model": "minilm", "prompt": "hello world"},
    "VertexRequest": {"instances": [{"inputs": "hello world"}]},
    "EmbedRequest": {"inputs": ["hello world", "bonjour"]},
    "EncodeRequest": {"inputs": "hello world"},
    "PredictRequest": {"inputs": "I like it"},
    "RerankRequest": {"query": "capital of France", "texts": ["Paris", "Berlin"]},
    "SimilarityRequest": {"inputs": {"source_sentence": "hello", "sentences": ["hi", "car"]}},
    "TokenizeRequest": {"inputs": "hello world"},
    "DecodeRequest": {"ids": [101, 7592, 2088, 102]},
}
ERRORS = {
    "OpenAIError": (400, 401, 403, 404, 405, 413, 415, 429, 500, 503, 504),
    "CohereError": (400, 401, 403, 404, 405, 413, 415, 429, 500, 503, 504),
    "OllamaError": (400, 401, 403, 404, 405, 413, 415, 429, 500, 503, 504),
    "TEIError": (400, 401, 403, 404, 405, 413, 415, 422, 424, 429, 500, 503, 504),
}
PLAIN = (400, 413, 415, 422)  # where TEI answers in plain text, too


def document(operations: Iterable[tuple[str, HttpOperation, str]]) -> Schema:
    """operations: (path, what is there, the schema of its errors)."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tei-appliance gateway",
            "version": __version__,
            "description": "Every instance of the box over HTTP. The instance is chosen by the path prefix "
            "/instances/NAME, the header X-TEI-Instance or X-TEI-Model, the field model, or because there is only one.",
        },
        "paths": {path: {operation.method: described(operation, error)} for path, operation, error in operations},
        "components": {"schemas": SCHEMAS, "securitySchemes": access.SCHEMES},
        "security": [{}, *({name: []} for name in access.SCHEMES)],  # keys are asked for where there are any
    }


def described(operation: HttpOperation, error: str) -> Schema:
    responses: Schema = {"200": {"description": "Done"}}
    if operation.reply:
        responses["200"]["content"] = {JSON: {"schema": ref(operation.reply)}}
    for status in ERRORS[error]:
        content = {JSON: {"schema": ref(error)}}
        if error == "TEIError" and status in PLAIN:
            content["text/plain"] = {"schema": STRING}
        responses[str(status)] = {"description": "Refused, with the reason", "content": content}
    description: Schema = {"summary": operation.summary, "responses": responses}
    if operation.request:
        content = {"schema": ref(operation.request), "example": EXAMPLES[operation.request]}
        description["requestBody"] = {"required": True, "content": {JSON: content}}
    return description
