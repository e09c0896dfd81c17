"""The log output of the programs: one JSON object a line on standard output, which supervisor writes to log files."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

EXTRAS = ("event", "instance")


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{key: getattr(record, key) for key in EXTRAS if hasattr(record, key)},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class PlainLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")


def configure(level: str = "INFO", json_lines: bool = True, stream: TextIO | None = None) -> None:
    """Log to ``stream``, by default standard output."""
    handler = logging.StreamHandler(stream or sys.stdout)
    handler.setFormatter(JsonLines() if json_lines else PlainLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
