"""Every route of the gateway, once: its path, its resource, its dialect, what its caller needs, its words for OpenAPI.

The router, the access rules, the form of errors and `/openapi.json` read this table. What a method needs is the same on
most paths (`METHOD_NEEDS`); a route that departs from it says what all of its methods need. Each GET is a HEAD, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from falcon.routing import CompiledRouter

from appliance.core.access import Need
from appliance.core.fields import Schema
from appliance.drivers.httpserver import with_head
from appliance.gateway import (
    cohere,
    cohere_embed,
    docs,
    hybrid,
    ollama,
    openai,
    openapi,
    search_rerank,
    tei_cloud,
    tei_dialect,
    tei_embedding,
    tei_info,
    tei_root,
    tei_scoring,
    tei_tokens,
    vllm,
)
from appliance.gateway.openapi import HttpOperation
from appliance.gateway.refusals import ErrorResponse, Refusal
from appliance.gateway.resource import Gateway

METHOD_NEEDS = {"GET": Need.ANY, "HEAD": Need.ANY, "OPTIONS": Need.ANY}
OTHERS_NEED = Need.INFERENCE
DOCS, DOCS_FILES = "/docs", "/docs/{file}"


class Dialect(NamedTuple):
    """How a family of routes writes its errors. error: the name of their schema."""

    render: Callable[[Refusal], ErrorResponse]
    error: str


OPENAI = Dialect(openai.render, "OpenAIError")
COHERE = Dialect(cohere.render, "CohereError")
OLLAMA = Dialect(ollama.render, "OllamaError")
TEI = Dialect(tei_dialect.render, "TEIError")


class HttpRoute(NamedTuple):
    """need: of all its methods, where it is not that of METHOD_NEEDS. operation: None for what OpenAPI leaves out."""

    path: str
    resource: Callable[[Gateway], object]
    dialect: Dialect
    operation: HttpOperation | None = None
    need: Need | None = None


ROUTES: tuple[HttpRoute, ...] = (
    HttpRoute(
        "/v1/embeddings",
        openai.OpenAIEmbeddingsResource,
        OPENAI,
        HttpOperation("post", "OpenAI: embed texts", "EmbeddingsRequest", "Embeddings"),
    ),
    HttpRoute("/embeddings", openai.OpenAIEmbeddingsResource, OPENAI),
    HttpRoute("/openai/deployments/{deployment}/embeddings", openai.OpenAIEmbeddingsResource, OPENAI),
    HttpRoute("/openai/v1/embeddings", openai.OpenAIEmbeddingsResource, OPENAI),
    HttpRoute("/openai/v1/models", openai.OpenAIModelsResource, OPENAI),
    HttpRoute("/openai/models", openai.OpenAIModelsResource, OPENAI),
    HttpRoute("/openai/v1/models/{model:path}", openai.OpenAIModelResource, OPENAI),
    HttpRoute("/openai/models/{model:path}", openai.OpenAIModelResource, OPENAI),
    HttpRoute(
        "/score",
        vllm.ScoreResource,
        OPENAI,
        HttpOperation("post", "vLLM: how well pairs of texts go together", "ScoreRequest", "Scores"),
    ),
    HttpRoute("/v1/score", vllm.ScoreResource, OPENAI),
    HttpRoute(
        "/pooling",
        vllm.PoolingResource,
        OPENAI,
        HttpOperation("post", "vLLM: embed texts", "PoolingRequest", "Pooled"),
    ),
    HttpRoute(
        "/v1/models", openai.OpenAIModelsResource, OPENAI, HttpOperation("get", "OpenAI: the instances", None, "Models")
    ),
    HttpRoute("/v1/models/{model:path}", openai.OpenAIModelResource, OPENAI),
    HttpRoute("/models", openai.OpenAIModelsResource, OPENAI),  # infinity's
    HttpRoute(
        "/v1/rerank",
        partial(cohere.CohereRerankResource, version="1"),
        COHERE,
        HttpOperation("post", "Cohere and Jina: rank documents", "CohereRerankRequest", "CohereRerank"),
    ),
    HttpRoute(
        "/v2/rerank",
        partial(cohere.CohereRerankResource, version="2"),
        COHERE,
        HttpOperation("post", "Cohere: rank documents", "CohereRerankRequest", "CohereRerank"),
    ),
    HttpRoute(
        "/v1/embed",
        partial(cohere_embed.CohereEmbedResource, version="1"),
        COHERE,
        HttpOperation("post", "Cohere: embed texts", "CohereEmbedRequest", "CohereEmbed"),
    ),
    HttpRoute(
        "/v2/embed",
        partial(cohere_embed.CohereEmbedResource, version="2"),
        COHERE,
        HttpOperation("post", "Cohere: embed texts", "CohereEmbedRequest", "CohereEmbed"),
    ),
    HttpRoute(
        "/api/embed",
        ollama.OllamaEmbedResource,
        OLLAMA,
        HttpOperation("post", "Ollama: embed texts", "OllamaEmbedRequest", "OllamaEmbed"),
    ),
    HttpRoute(
        "/api/embeddings",
        ollama.OllamaEmbeddingsResource,
        OLLAMA,
        HttpOperation("post", "Ollama: embed a text", "OllamaPrompt", "OllamaVector"),
    ),
    HttpRoute(
        "/api/tags",
        ollama.OllamaTagsResource,
        OLLAMA,
        HttpOperation("get", "Ollama: the instances", None, "OllamaTags"),
    ),
    HttpRoute("/api/version", ollama.OllamaVersionResource, OLLAMA),
    HttpRoute("/api/ps", ollama.OllamaTagsResource, OLLAMA),
    HttpRoute("/api/show", ollama.OllamaShowResource, OLLAMA),
    HttpRoute("/", tei_root.TeiRootResource, TEI),
    HttpRoute("/invocations", tei_root.TeiRootResource, TEI),
    HttpRoute(
        "/vertex",
        tei_cloud.TeiVertexResource,
        TEI,
        HttpOperation("post", "TEI: several requests at once", "VertexRequest", "Vertex"),
    ),
    HttpRoute("/metrics", tei_cloud.TeiMetricsResource, TEI, None, Need.READ),
    HttpRoute("/ping", tei_info.TeiHealthResource, TEI, None, Need.OPEN),
    HttpRoute(
        "/embed",
        tei_embedding.TeiEmbedResource,
        TEI,
        HttpOperation("post", "TEI: embed texts", "EmbedRequest", "Vectors"),
    ),
    HttpRoute(
        "/embed_sparse",
        tei_embedding.TeiEmbedSparseResource,
        TEI,
        HttpOperation("post", "TEI: SPLADE vectors", "EncodeRequest", "SparseVectors"),
    ),
    HttpRoute(
        "/embed_all",
        tei_embedding.TeiEmbedAllResource,
        TEI,
        HttpOperation("post", "TEI: a vector for each token", "EncodeRequest", "TokenVectors"),
    ),
    HttpRoute(
        "/hybrid",
        hybrid.HybridResource,
        TEI,
        HttpOperation("post", "Dense, sparse and token vectors of one text at once", "HybridRequest", "Hybrid"),
    ),
    HttpRoute(
        "/search-rerank",
        search_rerank.SearchRerankResource,
        TEI,
        HttpOperation(
            "post", "One order of candidates by several scores, with their parts", "SearchRerankRequest", "SearchRerank"
        ),
    ),
    HttpRoute(
        "/rerank",
        tei_scoring.TeiRerankResource,
        TEI,
        HttpOperation("post", "TEI: rank texts against a query", "RerankRequest", "Ranks"),
    ),
    HttpRoute(
        "/predict",
        tei_scoring.TeiPredictResource,
        TEI,
        HttpOperation("post", "TEI: classify texts or pairs", "PredictRequest", "Predictions"),
    ),
    HttpRoute(
        "/similarity",
        tei_embedding.TeiSimilarityResource,
        TEI,
        HttpOperation("post", "TEI: cosine of one text to others", "SimilarityRequest", "Similarities"),
    ),
    HttpRoute(
        "/tokenize",
        tei_tokens.TeiTokenizeResource,
        TEI,
        HttpOperation("post", "TEI: tokens and their places", "TokenizeRequest", "Tokens"),
    ),
    HttpRoute(
        "/decode",
        tei_tokens.TeiDecodeResource,
        TEI,
        HttpOperation("post", "TEI: the text of token ids", "DecodeRequest", "Texts"),
    ),
    HttpRoute(
        "/info", tei_info.TeiInfoResource, TEI, HttpOperation("get", "TEI: the model and its limits", None, "Info")
    ),
    HttpRoute(
        "/health",
        tei_info.TeiHealthResource,
        TEI,
        HttpOperation("get", "TEI: whether the instance answers", None, None),
        Need.OPEN,
    ),
    HttpRoute("/openapi.json", lambda gateway: docs.HttpDescriptionResource(document()), TEI),
    HttpRoute("/api-doc/openapi.json", lambda gateway: docs.HttpDescriptionResource(document()), TEI),
    HttpRoute(DOCS, lambda gateway: docs.DocsPageResource(), TEI),
    HttpRoute(DOCS_FILES, lambda gateway: docs.DocsFileResource(), TEI),
)
BY_PATH = {route.path: route for route in ROUTES}


def document() -> Schema:
    """The OpenAPI document of this table."""
    return openapi.document(
        (route.path, route.operation, route.dialect.error) for route in ROUTES if route.operation is not None
    )


def router(gateway: Gateway) -> CompiledRouter:
    """Falcon's router of this table."""
    paths = CompiledRouter()
    for route in ROUTES:
        paths.add_route(route.path, with_head(route.resource(gateway)))
    return paths


def route_of(paths: CompiledRouter, path: str) -> HttpRoute | None:
    match = paths.find(path)
    return BY_PATH[match[3] or ""] if match else None


def need_of(paths: CompiledRouter, method: str, path: str) -> Need:
    """What a request needs, also one that no route answers. ``paths``: see `router`.

    Asked of the very router that dispatches, which takes //info for /info. Open is a path only as it is written here.
    """
    route = route_of(paths, path)
    if route is None or route.need is None or (route.need is Need.OPEN and path not in BY_PATH):
        return METHOD_NEEDS.get(method, OTHERS_NEED)
    return route.need


def is_public(paths: CompiledRouter, path: str) -> bool:
    """Whether this is the page into which a key is typed, which nobody could get if it took one. It shows what it gets
    with that key, and nothing else."""
    route = route_of(paths, path)
    return route is not None and route.path in (DOCS, DOCS_FILES)


def dialect_of(paths: CompiledRouter, path: str) -> Dialect:
    """The dialect in which errors of a path are written; OpenAI's clients ask for more below /v1 than we have."""
    if route := route_of(paths, path):
        return route.dialect
    return OPENAI if path.startswith("/v1/") else TEI
