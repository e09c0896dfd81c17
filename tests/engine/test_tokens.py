"""Ids back to text: what the tokenizer does not know is said, and not left out."""

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
