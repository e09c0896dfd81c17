"""`/openapi.json`, and `/docs`: the same as a page that needs no network."""

from __future__ import annotations

from pathlib import Path

import falcon

from appliance.core.fields import Schema
from appliance.gateway import responses

PAGE = Path(__file__).with_name("docs.html")


class HttpDescriptionResource:
    def __init__(self, document: Schema) -> None:
        self.body = responses.dumps(document)

    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        response.content_type = falcon.MEDIA_JSON
        response.data = self.body


class DocsPageResource:
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        response.content_type = falcon.MEDIA_HTML
        response.data = PAGE.read_bytes()
