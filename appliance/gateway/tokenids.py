"""Token ids in the place of texts: whether the instance takes them, and whether its tokenizer knows them.

gRPC takes texts only, so ids become the text that they spell. Ids of another tokenizer spell another text, and give
vectors that look right; what is outside the vocabulary shows it, and TEI (1.9) drops it without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from appliance.core.problems import quoted
from appliance.drivers import hub, vocabulary
from appliance.gateway.choosing import Choice
from appliance.gateway.refusals import Reason, Refusal


def refuse_where_not_taken(choice: Choice) -> None:
    """Raises: Refusal when an instance that may answer takes texts only."""
    for instance in choice.instances:
        if instance.spec.token_ids == "refuse":
            raise Refusal(
                Reason.TOKEN_IDS,
                f'Instance "{instance.name}" takes no token ids: send text, or create it with token_ids = "accept"',
            )


def refuse_unknown(choice: Choice, given: Iterable[tuple[int, Sequence[int]]], several: bool) -> None:
    """given: (number of the input, its ids). Where the model's files are elsewhere, it is left to the engine.

    Raises: Refusal that names the first id outside the vocabulary, and its place.
    """
    spec = choice.first.spec
    place = hub.locate(spec.model_id, spec.revision, choice.flag("--huggingface-hub-cache"))
    known = vocabulary.known_ids(place.folder) if place else None
    if known is None:
        return
    for number, ids in given:
        at = vocabulary.first_unknown(known, ids)
        if at is not None:
            raise Refusal(
                Reason.TOKEN_IDS,
                f"Token id {ids[at]} at place {at}{f' of input {number}' if several else ''} is not in the vocabulary "
                f"of {quoted(spec.model_id)}: are these ids of another tokenizer? Send text instead",
            )


@contextmanager
def decoding() -> Iterator[None]:
    """While the engine decodes ids: what it finds wrong is an id that it does not know."""
    try:
        yield
    except Refusal as refusal:
        if refusal.reason is Reason.VALIDATION:
            raise Refusal(Reason.TOKEN_IDS, refusal.message) from None
        raise
