"""LangChain's OpenAI and TEI embeddings. Needs `pip install langchain-openai langchain-huggingface`."""

import os

from huggingface_hub import InferenceClient
from langchain_huggingface import HuggingFaceEndpointEmbeddings
from langchain_openai import OpenAIEmbeddings

GATEWAY = os.environ.get("TEI_GATEWAY", "http://127.0.0.1:9002")
MODEL = os.environ.get("TEI_MODEL", "minilm")
TEXTS = ["hello world", "bonjour le monde"]

openai = OpenAIEmbeddings(
    model=MODEL,
    base_url=f"{GATEWAY}/v1",
    api_key="not needed on loopback",
    check_embedding_ctx_length=False,  # else it sends ids of OpenAI's own tokenizer, which no other model knows
)
print("OpenAI:", [len(vector) for vector in openai.embed_documents(TEXTS)])

# The class takes no URL since 1.2: it is made with any model id, and then given the client that shall ask.
tei = HuggingFaceEndpointEmbeddings(model="sentence-transformers/all-MiniLM-L6-v2")
tei.client = InferenceClient(model=f"{GATEWAY}/instances/{MODEL}")
print("TEI:", [len(vector) for vector in tei.embed_documents(TEXTS)], len(tei.embed_query(TEXTS[0])))
