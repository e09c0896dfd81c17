"""A stream whose replies belong together: they are of one generation of what it asks for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import grpc

from appliance.core.problems import invalid, quoted
from appliance.core.routing import Target
from appliance.multiplexer.batch_run import Generations, Replaced
from appliance.wire.envelope import GENERATIONS_KEY, IS_WHOLE, WHOLE_KEY

DIGEST = re.compile(r"[0-9a-f]{32}")


class WholeStream:
    """Whether the caller of a stream asks for that with WHOLE_KEY, and of which generation the replies are.

    The metadata before the first reply say it, with which another stream asks for the same. Of an instance elsewhere
    the generation is not known here: then they do not, and a peer looks after each stream to it.
    headers: other metadata before the first reply. Raises: Problem for what WHOLE_KEY cannot say.
    """

    def __init__(self, context: grpc.ServicerContext, headers: Sequence[tuple[str, str]] = ()) -> None:
        asked = [value for key, value in context.invocation_metadata() if key == WHOLE_KEY]
        if wrong := [value for value in asked if value != IS_WHOLE and not DIGEST.fullmatch(value)]:
            raise invalid(f"{WHOLE_KEY} is {IS_WHOLE}, or what {GENERATIONS_KEY} was, not {quoted(wrong[0])}")
        self.is_asked_for = bool(asked)
        self.expected = next((value for value in asked if value != IS_WHOLE), None)
        self.context = context
        self.headers = headers
        self.has_begun = False

    def begin(self, target: Target, generations: Generations) -> None:
        """To be called before each reply that may be of another generation than the one before. generations: the
        reply's. Raises: Replaced."""
        headers = list(self.headers)
        if self.is_asked_for and generations and all(number for _, number in generations):
            present = digest_of(generations)
            if self.expected not in (None, present):
                raise Replaced(target)
            self.expected = present
            headers.append((GENERATIONS_KEY, present))
        if headers and not self.has_begun:
            self.has_begun = True
            self.context.send_initial_metadata(headers)


def digest_of(generations: Generations) -> str:
    """A model may be that of many instances, and gRPC allows 8 KiB of metadata."""
    told = ",".join(f"{name}={number}" for name, number in generations)
    return hashlib.sha256(told.encode()).hexdigest()[:32]
