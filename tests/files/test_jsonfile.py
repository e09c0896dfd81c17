"""What stands in the place of a JSON file is named, whatever it is."""

import os
from pathlib import Path

import pytest

from appliance.files import jsonfile
from appliance.files.jsonfile import read_json


def test_a_file_is_read_and_none_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"a": [1, "\u00e4"]}', encoding="utf-8")
    assert read_json(tmp_path / "a") == {"a": [1, "\u00e4"]}
    assert read_json(tmp_path / "b") is None


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not JSON"),
        (b"null", "has null"),
        (b"[" * 100_000, "is not JSON"),
        (b'"\xff"', "is not JSON"),
        (b" " * 2000, "has over"),
        (None, "cannot be read: it is no regular file"),
    ],
)
def test_what_is_wrong_with_it_is_named(
    tmp_path: Path, content: bytes | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if said == "has over":
        monkeypatch.setattr(jsonfile, "LONGEST", 1999)
    if content is None:
        os.mkfifo(tmp_path / "a")
    else:
        (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_json(tmp_path / "a")
