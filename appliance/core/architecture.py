"""What a transformer computes, as values: which norms, which attention, which feed-forward, under which tensor names.

A family of models turns its config.json into one `Architecture` (`core/families/`), and one builder turns every
architecture into a graph (`engine/graph/`). Names are those of the tensors without `.weight` and `.bias`; in the names
of a layer, {} is its number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Placement = Literal["post", "pre", "sandwich"]
Pool = Literal["first", "mean", "last"]


class Norm(NamedTuple):
    """layer: LayerNorm; rms: by the root mean square alone; rms+1: as rms, with 1 + the weight as its factor."""

    kind: Literal["layer", "rms", "rms+1"]
    epsilon: float
    bias: bool = True


class Linear(NamedTuple):
    name: str
    bias: bool = True


class Reach(NamedTuple):
    """What differs from layer to layer. theta: base of the rotary positions, None without; stretch: divides their
    frequencies; window: a token sees others at a distance of at most so many tokens, None for all."""

    theta: float | None = None
    window: int | None = None
    stretch: float = 1.0


@dataclass(frozen=True)
class Embeddings:
    """words + positions + types, then the projection, then the norm; each is there if it has a name.

    first_position: None for 0, 1, 2, ... in every row; a number for RoBERTa's positions, which count the real tokens
    from there on, while padding has the number before. scale: a factor for the words.
    """

    words: str
    positions: str | None = None
    first_position: int | None = None
    types: str | None = None
    projection: str | None = None
    norm: str | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class Attention:
    """inputs: the layers of query, key and value, or one that holds all three in this order.

    key_heads: of keys and values, each for heads / key_heads queries. query_norm, key_norm: of each head (norm_heads)
    or of all heads together. relative: a bias by the distance of two tokens: MPNet's (learnt, shared by all layers),
    alibi (a slope for each head) or DeBERTa's (which depends on the content, too).
    """

    heads: int
    key_heads: int
    head_size: int
    scale: float
    inputs: tuple[Linear, ...]
    output: Linear
    causal: bool = False
    query_norm: str | None = None
    key_norm: str | None = None
    norm_heads: bool = True
    relative: Literal["mpnet", "alibi", "deberta"] | None = None


@dataclass(frozen=True)
class FeedForward:
    """inputs: one layer (output(act(input(x)))), or the gate and the other half (output(act(gate(x)) * other(x))).

    halves: where one layer has both halves: which of them is the gate; then there is one input.
    """

    inputs: tuple[Linear, ...]
    output: Linear
    activation: str
    halves: Literal["gate first", "gate last"] | None = None


@dataclass(frozen=True)
class LayerNames:
    """The norms of a layer. Placement post: x = norm(x + f(x)); pre: x = x + f(norm(x)); sandwich: x = x +
    after(f(norm(x))). attended: one more norm of x + attention(x), before attention."""

    attention: str
    feed_forward: str
    attended: str | None = None
    after_attention: str | None = None
    after_feed_forward: str | None = None


class LanguageHead(NamedTuple):
    """From hidden states to the vocabulary: decoder(norm(act(dense(x)))). decoder: its weight, where the file has it;
    else the word embeddings. bias: the name of the decoder's."""

    dense: Linear
    norm: str
    activation: str
    decoder: str
    bias: str | None


class ScoreHead(NamedTuple):
    """From hidden states to the scores of the labels: output(norm(act(dense(pooled)))).

    tokens: of a language model that is asked a question, the ids of the words for yes and, where it counts, no. Then
    the only score is the logit of yes, minus that of no, and ``output`` the layer that gives logits.
    """

    output: Linear
    pool: Pool = "first"
    dense: Linear | None = None
    activation: str = "tanh"
    norm: str | None = None
    tokens: tuple[int, ...] = ()


class Mixture(NamedTuple):
    """The feed-forward of some layers: each token goes through the ``chosen`` experts of which its router thinks most.

    router: its weight, [experts, width]. up, down: tensors of all experts below each other, [experts x inner, width];
    the expert's answer is activation(x up') down, times the router's softmax. bias: added to the sum.
    """

    layers: tuple[int, ...]
    experts: int
    chosen: int
    router: str
    up: str
    down: str
    bias: str
    activation: str


class Convolution(NamedTuple):
    """DeBERTa's, beside the first layer: x1 = norm(x1 + activation(conv(x0)))."""

    layer: str
    norm: str
    groups: int
    activation: str


class RelativePositions(NamedTuple):
    """What a bias by distance is made of. embeddings: a tensor [buckets, ...]; norm, query, key: layers on it
    (DeBERTa), of which query and key stand in each layer."""

    embeddings: str
    buckets: int
    norm: str | None = None
    query: str | None = None
    key: str | None = None


@dataclass(frozen=True)
class Architecture:
    """One model. prefixes: what may stand before every name of the body; files with a head have it, others do not.

    reaches: one for each layer. first_attention_norm: whether the first layer has one (placement pre). adapter_scale:
    of what low-rank adapters add to the layers, of which each text may choose one; None without them.
    """

    family: str
    hidden: int
    prefixes: tuple[str, ...]
    embeddings: Embeddings
    norm: Norm
    placement: Placement
    attention: Attention
    feed_forward: FeedForward
    names: LayerNames
    reaches: tuple[Reach, ...]
    vocabulary: int
    positions: int
    final_norm: str | None = None
    first_attention_norm: bool = True
    language_head: LanguageHead | None = None
    score_head: ScoreHead | None = None
    relative: RelativePositions | None = None
    mixture: Mixture | None = None
    convolution: Convolution | None = None
    adapter_scale: float | None = None
