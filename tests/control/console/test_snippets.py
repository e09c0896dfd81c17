"""What the playground offers to copy works where callers are asked for a key, too."""

import pytest

from appliance.control.console import snippets
from testing.specs import configured


@pytest.mark.parametrize("with_key", [True, False], ids=["with keys", "without"])
@pytest.mark.parametrize("task", ["similarity", "rerank", "sparse", "tokens"])
def test_a_key_goes_along_where_one_is_asked_for(task: str, with_key: bool) -> None:
    sent = {"texts": "it's one\ntwo", "query": "which?"}
    found = {each[0]: each[1] for each in snippets.of(task, "minilm", sent, "localhost", configured(), with_key)}
    for name, text in found.items():
        assert ("TEI_APPLIANCE_KEY" in text) is with_key, name
    compile(found["Python"], "snippet", "exec")
