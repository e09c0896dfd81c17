"""A stream whose replies belong together: they are of one generation of what it asks for."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from appliance.core.routing import Target
from appliance.multiplexer.batch_run import Generations, Replaced
from appliance.wire.envelope import GENERATIONS_KEY, IS_WHOLE, WHOLE_KEY


class WholeStream:
    """Whether the caller of a stream asks for that with WHOLE_KEY, and of which generation the replies are.

    The metadata before the first reply say it, with which a stream asks for the rest where this one breaks off.
    headers: other metadata before the first reply.
    """

    def __init__(self, context: grpc.ServicerContext, headers: Sequence[tuple[str, str]] = ()) -> None:
        asked = [value for key, value in context.invocation_metadata() if key == WHOLE_KEY]
        self.is_asked_for = bool(asked)
        self.expected = next((value for value in asked if value != IS_WHOLE), "")
        self.context = context
        self.headers = headers
        self.has_begun = False

    def begin(self, target: Target, generations: Generations) -> None:
        """To be called before each reply that may be of another generation than the one before. generations: the
        reply's. Raises: Replaced."""
        headers = list(self.headers)
        if self.is_asked_for:
            present = ",".join(f"{name}={number}" for name, number in generations)
            if self.expected and present != self.expected:
                raise Replaced(target)
            self.expected = present
            headers.append((GENERATIONS_KEY, present))
        if headers and not self.has_begun:
            self.has_begun = True
            self.context.send_initial_metadata(headers)
