"""The gateway described as OpenAPI 3.1: what `/openapi.json` and `/docs` show, and what the tests hold it to."""

from __future__ import annotations

from typing import Any

from appliance import __version__
from appliance.core import access

Schema = dict[str, Any]
JSON = "application/json"


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def thing(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


STRING: Schema = {"type": "string"}
TEXT: Schema = {"type": "string", "minLength": 1}
NUMBER: Schema = {"type": "number"}  # never null: what is no number is refused (`gateway/replies.py`)
WHOLE: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
MAYBE_FLAG: Schema = {"type": ["boolean", "null"]}
MAYBE_STRING: Schema = {"type": ["string", "null"]}
MAYBE_WHOLE: Schema = {"type": ["integer", "null"], "minimum": 1, "maximum": 2**32 - 1}
MODEL: Schema = {**MAYBE_STRING, "description": "An instance's name or a model id; not needed for the only instance"}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}, "minItems": 1}
INPUT: Schema = {
    "anyOf": [TEXT, IDS, {"type": "array", "items": {"anyOf": [TEXT, IDS]}, "minItems": 1, "maxItems": 100_000}],
    "description": "A text, the ids of its tokens, or a list of such. Ids become the text that they spell, which the "
    "answer says in the header X-TEI-Token-Ids; an instance with token_ids = refuse takes none",
}
DIRECTION: Schema = {"enum": ["Left", "left", "Right", "right"], "default": "right"}
ENCODING = {"truncate": MAYBE_FLAG, "truncation_direction": DIRECTION, "prompt_name": MAYBE_STRING}
TEXTS = {"type": "array", "items": STRING, "minItems": 1}
PAIR = {"type": "array", "items": STRING, "minItems": 1, "maxItems": 2}
PREDICTIONS = array(thing(("score", "label"), score=NUMBER, label=STRING))
DOCUMENT = {"anyOf": [TEXT, thing(("text",), text=TEXT)]}

SCHEMAS: dict[str, Schema] = {
    "OpenAIError": thing(
        ("error",),
        error=thing(("message", "type", "code"), message=STRING, type=STRING, param=MAYBE_STRING, code=MAYBE_STRING),
    ),
    "CohereError": thing(("message",), id=STRING, message=STRING, detail=STRING),
    "TEIError": thing(("error", "error_type"), error=STRING, error_type=STRING),
    "EmbeddingsRequest": thing(
        ("input",),
        input=INPUT,
        model=MODEL,
        encoding_format={"enum": ["float", "base64", None], "default": "float"},
        dimensions=MAYBE_WHOLE,
        user=MAYBE_STRING,
    ),
    "Embeddings": thing(
        ("object", "data", "model", "usage"),
        object={"const": "list"},
        data=array(
            thing(
                ("object", "embedding", "index"),
                object={"const": "embedding"},
                embedding={"anyOf": [array(NUMBER), STRING]},
                index=WHOLE,
            )
        ),
        model=STRING,
        usage=thing(("prompt_tokens", "total_tokens"), prompt_tokens=WHOLE, total_tokens=WHOLE),
    ),
    "Model": thing(("id", "object"), id=STRING, object={"const": "model"}, created=WHOLE, owned_by=STRING, root=STRING),
    "Models": thing(("object", "data"), object={"const": "list"}, data=array(ref("Model"))),
    "CohereRerankRequest": thing(
        ("query", "documents"),
        model=MODEL,
        query=STRING,
        documents={"type": "array", "items": DOCUMENT, "minItems": 1},
        top_n={"type": ["integer", "null"], "minimum": 1, "maximum": 2**31},
        return_documents=MAYBE_FLAG,
        rank_fields={"type": ["array", "null"], "items": STRING},
    ),
    "CohereRerank": thing(
        ("id", "results"),
        id=STRING,
        model=STRING,
        results=array(thing(("index", "relevance_score"), index=WHOLE, relevance_score=NUMBER)),
        meta=thing(),
        usage=thing(),
    ),
    "EmbedRequest": thing(
        ("inputs",), inputs=INPUT, model=MODEL, normalize={**FLAG, "default": True}, dimensions=MAYBE_WHOLE, **ENCODING
    ),
    "EncodeRequest": thing(("inputs",), inputs=INPUT, model=MODEL, **ENCODING),
    "PredictRequest": thing(
        ("inputs",),
        inputs={"anyOf": [TEXT, PAIR, {"type": "array", "items": PAIR, "minItems": 1}]},
        model=MODEL,
        raw_scores=FLAG,
        truncate=MAYBE_FLAG,
        truncation_direction=DIRECTION,
    ),
    "RerankRequest": thing(
        ("query", "texts"),
        query=STRING,
        texts=TEXTS,
        model=MODEL,
        raw_scores=FLAG,
        return_text=FLAG,
        truncate=MAYBE_FLAG,
        truncation_direction=DIRECTION,
    ),
    "SimilarityRequest": thing(
        ("inputs",),
        inputs=thing(
            ("source_sentence", "sentences"),
            source_sentence=TEXT,
            sentences={"type": "array", "items": TEXT, "minItems": 1},
        ),
        parameters={"type": ["object", "null"], "properties": ENCODING},
        model=MODEL,
    ),
    "TokenizeRequest": thing(
        ("inputs",),
        inputs={"anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1}]},
        add_special_tokens={**FLAG, "default": True},
        prompt_name=MAYBE_STRING,
        model=MODEL,
    ),
    "DecodeRequest": thing(
        ("ids",),
        ids={"anyOf": [IDS, {"type": "array", "items": IDS, "minItems": 1}]},
        skip_special_tokens={**FLAG, "default": True},
        model=MODEL,
    ),
    "Info": thing(("model_id", "model_type", "max_input_length"), model_id=STRING, max_input_length=WHOLE),
    "Vectors": array(array(NUMBER)),
    "TokenVectors": array(array(array(NUMBER))),
    "SparseVectors": array(array(thing(("index", "value"), index=WHOLE, value=NUMBER))),
    "Predictions": {"anyOf": [PREDICTIONS, array(PREDICTIONS)]},
    "Ranks": array(thing(("index", "score"), index=WHOLE, text=STRING, score=NUMBER)),
    "Similarities": array(NUMBER),
    "Tokens": array(
        array(
            thing(
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

# path, method, what it does, request schema, reply schema, error schema
ROUTES = (
    ("/v1/embeddings", "post", "OpenAI: embed texts", "EmbeddingsRequest", "Embeddings", "OpenAIError"),
    ("/v1/models", "get", "OpenAI: the instances", None, "Models", "OpenAIError"),
    ("/v1/rerank", "post", "Cohere and Jina: rank documents", "CohereRerankRequest", "CohereRerank", "CohereError"),
    ("/v2/rerank", "post", "Cohere: rank documents", "CohereRerankRequest", "CohereRerank", "CohereError"),
    ("/embed", "post", "TEI: embed texts", "EmbedRequest", "Vectors", "TEIError"),
    ("/embed_sparse", "post", "TEI: SPLADE vectors", "EncodeRequest", "SparseVectors", "TEIError"),
    ("/embed_all", "post", "TEI: a vector for each token", "EncodeRequest", "TokenVectors", "TEIError"),
    ("/rerank", "post", "TEI: rank texts against a query", "RerankRequest", "Ranks", "TEIError"),
    ("/predict", "post", "TEI: classify texts or pairs", "PredictRequest", "Predictions", "TEIError"),
    ("/similarity", "post", "TEI: cosine of one text to others", "SimilarityRequest", "Similarities", "TEIError"),
    ("/tokenize", "post", "TEI: tokens and their places", "TokenizeRequest", "Tokens", "TEIError"),
    ("/decode", "post", "TEI: the text of token ids", "DecodeRequest", "Texts", "TEIError"),
    ("/info", "get", "TEI: the model and its limits", None, "Info", "TEIError"),
    ("/health", "get", "TEI: whether the instance answers", None, None, "TEIError"),
)
EXAMPLES: dict[str, Any] = {
    "EmbeddingsRequest": {"input": ["hello world", "bonjour"]},
    "CohereRerankRequest": {"query": "capital of France", "documents": ["Paris", "Berlin"], "top_n": 1},
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
    "TEIError": (400, 401, 403, 404, 405, 413, 415, 422, 424, 429, 500, 503, 504),
}
PLAIN = (400, 413, 415, 422)  # where TEI answers in plain text, too


def document() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for path, method, summary, request, reply, error in ROUTES:
        paths.setdefault(path, {})[method] = operation(summary, request, reply, error)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tei-appliance gateway",
            "version": __version__,
            "description": "Every instance of the box over HTTP. The instance is chosen by the path prefix "
            "/instances/NAME, the header X-TEI-Instance or X-TEI-Model, the field model, or because there is only one.",
        },
        "paths": paths,
        "components": {"schemas": SCHEMAS, "securitySchemes": access.SCHEMES},
        "security": [{}, *({name: []} for name in access.SCHEMES)],  # keys are asked for where there are any
    }


def operation(summary: str, request: str | None, reply: str | None, error: str) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "Done"}}}
    if reply:
        found["responses"]["200"]["content"] = {JSON: {"schema": ref(reply)}}
    if request:
        content = {"schema": ref(request), "example": EXAMPLES[request]}
        found["requestBody"] = {"required": True, "content": {JSON: content}}
    for status in ERRORS[error]:
        content = {JSON: {"schema": ref(error)}}
        if error == "TEIError" and status in PLAIN:
            content["text/plain"] = {"schema": STRING}
        found["responses"][str(status)] = {"description": "Refused, with the reason", "content": content}
    return found
