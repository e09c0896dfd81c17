"""`/openapi.json`, and `/docs`: the same as a page that needs no network."""

from __future__ import annotations

from pathlib import Path

import falcon

from appliance.gateway import answers
from appliance.gateway.openapi import document

PAGE = Path(__file__).with_name("docs.html")


class Description:
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        response.content_type = falcon.MEDIA_JSON
        response.data = answers.dumps(document())

    on_head = on_get


class Page:
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        response.content_type = falcon.MEDIA_HTML
        response.data = PAGE.read_bytes()

    on_head = on_get
