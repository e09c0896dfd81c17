"""`/openapi.json`, and `/docs`: the same as a page where one can try it, without a network and without a key.

The page holds nothing of this appliance: what it shows it asks for, with the key that is typed into it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import falcon

from appliance.core.fields import Schema
from appliance.gateway import responses

FOLDER = Path(__file__).with_name("docs_page")
FILES = {"page.css": "text/css; charset=utf-8", "page.js": "text/javascript; charset=utf-8"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@cache
def content(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


class HttpDescriptionResource:
    def __init__(self, document: Schema) -> None:
        self.body = responses.dumps(document)

    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        response.content_type = falcon.MEDIA_JSON
        response.data = self.body


class DocsPageResource:
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        response.set_headers(HEADERS)
        response.content_type = falcon.MEDIA_HTML
        response.data = content("index.html")


class DocsFileResource:
    """What the page is made of."""

    def on_get(self, request: falcon.Request, response: falcon.Response, file: str) -> None:
        if file not in FILES:
            raise falcon.HTTPNotFound
        response.set_headers(HEADERS)
        response.content_type = FILES[file]
        response.data = content(file)
