"""What every route has: the choice of an instance, the way to the multiplexer, and the watch over its caller."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import quote

import falcon

from appliance.drivers.imagefetch import ImageFetcher
from appliance.drivers.memory import Reserve
from appliance.drivers.metrics import Meters
from appliance.gateway import shapes
from appliance.gateway.channel import Metadata
from appliance.gateway.client_watch import ClientWatch
from appliance.gateway.combined_replies import DenseReply
from appliance.gateway.combining import Combiner
from appliance.gateway.multiplexer_calls import WHOLE_ROWS, MultiplexerCalls
from appliance.gateway.multiplexer_channels import MultiplexerChannels
from appliance.gateway.refusals import Reason, Refusal
from appliance.gateway.selection import InstanceSelector, Selection
from appliance.node.authentication import Authenticator
from appliance.node.context import Node
from appliance.wire.envelope import CACHE_KEY, DO_NOT_WAIT, EXPECT_KEY, SCOPE_KEY, WAIT_KEY

PASSED = (CACHE_KEY, EXPECT_KEY, WAIT_KEY)


@dataclass(frozen=True)
class Gateway:
    """One worker's parts. ``node`` is only looked at, to say why an instance does not answer."""

    node: Node
    selector: InstanceSelector
    channels: MultiplexerChannels
    client_watch: ClientWatch
    meters: Meters
    authenticator: Authenticator
    reserve: Reserve
    combiner: Combiner[DenseReply] = field(default_factory=Combiner)
    image_fetcher: ImageFetcher = field(default_factory=lambda: ImageFetcher(()))


class Resource:
    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    def select(self, request: falcon.Request, model: str | None = None, *tasks: frozenset[str]) -> Selection:
        """tasks: what the route is for; see `InstanceSelector.select`."""
        selection = self.gateway.selector.select(request, model, tasks)
        request.context.selection = selection
        return selection

    def calls(self, request: falcon.Request, selection: Selection, texts: int = 1) -> MultiplexerCalls:
        """texts: how many will be asked for; a large answer needs a place, however small its request was."""
        if texts > WHOLE_ROWS:
            request.context.memory.acquire_large_permit()
        client = request.env.get("gunicorn.socket")

        def watch(cancel: Any) -> AbstractContextManager[None]:
            return self.gateway.client_watch.cancelling_when_gone(client, cancel)

        reserve = request.context.memory.reserve
        # A peer is asked text by text: what it says of each is passed on.
        combiner = None if self.gateway.selector.is_elsewhere(selection.first.name) else self.gateway.combiner
        card = partial(self.gateway.selector.cards.of, selection.first)
        return MultiplexerCalls(
            self.gateway.channels, selection, watch, reserve, self.metadata(request), combiner, card
        )

    def refuse_text_model(self, selection: Selection, inputs: Any) -> ImageFetcher:
        """What fetches the images of a request. Raises: Refusal for images that the model does not take."""
        card = self.gateway.selector.cards.of(selection.first) if inputs.images else None
        if card and not card.images:
            raise Refusal(Reason.BACKEND, f"Backend error: {card.architecture} takes no images")
        return self.gateway.image_fetcher

    def refuse_shorter(self, selection: Selection, body: dict[str, Any], key: str) -> None:
        """Cohere's limit of the tokens of a text. Raises: Refusal for one that would cut more than the model does."""
        most, card = shapes.get(body, key, shapes.UINT), self.gateway.selector.cards.of(selection.first)
        if most is not None and (card is None or most < card.max_tokens):
            own = f"be less than the {card.max_tokens} tokens that the model takes" if card else "be set"
            raise shapes.wrong_shape(key, f"cannot {own}: texts are cut where the model ends. Leave it out")

    def metadata(self, request: falcon.Request) -> Metadata:
        """What a request says about the cache and about waiting, as metadata of its calls."""
        said = [(key, sendable(value)) for key in PASSED if (value := request.get_header(key)) is not None]
        if request.context.crowded:
            said = [*((key, value) for key, value in said if key != WAIT_KEY), (WAIT_KEY, DO_NOT_WAIT)]
        if self.gateway.authenticator.settings.cache.scope == "key":
            said.append((SCOPE_KEY, quote(request.context.principal)))  # names of certificates are any
        return said


def sendable(value: str) -> str:
    """As metadata, of which gRPC takes printable ASCII alone: what else is in it means nothing to the multiplexer,
    which says so."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in value)
