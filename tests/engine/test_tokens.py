"""Texts to tokens, of which the wanted end stays; and ids back to text, where what is not known is said."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from appliance.core.problems import Kind, Problem
from appliance.drivers.modelfolder import read_card
from appliance.engine.tokens import Tokens
from testing.engines import FAMILIES


@pytest.mark.parametrize("family", ["bert-cls", "roberta-mean", "xlm-roberta-mean"])
def test_an_id_outside_the_vocabulary_is_named_by_its_place(family: str) -> None:
    tokens = Tokens(read_card(FAMILIES / family), 64, None)
    ids = tokens.encode("hello world", truncate=False).ids
    assert tokens.decode(ids, skip_special=True)
    size = tokens.tokenizer.get_vocab_size(with_added_tokens=True)
    assert tokens.decode([size - 1], skip_special=False)
    for number in (size, 2**32 - 1):
        with pytest.raises(Problem, match=f"`ids` has {number} at place {len(ids)}, .* of {size} tokens") as refused:
            tokens.decode([*ids, number, number], skip_special=True)
        assert refused.value.kind is Kind.INVALID


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("words", [100, 50_000], ids=["by tokens", "by letters at first"])
def test_the_end_that_is_not_cut_stays_however_long_a_text_is(words: int, pair: bool) -> None:
    tokens = Tokens(read_card(FAMILIES / "bert-cls"), 64, None)
    text = f"river {'word ' * words}harbour"
    given = ("rain", text) if pair else text
    left, right = (tokens.encode(given, truncate=True, left=left).ids for left in (True, False))
    assert len(left) == len(right) == 64
    ends = [tokens.decode(ids, skip_special=True).replace(" ", "").replace("#", "") for ids in (left, right)]
    assert (ends[0].endswith("harbour"), "river" in ends[0]) == (True, False)
    assert ("river" in ends[1], "harbour" in ends[1]) == (True, False)


BEGIN_ONLY = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
MISTRAL = {"add_eos_token": True, "eos_token": {"content": "</s>"}, "tokenizer_class": "LlamaTokenizer"}


def folder_of(family: str, folder: Path, tokenizer: dict[str, Any], about: dict[str, Any], **config: Any) -> Path:
    shutil.copytree(FAMILIES / family, folder)
    for name, fields in (("tokenizer.json", tokenizer), ("tokenizer_config.json", about), ("config.json", config)):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, **fields}))
    return folder


@pytest.mark.parametrize(
    ("tokenizer", "about", "ends"),
    [
        ({"post_processor": BEGIN_ONLY}, MISTRAL, True),  # as e5-mistral has it
        ({"post_processor": None}, MISTRAL, True),
        ({"post_processor": {"type": "Sequence", "processors": [BYTES, BEGIN_ONLY]}}, MISTRAL, True),
        ({"post_processor": BYTES}, MISTRAL, True),
        ({}, MISTRAL, True),  # it ends each text so by itself
        ({"post_processor": BEGIN_ONLY}, {**MISTRAL, "add_eos_token": False}, False),
        ({"post_processor": BEGIN_ONLY}, {**MISTRAL, "tokenizer_class": "PreTrainedTokenizerFast"}, False),
    ],
)
def test_a_decoder_sees_the_end_of_a_text_once(
    tmp_path: Path, tokenizer: dict[str, Any], about: dict[str, Any], ends: bool
) -> None:
    folder = folder_of("mistral-last", tmp_path / "model", tokenizer, about)
    tokens = Tokens(read_card(folder), 8, None)
    end = tokens.tokenizer.token_to_id("</s>")
    for text in ("a", "word " * 50):
        ids = tokens.encode(text, truncate=True).ids
        assert sum(each == end for each in ids) == int(ends)
        assert (ids[-1] == end) is ends
        assert len(ids) <= 8
    pair = tokens.encode(("a", "b"), truncate=True).ids
    assert (pair[-1] == end) is ends


@pytest.mark.parametrize("repository", ["", "Alibaba-NLP/gte-Qwen2-1.5B-instruct--"], ids=["its own", "trained on"])
def test_gte_qwen2_s_own_code_ends_texts(tmp_path: Path, repository: str) -> None:
    auto = {"auto_map": {"AutoModel": f"{repository}modeling_qwen.Qwen2Model"}}
    added = json.loads((FAMILIES / "qwen2-last/tokenizer.json").read_text())["added_tokens"]
    number = Tokens(read_card(FAMILIES / "qwen2-last"), 8, None).tokenizer.get_vocab_size()
    entry = {**added[0], "id": number, "content": "<|endoftext|>"}
    changes = {"post_processor": None, "added_tokens": [*added, entry]}
    folder = folder_of("qwen2-last", tmp_path / "model", changes, {}, **auto)
    assert Tokens(read_card(folder), 8, None).encode("a", truncate=True).ids[-1] == number
    lacking = folder_of("qwen2-last", tmp_path / "other", {}, {}, **auto)
    with pytest.raises(Problem, match="lacks the token"):
        Tokens(read_card(lacking), 8, None)
