"""Several messages in one: none lost, none out of order, and none so large that its answer would be long in coming."""

from itertools import pairwise

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from appliance.wire import packing


@given(st.lists(st.binary(max_size=1500), max_size=120))
def test_all_come_back_in_order_and_in_messages_of_bounded_size(messages: list[bytes]) -> None:
    parts = [list(packing.unpack(raw)) for raw in packing.packed(messages)]
    assert [message for part in parts for message in part] == messages
    for part in parts:
        assert 1 <= len(part) <= packing.MOST_MESSAGES
        assert len(part) == 1 or sum(map(len, part)) <= packing.MOST_BYTES
    for part, following in pairwise(parts):
        full = len(part) == packing.MOST_MESSAGES or sum(map(len, part)) + len(following[0]) > packing.MOST_BYTES
        assert full, "as few as possible"


def test_what_is_no_packed_message_is_refused() -> None:
    with pytest.raises(DecodeError):
        packing.unpack(b"\x0a\x7f")
