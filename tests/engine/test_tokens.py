"""Texts to tokens, of which the wanted end stays; and ids back to text, where what is not known is said."""

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
