"""LlamaIndex's OpenAI and TEI embeddings.

Needs `pip install llama-index-embeddings-openai llama-index-embeddings-text-embeddings-inference`.
"""

import os

from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

GATEWAY = os.environ.get("TEI_GATEWAY", "http://127.0.0.1:9002")
MODEL = os.environ.get("TEI_MODEL", "minilm")
TEXTS = ["hello world", "bonjour le monde"]

openai = OpenAIEmbedding(model_name=MODEL, api_base=f"{GATEWAY}/v1", api_key="not needed on loopback")
print("OpenAI:", [len(vector) for vector in openai.get_text_embedding_batch(TEXTS)])

tei = TextEmbeddingsInference(model_name=MODEL, base_url=f"{GATEWAY}/instances/{MODEL}")
print("TEI:", [len(vector) for vector in tei.get_text_embedding_batch(TEXTS)])
