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


def azure(gateway: str, texts: list[str]) -> Any:
    """The deployment is the model of the call, or that of the client; the newest form is OpenAI below /openai."""
    from openai import AzureOpenAI, OpenAI

    account = {"azure_endpoint": gateway, "api_key": "x", "api_version": "2024-10-21"}
    clients = (
        (AzureOpenAI(**account), "minilm"),
        (AzureOpenAI(**account, azure_deployment="minilm"), "text-embedding-3-small"),
        (OpenAI(base_url=f"{gateway}/openai/v1/", api_key="x"), "minilm"),
    )
    replies = [client.embeddings.create(model=model, input=text) for (client, model), text in zip(clients, texts)]
    return [reply.data[0].embedding for reply in replies]


def cohere_v2(gateway: str, texts: list[str]) -> Any:
    import cohere

    client = cohere.ClientV2(api_key="x", base_url=gateway)
    reply = client.rerank(model="reranker", query=texts[0], documents=texts)
    (best,) = client.rerank(model="reranker", query=texts[0], documents=texts, top_n=1).results
    assert best.index == reply.results[0].index
    return [[item.index, item.relevance_score] for item in reply.results]


def cohere_v1(gateway: str, texts: list[str]) -> Any:
    import cohere

    client = cohere.Client(api_key="x", base_url=gateway)
    reply = client.rerank(model="reranker", query=texts[0], documents=texts, return_documents=True)
    assert [item.document.text for item in reply.results] == [texts[item.index] for item in reply.results]
    return [[item.index, item.relevance_score] for item in reply.results]


def cohere_v1_embed(gateway: str, texts: list[str]) -> Any:
    import cohere

    client = cohere.Client(api_key="x", base_url=gateway)
    return client.embed(model="minilm", texts=texts, input_type="search_document").embeddings


def cohere_types(gateway: str, texts: list[str]) -> Any:
    import cohere

    kinds = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    client = cohere.ClientV2(api_key="x", base_url=gateway)
    reply = client.embed(model="minilm", texts=texts, input_type="search_document", embedding_types=kinds)
    short = client.embed(model="minilm", texts=texts, input_type="search_document", output_dimension=64)
    assert [len(row) for row in short.embeddings.float_] == [64] * len(texts)
    return reply.embeddings.model_dump(by_alias=True)


def hub_feature_extraction(gateway: str, texts: list[str]) -> Any:
    from huggingface_hub import InferenceClient

    client = InferenceClient(model=f"{gateway}/instances/minilm")
    return [client.feature_extraction(text)[0].tolist() for text in texts]


def hub_similarity(gateway: str, texts: list[str]) -> Any:
    from huggingface_hub import InferenceClient

    return InferenceClient(model=f"{gateway}/instances/minilm").sentence_similarity(texts[0], other_sentences=texts)


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


def langchain_ollama(gateway: str, texts: list[str]) -> Any:
    """With the look at the list of models, which it may be told to take first."""
    from langchain_ollama import OllamaEmbeddings

    embeddings = OllamaEmbeddings(model="minilm", base_url=gateway, validate_model_on_init=True)
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


def ollama_embed(gateway: str, texts: list[str]) -> Any:
    import ollama

    reply = ollama.Client(host=gateway).embed(model="minilm:latest", input=texts)
    assert reply.prompt_eval_count > 0
    return reply.embeddings


def ollama_others(gateway: str, texts: list[str]) -> Any:
    import ollama

    client = ollama.Client(host=gateway)
    try:
        client.embed(model="nobody", input=texts)
        missing = 200
    except ollama.ResponseError as error:
        missing = error.status_code
    models = {model.model: model.size for model in client.list().models}
    old = [client.embeddings(model="minilm", prompt=text).embedding for text in texts]
    return [missing, models, client.show("minilm").capabilities, old]


def infinity_embed(gateway: str, texts: list[str]) -> Any:
    from infinity_client import Client, models
    from infinity_client.api.default import embeddings

    body = models.OpenAIEmbeddingInputText.from_dict({"model": "minilm", "input": texts})
    return [item.embedding for item in embeddings.sync(client=Client(base_url=gateway), body=body).data]


def infinity_rerank(gateway: str, texts: list[str]) -> Any:
    from infinity_client import Client, models
    from infinity_client.api.default import rerank

    body = models.RerankInput.from_dict({"model": "reranker", "query": texts[0], "documents": texts})
    reply = rerank.sync(client=Client(base_url=gateway), body=body)
    return [[item.index, item.relevance_score] for item in reply.results]


PROGRAMS: dict[str, Callable[[str, list[str]], Any]] = {
    program.__name__: program
    for program in (
        openai_floats,
        openai_default_encoding,
        openai_async,
        openai_errors,
        azure,
        cohere_v2,
        cohere_v1,
        cohere_v1_embed,
        cohere_types,
        hub_feature_extraction,
        hub_similarity,
        langchain_openai,
        langchain_tei,
        langchain_ollama,
        llamaindex_openai,
        llamaindex_tei,
        ollama_embed,
        ollama_others,
        infinity_embed,
        infinity_rerank,
    )
}

if __name__ == "__main__":
    name, gateway, texts = sys.argv[1:]
    print(json.dumps(PROGRAMS[name](gateway, json.loads(texts))))
