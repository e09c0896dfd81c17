"""Which ids a tokenizer knows, told by its file alone: as the tokenizer itself says, for each kind of them."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from appliance.drivers.vocabulary import first_unknown, vocabulary_of
from testing.engines import FAMILIES

KINDS = {json.loads(path.read_text())["model"].get("type"): path.parent for path in FAMILIES.glob("*/tokenizer.json")}


def known_ids(folder: Path) -> np.ndarray | None:
    found = vocabulary_of(folder)
    return found.known if found else None


def written(folder: Path, content: Any) -> Path:
    (folder / "tokenizer.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize("kind", sorted(KINDS, key=str))
def test_it_says_what_the_tokenizer_says(kind: str) -> None:
    mask = known_ids(KINDS[kind])
    assert mask is not None
    tokenizer = Tokenizer.from_file(str(KINDS[kind] / "tokenizer.json"))
    asked = range(len(mask) + 10)
    for number in asked:
        assert (first_unknown(mask, [number]) is None) == (tokenizer.id_to_token(number) is not None), number


def test_ids_between_two_that_are_known_may_be_unknown(tmp_path: Path) -> None:
    mask = known_ids(written(tmp_path, {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 9}]}))
    assert mask is not None
    assert first_unknown(mask, [0, 1, 9, 9]) is None
    assert first_unknown(mask, [0, 9, 5, 4]) == 2
    assert first_unknown(mask, [1, 10]) == 1
    assert first_unknown(mask, [2**32 - 1]) == 0


NONE = ["", "{", "[]", "{}", '{"model": {}}', '{"model": {"vocab": {}}}', '{"model": {"vocab": {"a": -1}}}']
NONE += [
    '{"model": {"vocab": {"a": "b"}}}',
    '{"model": {"vocab": {"a": 1e300}}}',
    '{"model": {"vocab": {"a": 99999999999}}}',
]


@pytest.mark.parametrize("text", NONE)
def test_what_is_no_tokenizer_tells_nothing(tmp_path: Path, text: str) -> None:
    assert known_ids(written(tmp_path, text)) is None


def test_a_file_without_end_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to("/dev/zero")
    assert known_ids(tmp_path) is None
    assert known_ids(tmp_path / "nowhere") is None


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    for size in (1, 2):
        vocabulary = {str(number): number for number in range(size)}
        new = written(tmp_path, {"model": {"vocab": vocabulary}})
        os.utime(new / "tokenizer.json", ns=(size, size))
        mask = known_ids(tmp_path)
        assert mask is not None
        assert len(mask) == size


def test_special_tokens_are_told_by_their_text(tmp_path: Path) -> None:
    tokens = [{"id": 7, "content": "[PAD]", "special": True}, {"id": 8, "content": "word", "special": False}]
    found = vocabulary_of(written(tmp_path, {"model": {"vocab": {"a": 0}}, "added_tokens": tokens}))
    assert found
    assert found.special == {"[PAD]": 7}
