"""Write a model of each family with random weights into a folder, large enough to measure its speed.

Run by the benchmarks in their own environment:

    python scripts/random_families.py FOLDER [FAMILY[:LAYERSxWIDTH] ...]
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from sentence_transformers import SentenceTransformer
from sentence_transformers import models as st

sys.path.insert(0, str(Path(__file__).parent.parent))
from scripts.reference_families import FAMILIES

LAYERS, WIDTH = 6, 384
MORE: dict[str, dict[str, Any]] = {
    "modernbert": dict(local_attention=128),
    "deberta-v3": dict(pooler_hidden_size=384, position_buckets=256, max_position_embeddings=512),
    "qwen3": dict(head_dim=64, num_key_value_heads=3),
    "gemma3": dict(head_dim=64, num_key_value_heads=3, sliding_window=512, layer_types=None),
}
MEASURED = ("bert", "modernbert", "nomic", "gte", "jina-v3", "deberta-v3", "qwen3", "gemma3")
POSITIONS = {"bert": 512}


def make(family: str, folder: Path, layers: int = LAYERS, width: int = WIDTH) -> None:
    """Dense, with the mean (decoders: the last token); at most 512 tokens for sentence-transformers, too."""
    heads = dict(num_attention_heads=width // 64, intermediate_size=4 * width)
    sizes = dict(hidden_size=width, num_hidden_layers=layers, **heads)
    kind, tokenizer, small = FAMILIES[family]
    tokens = tokenizer()
    positions = dict(max_position_embeddings=POSITIONS.get(family, 8194))
    config = kind(vocab_size=tokens.get_vocab_size(), **{**small, **sizes, **positions, **MORE.get(family, {})})
    torch.manual_seed(7)
    tf.AutoModel.from_config(config).save_pretrained(folder)
    pad = tokens.id_to_token(config.pad_token_id)
    tf.PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token=pad, model_max_length=512).save_pretrained(folder)
    transformer = st.Transformer(str(folder), max_seq_length=512)
    pooling = st.Pooling(width, pooling_mode="lasttoken" if family == "qwen3" else "mean")
    SentenceTransformer(modules=[transformer, pooling, st.Normalize()], device="cpu").save(str(folder))
    tokens.save(str(folder / "tokenizer.json"))
    limits = folder / "sentence_bert_config.json"  # version 6 keeps it with the tokenizer, where TEI does not look
    limits.write_text(json.dumps({**json.loads(limits.read_text()), "max_seq_length": 512}))


if __name__ == "__main__":
    for name in sys.argv[2:] or MEASURED:
        family, _, size = name.partition(":")
        make(family, Path(sys.argv[1]) / name.replace(":", "-"), *map(int, size.split("x") if size else ()))
