"""What stands behind `--set`."""

from typing import Any

import pytest

from appliance.cli.instances import parse_field


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("revision=1.0", ("revision", "1.0")),  # a tag was read as a number, and refused
        ("revision=null", ("revision", None)),
        ('revision="null"', ("revision", "null")),
        ("replicas=2", ("replicas", 2)),
        ('aliases=["a", "b"]', ("aliases", ["a", "b"])),
        ("pooling=mean", ("pooling", "mean")),
        ("unknown=1", ("unknown", 1)),
    ],
)
def test_a_value_is_json_unless_its_field_is_text(text: str, field: tuple[str, Any]) -> None:
    assert parse_field(text) == field
