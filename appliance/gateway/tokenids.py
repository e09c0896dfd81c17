"""Token ids instead of texts: whether the instance takes them, and whether its tokenizer knows them.

gRPC takes texts only, so ids become the text that they spell. Ids of another tokenizer spell another text, whose
vector looks right; only an id outside of the vocabulary shows the mistake, and TEI (1.9) drops it without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from appliance.core.problems import quoted
from appliance.drivers import hub, vocabulary
from appliance.gateway.refusals import Reason, Refusal
from appliance.gateway.selection import Selection


def refuse_where_not_taken(selection: Selection) -> None:
    """Raises: Refusal when an instance that may answer takes texts only."""
    for instance in selection.instances:
        if instance.spec.token_ids == "refuse":
            raise Refusal(
                Reason.TOKEN_IDS,
                f'Instance "{instance.name}" takes no token ids: send text, or create it with token_ids = "accept"',
            )


def refuse_unknown(selection: Selection, id_lists: Iterable[tuple[int, Sequence[int]]], several: bool) -> None:
    """id_lists: (number of the input, its ids). Where the model's files are not found, the engine decides.

    Raises: Refusal that names the first id outside the vocabulary, and its place.
    """
    spec = selection.first.spec
    location = hub.locate(spec.model_id, spec.revision, selection.flag("--huggingface-hub-cache"))
    known = vocabulary.known_ids(location.folder) if location else None
    if known is None:
        return
    for number, ids in id_lists:
        at = vocabulary.first_unknown(known, ids)
        if at is not None:
            raise Refusal(
                Reason.TOKEN_IDS,
                f"Token id {ids[at]} at place {at}{f' of input {number}' if several else ''} is not in the vocabulary "
                f"of {quoted(spec.model_id)}: are these ids of another tokenizer? Send text instead",
            )


@contextmanager
def decoding() -> Iterator[None]:
    """While the engine decodes ids: its validation error is about an id that it does not know."""
    try:
        yield
    except Refusal as refusal:
        if refusal.reason is Reason.VALIDATION:
            raise Refusal(Reason.TOKEN_IDS, refusal.message) from None
        raise
