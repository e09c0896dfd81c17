"""The token ids that a model's tokenizer knows, from its tokenizer.json.

Not vocab_size of config.json: that counts the rows of the weights, which are often padded to a round number, while text
is made by the tokenizer alone, which drops what it does not know without a word. Not by `tokenizers` itself: of 250,000
tokens it makes 750 MB in a second, and this 2 MB in a quarter of one (a unigram file of 9 MB).
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from appliance.files.signature import Signature

LARGEST_BYTES = 128 * 1024 * 1024  # 17 MB with 250,000 tokens
LARGEST_ID = 2**24
READ = 32  # tokenizers that are remembered: a byte for each id

lock = threading.Lock()  # each is read once, however many ask


def known_ids(folder: Path) -> np.ndarray | None:
    """[largest id + 1] bool, whether the tokenizer has the id; None where the folder does not tell."""
    path = folder / "tokenizer.json"
    try:
        seen = path.stat()
        if not stat.S_ISREG(seen.st_mode) or seen.st_size > LARGEST_BYTES:
            return None
        with lock:
            return read(str(path), Signature.of_status(seen))
    except OSError:
        return None


@lru_cache(READ)
def read(path: str, signature: Signature) -> np.ndarray | None:
    """signature: of the file, so that one that has changed is read again."""
    with open(path, "rb") as file:
        raw = file.read(os.fstat(file.fileno()).st_size)
    try:
        ids = list(ids_of(orjson.loads(raw)))
    except (ValueError, LookupError, TypeError, AttributeError):
        return None  # nothing that a tokenizer could be made from
    if not ids or not all(type(one) is int and 0 <= one < LARGEST_ID for one in ids):
        return None
    known = np.zeros(max(ids) + 1, bool)
    known[ids] = True
    return known


def ids_of(found: Any) -> Iterable[int]:
    vocabulary = found["model"]["vocab"]  # token -> id, but for unigrams, whose places in a list are their ids
    yield from vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    yield from (token["id"] for token in found.get("added_tokens") or [])


def first_unknown(known: np.ndarray, ids: Sequence[int]) -> int | None:
    """The place of the first id that is not known."""
    found = np.fromiter(ids, np.int64, len(ids))
    inside = found < len(known)
    inside[inside] = known[found[inside]]
    return None if inside.all() else int(np.argmin(inside))
