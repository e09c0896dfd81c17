"""The code search over an appliance that runs. Run in .venv-demo by tests/gateway/test_clients.py; prints JSON.

python -m tests.examples.code_search_appliance GATEWAY FOLDER ROOM
"""

import json
import sys
from pathlib import Path

from examples.code_search.embedding import Gateway
from examples.code_search.index import Index
from examples.code_search.indexing import update
from examples.code_search.savings import Savings
from examples.code_search.searching import search

QUESTION = "put candidates in order with a cross-encoder"

if __name__ == "__main__":
    url, folder, room = sys.argv[1:]
    index, gateway = Index(room), Gateway(url, "minilm", "reranker")
    name = index.collection(folder, "minilm")
    *_, last = update(index, gateway, Savings(), name, Path(folder))
    found = [
        [hit.entry.path for hit in search(index, gateway, name, QUESTION, limit=3, rerank=rerank).hits]
        for rerank in (False, True)
    ]
    print(json.dumps([last.total, last.written, len(index.keys(name)), *found]))
