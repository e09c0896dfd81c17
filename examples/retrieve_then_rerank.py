"""Two instances together: a bi-encoder finds candidates fast, a cross-encoder puts them in order.

Needs `pip install requests numpy`, and an instance with a reranker, for example

    appliance instances create reranker BAAI/bge-reranker-base
"""

import os

import numpy as np
import requests

GATEWAY = os.environ.get("TEI_GATEWAY", "http://127.0.0.1:9002")
RETRIEVER = os.environ.get("TEI_MODEL", "minilm")
RERANKER = os.environ.get("TEI_RERANKER", "reranker")
CORPUS = [
    "Paris is the capital and most populous city of France.",
    "The Eiffel Tower was completed in 1889.",
    "Berlin is the capital of Germany.",
    "Photosynthesis turns light into chemical energy.",
    "The Seine flows through Paris into the English Channel.",
    "Mount Everest is the highest mountain above sea level.",
]
QUERY = "What is the capital of France?"
CANDIDATES = 3


def embed(texts: list[str]) -> np.ndarray:
    """[n, width], each of unit length."""
    reply = requests.post(f"{GATEWAY}/instances/{RETRIEVER}/embed", json={"inputs": texts}, timeout=60)
    reply.raise_for_status()
    return np.array(reply.json(), np.float32)


def rerank(query: str, texts: list[str]) -> list[dict]:
    body = {"model": RERANKER, "query": query, "documents": texts}
    reply = requests.post(f"{GATEWAY}/v2/rerank", json=body, timeout=60)
    reply.raise_for_status()
    return reply.json()["results"]


corpus = embed(CORPUS)  # once, kept in your index
similarity = corpus @ embed([QUERY])[0]
candidates = [CORPUS[at] for at in np.argsort(-similarity)[:CANDIDATES]]
print("candidates:", *candidates, sep="\n  ")
for result in rerank(QUERY, candidates):
    print(f"{result['relevance_score']:.3f}  {candidates[result['index']]}")
