"""The bodies of the gateway's requests and answers as JSON Schema, which `openapi` puts into its document.

What a field accepts is the schema of its check; what it means stands in `DESCRIPTIONS`.
"""

from __future__ import annotations

from appliance.core import fields as check
from appliance.core.fields import Schema
from appliance.gateway import (
    cohere_embed,
    hybrid,
    image_inputs,
    openai,
    search_rerank,
    shapes,
    unmet_options,
    vector_formats,
)
from appliance.gateway.descriptions import DESCRIPTIONS


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def record(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def with_words(properties: dict[str, Schema]) -> dict[str, Schema]:
    """Fields of a request, each with what it means."""
    return {
        name: {"description": DESCRIPTIONS[name]} | schema if name in DESCRIPTIONS else schema
        for name, schema in properties.items()
    }


def body(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """A request."""
    return record(required, **with_words(properties))


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
    "description": "An instance's name, an alias, or a model id; not needed for the only instance for the task, or the "
    "default",
}
INPUT: Schema = shapes.INPUTS_SCHEMA | {
    "description": "A text, the ids of its tokens, or a list of such. Ids become the text that they spell, which the "
    "answer says in the header X-TEI-Token-Ids; an instance with token_ids = refuse takes none",
}
MIXED: Schema = image_inputs.MIXED_SCHEMA | {
    "description": f"{INPUT['description']}. A model that takes images takes objects, too: an image as base64, a data "
    "URL or a URL of a host in image_url_hosts, or a text",
}
CUT: Schema = {"default": True, "description": "whether a text that is too long is cut, or refused"}
OFF: Schema = {**FLAG, "default": False}
ENCODING = with_words(
    {
        "truncate": maybe(FLAG),
        "truncation_direction": shapes.DIRECTION.schema | {"default": "right"},
        "prompt_name": maybe(STRING),
    }
)
UNMET = {name: maybe(each.schema) for name, each in unmet_options.OF_VLLM.items()}
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
    "PoolingRequest": body(
        ("input",),
        input=INPUT,
        model=MODEL,
        encoding_format=maybe(shapes.ENCODING_FORMAT.schema) | {"default": "float"},
        dimensions=maybe(shapes.DIMENSIONS.schema),
        user=maybe(STRING),
        task=maybe(unmet_options.POOLING_TASK.schema) | {"description": "nothing else is pooled here"},
        normalize=maybe(FLAG) | {"default": True},
        use_activation=maybe(FLAG),
        embed_dtype=maybe(unmet_options.EMBED_DTYPE.schema),
        **UNMET,
    ),
    "EmbeddingsRequest": body(
        ("input",),
        input=MIXED,
        model=MODEL,
        encoding_format=maybe(shapes.ENCODING_FORMAT.schema) | {"default": "float"},
        output_dtype=maybe(vector_formats.OUTPUT_DTYPE.schema) | {"default": "float32"},
        dimensions=maybe(shapes.UINT.schema)
        | {"description": "numbers of each vector, where the model can be cut; all without it, and for 0"},
        input_type=maybe(openai.PURPOSE.schema),
        task=maybe(openai.PURPOSE.schema),
        truncate=maybe(openai.truncation.schema),
        truncation=maybe(openai.truncation.schema),
        normalized=maybe(FLAG) | {"default": True},
        late_chunking=maybe(unmet_options.NO_LATE_CHUNKING.schema),
        return_multivector=maybe(unmet_options.ONE_VECTOR.schema),
        prompt_name=maybe(STRING),
        normalize=maybe(FLAG),
        embed_dtype=maybe(unmet_options.EMBED_DTYPE.schema),
        **UNMET,
        modality=maybe(image_inputs.MODALITY.schema),
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
    "CohereRerankRequest": body(
        ("query", "documents"),
        model=MODEL,
        query=STRING,
        documents=shapes.TEXTS_SCHEMA | {"items": DOCUMENT},
        top_n=maybe(shapes.TOP_N.schema),
        return_documents=maybe(OFF),
        rank_fields=maybe(shapes.strings.schema),
        max_tokens_per_doc=maybe(shapes.UINT.schema),
        max_chunks_per_doc=maybe(shapes.ONE.schema),
    ),
    "CohereRerank": record(
        ("id", "results"),
        id=STRING,
        model=STRING,
        results=array(record(("index", "relevance_score"), index=WHOLE, relevance_score=NUMBER)),
        meta=record(),
        usage=record(),
    ),
    "CohereEmbedRequest": body(
        texts=shapes.TEXTS_SCHEMA,
        images=cohere_embed.IMAGES_SCHEMA,
        inputs=cohere_embed.INPUTS_SCHEMA,
        model=MODEL,
        input_type=maybe(cohere_embed.INPUT_TYPE.schema),
        embedding_types=maybe(array(vector_formats.FORMAT.schema)),
        truncate=maybe(cohere_embed.TRUNCATE.schema)
        | {"default": "END", "description": "the end at which a text that is too long is cut; none: it is refused"},
        output_dimension=maybe(shapes.DIMENSIONS.schema),
        max_tokens=maybe(shapes.UINT.schema),
    )
    | {"oneOf": [{"required": [name]} for name in cohere_embed.CONTENTS]},
    "CohereEmbed": record(
        ("id", "embeddings", "texts", "response_type"),
        id=STRING,
        embeddings={"anyOf": [array(array(NUMBER)), record()]},
        texts=array(STRING),
        meta=record(),
        response_type=STRING,
    ),
    "ScoreRequest": body(
        ("text_1", "text_2"),
        text_1={"anyOf": [shapes.TEXT_SCHEMA, shapes.TEXTS_SCHEMA]},
        text_2={"anyOf": [shapes.TEXT_SCHEMA, shapes.TEXTS_SCHEMA]},
        model=MODEL,
        **UNMET,
    ),
    "Scores": record(
        ("object", "data"), object={"const": "list"}, data=array(record(("index", "score"), index=WHOLE, score=NUMBER))
    ),
    "Pooled": record(
        ("object", "data"),
        object={"const": "list"},
        data=array(record(("index", "data"), index=WHOLE, data={"anyOf": [array(NUMBER), STRING]})),
    ),
    "OllamaEmbedRequest": body(
        ("model", "input"),
        model=STRING,
        input=INPUT,
        truncate=maybe(FLAG) | CUT,
        dimensions=maybe(shapes.DIMENSIONS.schema),
    ),
    "OllamaEmbed": record(
        ("model", "embeddings"), model=STRING, embeddings=array(array(NUMBER)), prompt_eval_count=WHOLE
    ),
    "OllamaPrompt": body(("model", "prompt"), model=STRING, prompt=shapes.TEXT_SCHEMA),
    "OllamaVector": record(("embedding",), embedding=array(NUMBER)),
    "OllamaTags": record(("models",), models=array(record(("name", "model"), name=STRING, model=STRING, size=WHOLE))),
    "VertexRequest": body(("instances",), instances=array({"type": "object"})),
    "Vertex": record(("predictions",), predictions=array({})),
    "EmbedRequest": body(
        ("inputs",),
        inputs=MIXED,
        model=MODEL,
        normalize={**FLAG, "default": True},
        dimensions=maybe(shapes.DIMENSIONS.schema),
        output_dtype=maybe(vector_formats.OUTPUT_DTYPE.schema) | {"default": "float32"},
        **ENCODING,
    ),
    "EncodeRequest": body(("inputs",), inputs=INPUT, model=MODEL, **ENCODING),
    "HybridRequest": body(
        ("inputs",),
        inputs={**shapes.TEXT_SCHEMA, "description": "one text"},
        model=MODEL,
        **{name: hybrid.leg_schema(name) for name in hybrid.OUTPUTS},
        on_error=maybe(hybrid.ON_ERROR.schema) | {"default": "fail"},
        **WITHOUT_PROMPT,
    ),
    "Hybrid": record(
        ("instances", "passes"),
        dense=array(NUMBER),
        sparse=array(record(("index", "value"), index=WHOLE, value=NUMBER)),
        tokens=array(array(NUMBER)),
        instances={"type": "object", "additionalProperties": STRING},
        passes=WHOLE,
        errors={"type": "object", "additionalProperties": record(("code", "message"), code=STRING, message=STRING)},
    ),
    "SearchRerankRequest": body(
        ("query", "candidates"),
        query=STRING,
        candidates=search_rerank.CANDIDATES_SCHEMA,
        model=MODEL,
        **{name: hybrid.leg_schema(name) for name in hybrid.OUTPUTS},
        fusion=maybe(search_rerank.FUSION.schema) | {"default": "rrf"},
        weights=maybe({"type": "object", "additionalProperties": search_rerank.WEIGHT.schema}),
        rerank=search_rerank.RERANK_SCHEMA,
        top_n=maybe(shapes.TOP_N.schema),
        return_text=OFF,
    ),
    "SearchRerank": record(
        ("results", "instances"),
        results=array(record(("index", "score", "parts"), index=WHOLE, score=NUMBER, parts=record())),
        instances={"type": "object", "additionalProperties": STRING},
    ),
    "PredictRequest": body(
        ("inputs",),
        inputs={"anyOf": [shapes.TEXT_SCHEMA, shapes.PAIR_SCHEMA, shapes.TEXTS_SCHEMA | {"items": shapes.PAIR_SCHEMA}]},
        model=MODEL,
        raw_scores=OFF,
        **WITHOUT_PROMPT,
    ),
    "RerankRequest": body(
        ("query", "texts"),
        query=STRING,
        texts=shapes.TEXTS_SCHEMA | {"items": STRING},
        model=MODEL,
        raw_scores=OFF,
        return_text=OFF,
        **WITHOUT_PROMPT,
    ),
    "SimilarityRequest": body(
        ("inputs",),
        inputs={"description": "one text, and those that it is compared with"}
        | body(
            ("source_sentence", "sentences"),
            source_sentence=shapes.TEXT_SCHEMA,
            sentences=shapes.TEXTS_SCHEMA | {"maxItems": shapes.MOST_TEXTS - 1},  # with the source as many as elsewhere
        ),
        parameters={"type": ["object", "null"], "properties": ENCODING},
        model=MODEL,
    ),
    "TokenizeRequest": body(
        ("inputs",),
        inputs={"anyOf": [shapes.TEXT_SCHEMA, shapes.TEXTS_SCHEMA]},
        add_special_tokens={**FLAG, "default": True},
        prompt_name=maybe(STRING),
        model=MODEL,
    ),
    "DecodeRequest": body(
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
