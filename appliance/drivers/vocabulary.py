"""The token ids that a model's tokenizer has, read from its tokenizer.json.

The vocab_size of config.json counts the rows of the weights, often padded to a round number, while the tokenizer makes
the text, and silently drops an id that it does not have. The library `tokenizers` is not used: for 250,000 tokens it
takes 750 MB and a second, and this module 2 MB and a quarter of one (a unigram file of 9 MB).
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from appliance.files.signature import Signature

LARGEST_BYTES = 128 * 1024 * 1024  # 17 MB with 250,000 tokens
LARGEST_ID = 2**24
READ = 32  # tokenizers that are remembered: a byte for each id

lock = threading.Lock()  # so that concurrent callers read a file once


class Vocabulary(NamedTuple):
    """known: [largest id + 1] bool, whether the tokenizer has the id. special: the ids of its special tokens, by their
    text."""

    known: np.ndarray
    special: dict[str, int]


def vocabulary_of(folder: Path) -> Vocabulary | None:
    """None when the folder has no readable tokenizer.json."""
    path = folder / "tokenizer.json"
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST_BYTES:
            return None
        with lock:
            return read(str(path), Signature.of_status(status))
    except OSError:
        return None


@lru_cache(READ)
def read(path: str, signature: Signature) -> Vocabulary | None:
    """signature: makes the cache miss when the file has changed."""
    with open(path, "rb") as file:
        raw = file.read(os.fstat(file.fileno()).st_size)
    try:
        tokenizer = orjson.loads(raw)
        ids = list(ids_of(tokenizer))
        special = {token["content"]: token["id"] for token in added(tokenizer) if token.get("special") is True}
    except (ValueError, LookupError, TypeError, AttributeError):
        return None  # it describes no tokenizer
    if not ids or not all(type(one) is int and 0 <= one < LARGEST_ID for one in ids):
        return None
    mask = np.zeros(max(ids) + 1, bool)
    mask[ids] = True
    return Vocabulary(mask, special)


def ids_of(tokenizer: Any) -> Iterable[int]:
    vocabulary = tokenizer["model"]["vocab"]  # token -> id; for unigrams a list, whose indices are the ids
    yield from vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    yield from (token["id"] for token in added(tokenizer))


def added(tokenizer: Any) -> list[Any]:
    return tokenizer.get("added_tokens") or []


def first_unknown(mask: np.ndarray, ids: Sequence[int]) -> int | None:
    """The position of the first id that the tokenizer does not have. mask: see `Vocabulary`."""
    numbers = np.fromiter(ids, np.int64, len(ids))
    valid = numbers < len(mask)
    valid[valid] = mask[numbers[valid]]
    return None if valid.all() else int(np.argmin(valid))
