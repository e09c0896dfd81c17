"""Texts out of Arrow: what counts is what a row has."""

import numpy as np
import pyarrow as pa
import pytest

from appliance.wire.arrow import read_rows
from testing.arrows import ipc


@pytest.mark.parametrize(
    ("indices", "texts"),
    [
        ([3, 1, 3, None], [b"d", b"b", b"d", None]),
        ([], []),
        ([None, None], [None, None]),
        ([2, 4, 0], [None, b"b", b""]),  # 2 is a null value, and 4 is the text of 1 again
    ],
)
def test_values_of_a_dictionary_that_no_row_uses_do_not_count(
    indices: list[int | None], texts: list[bytes | None]
) -> None:
    values = pa.array(["", "b", None, "d", "b", "nobody asked for this"])
    column = pa.DictionaryArray.from_arrays(pa.array(indices, pa.int8()), values)
    found = read_rows(ipc(pa.table({"text": column})), 10**6)
    assert [found.texts[at] if at >= 0 else None for at in found.text_of_row] == texts
    assert sorted(found.texts) == sorted({text for text in texts if text is not None})
    assert isinstance(found.text_of_row, np.ndarray)
