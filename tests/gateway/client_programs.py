"""What people's programs do, with unmodified clients. Run by test_clients.py in .venv-clients; prints one JSON object.

python client_programs.py PROGRAM GATEWAY TEXTS_JSON
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

MINILM = "sentence-transformers/all-MiniLM-L6-v2"


def openai_floats(gateway: str, texts: list[str]) -> Any:
    from openai import OpenAI

    client = OpenAI(base_url=f"{gateway}/v1", api_key="x")
    reply = client.embeddings.create(model="minilm", input=texts, encoding_format="float")
    assert reply.usage.total_tokens > 0
    return [item.embedding for item in reply.data]


def openai_default_encoding(gateway: str, texts: list[str]) -> Any:
    """Left alone, the client asks for base64 and decodes it."""
    from openai import OpenAI

    reply = OpenAI(base_url=f"{gateway}/v1", api_key="x").embeddings.create(model=MINILM, input=texts)
    return [item.embedding for item in reply.data]


def openai_async(gateway: str, texts: list[str]) -> Any:
    from openai import AsyncOpenAI

    async def ask() -> Any:
        client = AsyncOpenAI(base_url=f"{gateway}/instances/minilm/v1", api_key="x")
        calls = [client.embeddings.create(model="text-embedding-3-small", input=text) for text in texts]
        return [reply.data[0].embedding for reply in await asyncio.gather(*calls)]

    return asyncio.run(ask())


def openai_errors(gateway: str, texts: list[str]) -> Any:
    import openai

    client = openai.OpenAI(base_url=f"{gateway}/v1", api_key="x", max_retries=0)
    found = []
    for arguments in ({"model": "nobody", "input": "a"}, {"model": "minilm", "input": ""}):
        try:
            client.embeddings.create(**arguments)
        except openai.APIStatusError as error:
            found.append([type(error).__name__, error.code])
    return [*found, [model.id for model in client.models.list()], client.models.retrieve("minilm").id]


def cohere_v2(gateway: str, texts: list[str]) -> Any:
    import cohere

    client = cohere.ClientV2(api_key="x", base_url=gateway)
    reply = client.rerank(model="reranker", query=texts[0], documents=texts)
    return sorted([item.index, item.relevance_score] for item in reply.results)


def cohere_v1(gateway: str, texts: list[str]) -> Any:
    import cohere

    client = cohere.Client(api_key="x", base_url=gateway)
    reply = client.rerank(model="reranker", query=texts[0], documents=texts)
    return sorted([item.index, item.relevance_score] for item in reply.results)


def hub_feature_extraction(gateway: str, texts: list[str]) -> Any:
    from huggingface_hub import InferenceClient

    client = InferenceClient(model=f"{gateway}/instances/minilm")
    return [client.feature_extraction(text)[0].tolist() for text in texts]


def langchain_openai(gateway: str, texts: list[str]) -> Any:
    from langchain_openai import OpenAIEmbeddings

    embeddings = OpenAIEmbeddings(
        model="minilm", base_url=f"{gateway}/v1", api_key="x", check_embedding_ctx_length=False
    )
    assert len(embeddings.embed_query(texts[0])) == 384
    return embeddings.embed_documents(texts)


def langchain_tei(gateway: str, texts: list[str]) -> Any:
    from huggingface_hub import InferenceClient
    from langchain_huggingface import HuggingFaceEndpointEmbeddings

    embeddings = HuggingFaceEndpointEmbeddings(model=MINILM)
    embeddings.client = InferenceClient(model=f"{gateway}/instances/minilm")
    assert len(embeddings.embed_query(texts[0])) == 384
    return embeddings.embed_documents(texts)


def llamaindex_openai(gateway: str, texts: list[str]) -> Any:
    from llama_index.embeddings.openai import OpenAIEmbedding

    embeddings = OpenAIEmbedding(model_name="minilm", api_base=f"{gateway}/v1", api_key="x")
    return embeddings.get_text_embedding_batch(texts)


def llamaindex_tei(gateway: str, texts: list[str]) -> Any:
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

    embeddings = TextEmbeddingsInference(
        model_name="minilm", base_url=f"{gateway}/instances/minilm", text_instruction=" ", query_instruction=" "
    )
    return embeddings.get_text_embedding_batch(texts)


PROGRAMS: dict[str, Callable[[str, list[str]], Any]] = {
    program.__name__: program
    for program in (
        openai_floats,
        openai_default_encoding,
        openai_async,
        openai_errors,
        cohere_v2,
        cohere_v1,
        hub_feature_extraction,
        langchain_openai,
        langchain_tei,
        llamaindex_openai,
        llamaindex_tei,
    )
}

if __name__ == "__main__":
    name, gateway, texts = sys.argv[1:]
    print(json.dumps(PROGRAMS[name](gateway, json.loads(texts))))
