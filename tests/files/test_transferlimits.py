"""How long a piece of a body may take."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from appliance.files import transferlimits
from appliance.files.transferlimits import LimitedInput


class Limits:
    """Remembers for how many bytes time was given."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    @contextmanager
    def limited(self, _: Any, size: int) -> Iterator[None]:
        self.sizes.append(size)
        yield


@pytest.mark.parametrize(
    ("length", "size", "expected"),
    [
        (100, 40, 40),
        (100, 400, 100),
        (100, -1, 100),
        (None, 40, 40),  # it comes in chunks: the piece that is asked for counts
        (None, -1, 0),
        (0, 40, 0),
    ],
)
def test_a_piece_has_the_time_of_its_bytes(
    length: int | None, size: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, client = Limits(), object()
    monkeypatch.setattr(transferlimits, "LIMITS", limits)
    LimitedInput(io.BytesIO(bytes(1000)), client, length).read(size)  # type: ignore[arg-type]
    assert limits.sizes == [expected]
