"""Models that give a vector for each token, for late interaction (ColBERT): how they mark, cut and fill up their texts.

A folder says so in one of three ways: sentence-transformers' modules, PyLate's keys in the same files, or the
`artifact.metadata` of the first ColBERT. The defaults of each are those of its own library.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

QUERY, DOCUMENT = "query", "document"  # what a text is for; also the names of the prompts
PYLATE = ("query_prefix", "document_prefix", "skiplist_words", "do_query_expansion", "attend_to_expansion_tokens")
QUERY_TOKENS = 32  # of the first ColBERT


@dataclass(frozen=True)
class QueryExpansion:
    """Queries are filled up with a token, whose vectors count, to ``length`` tokens.

    token: None for the tokenizer's mask, or its end of text; attend: whether the other tokens see these; fixed: whether
    a query never has more tokens.
    """

    length: int
    token: str | None
    attend: bool
    fixed: bool


@dataclass(frozen=True)
class Multivector:
    """prompts: what stands before a query and a document; markers: those of them that are one token each.

    lengths: the most tokens of each, where that is not the model's limit; skipped: words of which documents (of
    ``skipped_in``) keep no vector; normalize: whether each vector has length 1.
    """

    prompts: Mapping[str, str]
    markers: tuple[str, ...]
    lengths: Mapping[str, int]
    expansion: QueryExpansion | None
    skipped: tuple[str, ...]
    skipped_in: tuple[str, ...]
    normalize: bool

    @property
    def hides_filling(self) -> bool:
        """Whether the tokens with which queries are filled up are not seen by the others."""
        return self.expansion is not None and not self.expansion.attend


def of_modules(
    model: Mapping[str, Any], transformer: Mapping[str, Any], mask: Mapping[str, Any], normalize: bool
) -> Multivector:
    """Of sentence-transformers. model: its own config; transformer, mask: those of its modules."""
    prompts = {role: str((model.get("prompts") or {}).get(role) or "") for role in (QUERY, DOCUMENT)}
    expansion = transformer.get("query_expansion")
    skipped_in = mask.get("skiplist_tasks") or [DOCUMENT]
    return Multivector(
        prompts,
        markers=(),
        lengths=lengths(transformer),
        expansion=expansion_of(expansion) if expansion else None,
        skipped=tuple(mask.get("skiplist_words") or ()),
        skipped_in=(skipped_in,) if isinstance(skipped_in, str) else tuple(skipped_in),
        normalize=normalize,
    )


def of_pylate(model: Mapping[str, Any]) -> Multivector:
    markers = {role: str(model.get(f"{role}_prefix") or "") for role in (QUERY, DOCUMENT)}
    own = {role: str((model.get("prompts") or {}).get(role) or "") for role in markers}
    known = lengths(model)
    attend = model.get("attend_to_expansion_tokens", model.get("attend_to_mask_tokens"))
    expansion = QueryExpansion(known.pop(QUERY, QUERY_TOKENS), None, bool(attend), fixed=True)
    skipped = model.get("skiplist_words")
    return Multivector(
        {role: marker + own[role].removeprefix(marker) for role, marker in markers.items()},
        markers=tuple(filter(None, markers.values())),
        lengths=known,
        expansion=None if model.get("do_query_expansion") is False else expansion,
        skipped=tuple(string.punctuation if skipped is None else skipped),
        skipped_in=(DOCUMENT,),
        normalize=True,
    )


def of_stanford(metadata: Mapping[str, Any]) -> Multivector:
    """metadata: of `artifact.metadata`."""
    query, document = metadata.get("query_token_id") or "[unused0]", metadata.get("doc_token_id") or "[unused1]"
    longest = metadata.get("doc_maxlen")
    attend = bool(metadata.get("attend_to_mask_tokens"))
    return Multivector(
        {QUERY: f"{query} ", DOCUMENT: f"{document} "},
        markers=(query, document),
        lengths={DOCUMENT: int(longest)} if longest else {},
        expansion=QueryExpansion(int(metadata.get("query_maxlen") or QUERY_TOKENS), None, attend, fixed=True),
        skipped=tuple(string.punctuation) if metadata.get("mask_punctuation", True) else (),
        skipped_in=(DOCUMENT,),
        normalize=True,
    )


def lengths(config: Mapping[str, Any]) -> dict[str, int]:
    return {role: int(config[f"{role}_length"]) for role in (QUERY, DOCUMENT) if config.get(f"{role}_length")}


def expansion_of(config: Mapping[str, Any]) -> QueryExpansion:
    fixed = config["strategy"] == "fixed"
    return QueryExpansion(int(config["length"]), config.get("token"), bool(config.get("attend")), fixed)
