"""What the resources write, without a server."""

import json
from collections.abc import Iterator

import pytest

from appliance.control.resources import LINES_AT_ONCE, log_document
from appliance.drivers.logs import LogWindow


@pytest.mark.parametrize("count", [0, 1, LINES_AT_ONCE, 2 * LINES_AT_ONCE + 1])
def test_a_log_is_one_document_and_never_in_memory_as_a_whole(count: int) -> None:
    """Six callers had 550 MB of it at once."""
    taken = 0

    def lines() -> Iterator[str]:
        nonlocal taken
        for taken in range(1, count + 1):
            yield f'line {taken} "é"'

    said = b""
    for number, piece in enumerate(log_document(LogWindow(lines(), 5, 5 + count, 9000)), start=1):
        said += piece
        assert taken <= number * LINES_AT_ONCE
    assert json.loads(said) == {"lines": list(lines()), "start": 5, "end": 5 + count, "total_lines": 9000}
