"""What every route needs: who shall answer, the way to the multiplexer, and the watch over its caller."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import falcon

from appliance.drivers.memory import Reserve
from appliance.drivers.metrics import Meters
from appliance.gateway.callers import Callers
from appliance.gateway.choosing import Choice, Chooser
from appliance.gateway.embedding import WHOLE_ROWS, Embedder
from appliance.gateway.multiplexer_channels import Upstream
from appliance.node.authentication import Authenticator
from appliance.node.context import Node


@dataclass(frozen=True)
class Gateway:
    """One worker's parts. ``node`` is only looked at, to say why an instance does not answer."""

    node: Node
    chooser: Chooser
    upstream: Upstream
    callers: Callers
    meters: Meters
    authenticator: Authenticator
    reserve: Reserve


class Resource:
    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    def choose(self, request: falcon.Request, model: str | None = None) -> Choice:
        choice = self.gateway.chooser.choose(request, model)
        request.context.choice = choice
        return choice

    def embedder(self, request: falcon.Request, choice: Choice, texts: int = 1) -> Embedder:
        """texts: how many will be asked for; a large answer needs a place, however small its request was."""
        if texts > WHOLE_ROWS:
            request.context.place.take()
        client = request.env.get("gunicorn.socket")

        def watch(cancel: Any) -> AbstractContextManager[None]:
            return self.gateway.callers.leaving(client, cancel)

        return Embedder(self.gateway.upstream, choice, watch, request.context.place.book)
