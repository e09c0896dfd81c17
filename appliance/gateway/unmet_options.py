"""Options of other servers that are met in one way alone: any other value is refused, and none is ignored."""

from __future__ import annotations

from typing import Any

from appliance.core import fields as check
from appliance.gateway import shapes


def only(allowed: Any, why: str) -> check.Check:
    """why: there is no other value."""

    @check.with_schema({"enum": [allowed]})
    def checked(value: Any) -> Any:
        if type(value) is not type(allowed) or value != allowed:
            raise ValueError(f"must be {check.shown(allowed)}, not {check.shown(value)}: {why}")
        return value

    return checked


NO_LATE_CHUNKING = only(False, "each text is embedded by itself")
ONE_VECTOR = only(False, "a vector of each token is what /embed_all gives")
POOLING_TASK = only("embed", "/embed_all has a vector of each token, /predict and /score what a classifier says")
# vLLM's, of each text that it embeds or scores.
OF_VLLM = {
    "add_special_tokens": only(True, "those of the model belong to each text"),
    "truncate_prompt_tokens": only(-1, "a text is cut where the model ends"),
}
EMBED_DTYPE = only("float32", "output_dtype has other numbers")


def cuts(body: dict[str, Any]) -> bool:
    """Whether vLLM's options ask for texts that are too long to be cut. Raises: Refusal for what is not met."""
    values = {key: shapes.get(body, key, checked) for key, checked in OF_VLLM.items()}
    return values["truncate_prompt_tokens"] is not None
