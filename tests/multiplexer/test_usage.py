"""What the texts of a batch cost, in one message."""

import numpy as np

from appliance.multiplexer.usage import Usage
from appliance.wire.tei.v1 import tei_pb2 as tei


def test_a_count_that_no_field_can_hold_is_the_largest_one() -> None:
    """A text of a million characters in 5,000 rows ended the call with a ValueError, when all was computed."""
    usage = Usage(1)
    usage.note(0, tei.Metadata(compute_chars=1_000_000, compute_tokens=256))
    total = usage.total(np.zeros(5000, np.int64), took_secs=1.0)
    assert (total.compute_chars, total.compute_tokens) == (2**32 - 1, 5000 * 256)
