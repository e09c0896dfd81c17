"""An answer whose parts are of one generation of the instance, whichever calls they come from."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from appliance.gateway.refusals import Refusal
from appliance.wire.envelope import GENERATIONS_KEY, IS_WHOLE, WHOLE_KEY

PAUSES = (0.1, 1.0)  # seconds before a further try: the processes of the multiplexer learn of a replacement one by one
Result = TypeVar("Result")


class WholeAnswer:
    """The tries for one answer. reserve: `RequestMemory.reserve`."""

    def __init__(self, reserve: Callable[..., None]) -> None:
        self.reserve = reserve
        self.generations = IS_WHOLE  # what calls ask for: any, until the first reply of a try has said of which it is
        self.booked = self.needed = 0  # bytes: by all tries, and for what this one has kept

    def tried(self, ask: Callable[[], Result]) -> Result:
        """What ``ask`` gives; where the instance was replaced meanwhile, it is called again, twice at most.

        Raises: Refusal.
        """
        for pause in PAUSES:
            try:
                return ask()
            except Refusal as refusal:
                if refusal.code != "REPLACED":
                    raise
            time.sleep(pause)
            self.generations, self.needed = IS_WHOLE, 0
        return ask()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of each call."""
        return ((WHOLE_KEY, self.generations),)

    def learn(self, call: Any) -> None:
        """After a reply. call: of grpcio."""
        if self.generations == IS_WHOLE:
            self.generations = dict(call.initial_metadata()).get(GENERATIONS_KEY, IS_WHOLE)

    def book(self, size: int, bounded: bool = True) -> None:
        """Memory for what a try keeps; what an earlier one has booked is free again. Raises: Refusal."""
        self.needed += size
        if self.needed > self.booked:
            self.reserve(self.needed - self.booked, bounded=bounded)
            self.booked = self.needed
