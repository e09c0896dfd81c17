"""The identity of the caller, from the environment: a key that no header can carry is refused, and never printed."""

import pytest

from appliance.cli.connection import Identity
from appliance.core.problems import Kind, Problem
from appliance.core.settings import Settings

KEY = "tei_0123456789abcdef"


def test_a_key_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEI_APPLIANCE_KEY", KEY)
    assert Identity.from_environment(Settings()).key == KEY
    monkeypatch.delenv("TEI_APPLIANCE_KEY")
    assert Identity.from_environment(Settings()).key == ""


@pytest.mark.parametrize("key", [f"{KEY}\n", f"{KEY}\r\nx: y", f"\t{KEY}", f"{KEY}ü", f"{KEY}\udcff"])
def test_a_key_that_no_header_carries_is_not_printed(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """The error of the library that refused it had the key in its words."""
    monkeypatch.setenv("TEI_APPLIANCE_KEY", key)
    with pytest.raises(Problem, match="TEI_APPLIANCE_KEY has characters that no key has") as refused:
        Identity.from_environment(Settings())
    assert refused.value.kind is Kind.INVALID
    assert KEY not in refused.value.message
