"""JSON files that others made: of a bounded size, and whatever stands in the place of one is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from appliance.files.opening import open_regular

LONGEST = 16 * 1024 * 1024


def read_json(path: Path) -> Any:
    """The content; None when there is no file. Raises: ValueError with what is wrong with it, as the rest of a sentence
    that begins with its name."""
    try:
        with open_regular(path) as file:
            text = file.read(LONGEST + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    if len(text) > LONGEST:
        raise ValueError(f"has over {LONGEST // 1024 // 1024} MiB")
    try:
        value = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if value is None:
        raise ValueError("has null and nothing else")
    return value
