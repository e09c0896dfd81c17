"""What all pages have: who looks at them, what they may do, and where they can go."""

from __future__ import annotations

from typing import Any

import falcon

from appliance.core.access import MEETS, Need
from appliance.node.authentication import Authenticator
from appliance.node.context import Node

NAVIGATION = (
    ("fleet", "/console", "Fleet", Need.READ),
    ("playground", "/console/playground", "Playground", Need.INFERENCE),
    ("models", "/console/models", "Models", Need.READ),
    ("gpus", "/console/gpus", "GPUs", Need.READ),
    ("events", "/console/events", "Events", Need.READ),
    ("bench", "/console/bench", "Bench", Need.READ),
    ("doctor", "/console/doctor", "Doctor", Need.READ),
    ("keys", "/console/keys", "Keys", Need.ADMIN),
)


def common(request: falcon.Request, page: str) -> dict[str, Any]:
    """What every page has: who looks at it, and what they may do."""
    principal = request.context.principal
    allowed = frozenset(Need) if principal.role is None else MEETS[principal.role]
    allowed = frozenset[Need]() if principal.refusal else allowed
    return {
        "page": page,
        "token": request.context.token,
        "who": principal.name if principal.role else "",
        "role": principal.role or "",
        "navigation": [(name, path, words) for name, path, words, need in NAVIGATION if need in allowed],
        "may_read": Need.READ in allowed,
        "may_operate": Need.OPERATE in allowed,
        "may_delete": Need.ADMIN in allowed,
        "may_infer": Need.INFERENCE in allowed,
    }


def first_page(request: falcon.Request) -> str:
    """Of those that this caller may see."""
    return next((path for _, path, _ in common(request, "")["navigation"]), "/console")


class ConsoleResource:
    """What all pages keep. changes: whether a POST is written down in the audit."""

    changes = False

    def __init__(self, node: Node, authenticator: Authenticator) -> None:
        self.node = node
        self.authenticator = authenticator

    def common(self, request: falcon.Request, page: str) -> dict[str, Any]:
        return common(request, page)
