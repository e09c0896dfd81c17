"""Token ids instead of texts: whether the instance takes them, and whether its tokenizer knows them.

gRPC takes texts only, so ids become the text that they spell. Ids of another tokenizer spell another text, whose
vector looks right; only an id outside of the vocabulary shows the mistake, and TEI (1.9) drops it without a word.

Special tokens within a text belong to it, as [MASK] does, or [UNK] for what the vocabulary lacks. Those around it are
set again by the tokenizer, so they are taken off first, whether the caller sent them or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from appliance.core.problems import Problem, quoted
from appliance.drivers import hub, modelfolder, vocabulary
from appliance.gateway import multiplexer_replies
from appliance.gateway.refusals import Reason, Refusal
from appliance.gateway.selection import Selection
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux

SAMPLES = ("a", "b")  # texts without special tokens
PADDING = ("[PAD]", "<pad>", "<|pad|>")  # where nothing says which token it is
NumberedIds = tuple[int, Sequence[int]]  # the number of the input, and its ids
Ask = Callable[..., Iterator[bytes]]  # `MultiplexerCalls.replies`


class AddedTokens(NamedTuple):
    """before, behind: the ids that a tokenizer sets around each text, the longest first where it may be more or fewer.
    padding: those with which shorter texts are filled up."""

    before: list[list[int]]
    behind: list[list[int]]
    padding: frozenset[int]

    def without(self, ids: Sequence[int]) -> list[int]:
        """Those of the text alone."""
        begin, end = 0, len(ids)
        while begin < end and ids[begin] in self.padding:
            begin += 1
        while begin < end and ids[end - 1] in self.padding:
            end -= 1
        own = list(ids[begin:end])
        for added in self.before:
            if added and own[: len(added)] == added:
                own = own[len(added) :]
                break
        for added in self.behind:
            if added and own[-len(added) :] == added:
                return own[: -len(added)]
        return own


MOST_KEPT = 1024
kept: dict[tuple[str, str, int, int, str], AddedTokens] = {}  # of each launch of an instance


def texts(selection: Selection, id_lists: Sequence[NumberedIds], ask: Ask, several: bool) -> list[str]:
    """What the ids of each list spell. several: the request has other inputs. Raises: Refusal."""
    refuse_where_not_taken(selection)
    refuse_unknown(selection, id_lists, several)
    added, target = added_tokens(selection, ask), selection.target
    requests = []
    for number, ids in id_lists:
        if not (own := added.without(ids)):
            raise empty(number)
        request = tei.DecodeRequest(ids=own, skip_special_tokens=False)
        requests.append(mux.DecodeRequest(target=target, request=request).SerializeToString())
    with decoding():
        replies = list(ask("Decode", requests, [number for number, _ in id_lists]))
    spelled = [multiplexer_replies.message("Decode", tei.DecodeResponse, reply).text for reply in replies]
    for (number, _), text in zip(id_lists, spelled, strict=True):
        if not text:
            raise empty(number)
    return spelled


def added_tokens(selection: Selection, ask: Ask) -> AddedTokens:
    """Asked for once for each launch of an instance. Raises: Refusal."""
    one = selection.first
    key = (one.name, one.created_at, one.launch, one.generation, one.spec.model_id)
    added = kept.get(key)
    if added is None:
        added = ask_for_added_tokens(selection, ask)
        if len(kept) >= MOST_KEPT:
            kept.clear()  # of instances that are long gone
        kept[key] = added
    return added


def ask_for_added_tokens(selection: Selection, ask: Ask) -> AddedTokens:
    """What is around two texts alike: special tokens, and a marker or a prompt, which callers may leave out.

    Raises: Refusal.
    """
    requests = [tei.EncodeRequest(inputs=text, add_special_tokens=True) for text in SAMPLES]
    raw = [mux.EncodeRequest(target=selection.target, request=each).SerializeToString() for each in requests]
    replies = [multiplexer_replies.message("Tokenize", tei.EncodeResponse, reply) for reply in ask("Tokenize", raw)]
    one, other = ([token.id for token in reply.tokens] for reply in replies)
    special = [token.special for token in replies[0].tokens]
    before, behind = [alike(one, special)], [alike(one[::-1], special[::-1])[::-1]]
    if one != other:
        common = [left == right for left, right in zip(one, other, strict=False)]
        before.insert(0, alike(one, common))
        common = [left == right for left, right in zip(one[::-1], other[::-1], strict=False)]
        behind.insert(0, alike(one[::-1], common)[::-1])
    ends = {each[0] for each in behind if len(each) == 1}  # often what fills up as well
    folder = model_folder(selection)
    own = vocabulary.vocabulary_of(folder) if folder else None
    padding = padding_of(folder, own.special) if folder and own else None
    return AddedTokens(before, behind, frozenset(ends if padding is None else {padding, *ends}))


def alike(ids: list[int], marks: list[bool]) -> list[int]:
    """The marked ones at the beginning; none where all are marked."""
    return ids[: marks.index(False)] if False in marks else []


def padding_of(folder: Path, special: Mapping[str, int]) -> int | None:
    """The id of the token that fills up shorter texts. special: see `Vocabulary`."""
    token = setting(folder / "tokenizer_config.json", "pad_token")
    token = token.get("content") if isinstance(token, dict) else token
    if isinstance(token, str) and token in special:
        return special[token]
    number = setting(folder / "config.json", "pad_token_id")
    if type(number) is int and number in special.values():
        return number
    return next((special[name] for name in PADDING if name in special), None)


def setting(path: Path, key: str) -> Any:
    try:
        content = modelfolder.read_json(path)
    except Problem:
        return None
    return content.get(key) if isinstance(content, dict) else None


def model_folder(selection: Selection) -> Path | None:
    """Where the files of the model are, if they are found."""
    spec = selection.first.spec
    location = hub.locate(spec.model_id, spec.revision, selection.flag("--huggingface-hub-cache"))
    return location.folder if location else None


def refuse_where_not_taken(selection: Selection) -> None:
    """Raises: Refusal when an instance that may answer takes texts only."""
    for instance in selection.instances:
        if instance.spec.token_ids == "refuse":
            raise Refusal(
                Reason.TOKEN_IDS,
                f'Instance "{instance.name}" takes no token ids: send text, or create it with token_ids = "accept"',
            )


def refuse_unknown(selection: Selection, id_lists: Iterable[NumberedIds], several: bool) -> None:
    """Where the model's files are not found, the engine decides.

    Raises: Refusal that names the first id outside the vocabulary, and its place.
    """
    folder = model_folder(selection)
    own = vocabulary.vocabulary_of(folder) if folder else None
    if own is None:
        return
    for number, ids in id_lists:
        at = vocabulary.first_unknown(own.known, ids)
        if at is not None:
            raise Refusal(
                Reason.TOKEN_IDS,
                f"Token id {ids[at]} at place {at}{f' of input {number}' if several else ''} is not in the vocabulary "
                f"of {quoted(selection.first.spec.model_id)}: are these ids of another tokenizer? Send text instead",
            )


def empty(number: int) -> Refusal:
    return Refusal(Reason.EMPTY, f"The token ids of input {number} spell nothing: it cannot be empty")


@contextmanager
def decoding() -> Iterator[None]:
    """While the engine decodes ids: its validation error is about an id that it does not know."""
    try:
        yield
    except Refusal as refusal:
        if refusal.reason is Reason.VALIDATION:
            raise Refusal(Reason.TOKEN_IDS, refusal.message) from None
        raise
