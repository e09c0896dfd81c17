"""Templates and files of the console. Everything that a template is given is escaped unless it is markup of our own."""

from __future__ import annotations

import gzip
import hashlib
import json
import time
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import falcon
import jinja2

from appliance import __version__

FOLDER = Path(__file__).parent
TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
UNITS = ((86400, "d"), (3600, "h"), (60, "min"))
KIB, MIB, GIB = 1024, 1024**2, 1024**3


class StaticFile(NamedTuple):
    content: bytes
    compressed: bytes
    content_type: str
    tag: str


@cache
def static_files() -> dict[str, StaticFile]:
    """By name: the few there are, read once."""
    files = {}
    for path in (FOLDER / "static").iterdir():
        if path.suffix in TYPES:
            content = path.read_bytes()
            tag = hashlib.sha256(content).hexdigest()[:16]
            files[path.name] = StaticFile(content, gzip.compress(content, mtime=0), TYPES[path.suffix], tag)
    return files


def static_url(name: str) -> str:
    """With the tag of its content, so that a browser may keep it for good."""
    return f"/console/static/{name}?{static_files()[name].tag}"


@cache
def environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"static": static_url, "version": __version__}
    made.filters |= {"duration": duration, "size": size, "ago": ago, "clock": clock, "pretty": pretty}
    return made


def render(template: str, **values: Any) -> str:
    text = environment().get_template(template).render(**values)
    return text.encode("utf-8", "replace").decode()  # a log may have half a character


def answer(response: falcon.Response, template: str, status: int = 200, **values: Any) -> None:
    response.status = status
    response.content_type = falcon.MEDIA_HTML
    response.text = render(template, **values)


def duration(secs: float | None) -> str:
    """Seconds as people say them."""
    if secs is None:
        return "-"
    for size_, unit in UNITS:
        if secs >= size_:
            return f"{secs / size_:.0f} {unit}"
    return f"{secs:.0f} s" if secs >= 10 else f"{secs:.1f} s"


def size(count: int | None) -> str:
    """Bytes as people read them."""
    if count is None:
        return "-"
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    return f"{count / MIB:.0f} MiB" if count >= MIB else f"{count / KIB:.0f} KiB"


def seconds_of(time_: str) -> float:
    """RFC 3339 as seconds since 1970."""
    return datetime.fromisoformat(time_).timestamp()


def ago(time_: str | None) -> str:
    return "-" if time_ is None else f"{duration(max(0.0, time.time() - seconds_of(time_)))} ago"


def clock(time_: str) -> str:
    """The time of day of an event, UTC."""
    return time_[11:19]


def pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)
