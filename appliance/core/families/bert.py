"""BERT and its relatives with learnt or relative positions, and JinaBERT, whose positions are slopes (ALiBi).

    family       model types                       positions               names of the layers
    BERT         bert                              0, 1, 2, ...            encoder.layer.N.attention.self.query, ...
    RoBERTa      roberta, xlm-roberta, camembert   padding index + 1, ...  as BERT
    DistilBERT   distilbert                        0, 1, 2, ...            transformer.layer.N.attention.q_lin, ...
    MPNet        mpnet                             padding index + 1, ...  encoder.layer.N.attention.attn.q, ...
    DeBERTa      deberta-v2                        by distance, see below  encoder.layer.N.attention.self.query_proj
    JinaBERT     bert, with alibi positions        by distance             as BERT, with a gated feed-forward

MPNet adds a learnt bias by distance. DeBERTa (versions 2 and 3) multiplies queries and keys with vectors of their
distance: their scores depend on content and distance.
"""

from __future__ import annotations

import math

from appliance.core.architecture import (
    Architecture,
    Attention,
    Convolution,
    Embeddings,
    FeedForward,
    LanguageHead,
    LayerNames,
    Linear,
    Norm,
    Reach,
    RelativePositions,
    ScoreHead,
)
from appliance.core.families.common import (
    Config,
    activation_of,
    architecture_name,
    first_position,
    require,
    unsupported,
)
from appliance.core.problems import quoted

LAYER = "encoder.layer.{}."
EMBEDDINGS = Embeddings(
    words="embeddings.word_embeddings.weight",
    positions="embeddings.position_embeddings.weight",
    types="embeddings.token_type_embeddings.weight",
    norm="embeddings.LayerNorm",
)
NAMES = LayerNames(LAYER + "attention.output.LayerNorm", LAYER + "output.LayerNorm")


def layers(pattern: str, *names: str, bias: bool = True) -> tuple[Linear, ...]:
    return tuple(Linear(pattern + name, bias) for name in names)


def bert_attention(config: Config, *inputs: str, output: str = LAYER + "attention.output.dense") -> Attention:
    heads = config["num_attention_heads"]
    size = config["hidden_size"] // heads
    names = inputs or ("query", "key", "value")
    return Attention(heads, heads, size, size**-0.5, layers(LAYER + "attention.self.", *names), Linear(output))


def bert_feed_forward(config: Config) -> FeedForward:
    return FeedForward(
        (Linear(LAYER + "intermediate.dense"),), Linear(LAYER + "output.dense"), activation_of(config, "hidden_act")
    )


def bert(config: Config) -> Architecture:
    if config.get("position_embedding_type") == "alibi":
        return jina_bert(config)
    require(config, "position_embedding_type", "absolute")
    transform = "cls.predictions.transform."
    return Architecture(
        family="BERT",
        hidden=config["hidden_size"],
        prefixes=("bert.",),
        embeddings=EMBEDDINGS,
        norm=Norm("layer", config.get("layer_norm_eps", 1e-12)),
        placement="post",
        attention=bert_attention(config),
        feed_forward=bert_feed_forward(config),
        names=NAMES,
        reaches=(Reach(),) * config["num_hidden_layers"],
        vocabulary=config["vocab_size"],
        positions=config["max_position_embeddings"],
        language_head=LanguageHead(
            Linear(transform + "dense"),
            transform + "LayerNorm",
            activation_of(config, "hidden_act"),
            "cls.predictions.decoder.weight",
            "cls.predictions.bias",
        ),
        score_head=ScoreHead(Linear("classifier"), dense=Linear("bert.pooler.dense")),
    )


def roberta(config: Config) -> Architecture:
    require(config, "position_embedding_type", "absolute")
    activation = activation_of(config, "hidden_act")
    first = first_position(config)
    return Architecture(
        family="RoBERTa",
        hidden=config["hidden_size"],
        prefixes=("roberta.",),
        embeddings=Embeddings(EMBEDDINGS.words, EMBEDDINGS.positions, first, EMBEDDINGS.types, norm=EMBEDDINGS.norm),
        norm=Norm("layer", config.get("layer_norm_eps", 1e-12)),
        placement="post",
        attention=bert_attention(config),
        feed_forward=bert_feed_forward(config),
        names=NAMES,
        reaches=(Reach(),) * config["num_hidden_layers"],
        vocabulary=config["vocab_size"],
        positions=config["max_position_embeddings"],
        language_head=roberta_language_head(activation),
        score_head=ScoreHead(Linear("classifier.out_proj"), dense=Linear("classifier.dense")),
    )


def roberta_language_head(
    activation: str, norm: str = "lm_head.layer_norm", bias: str = "lm_head.bias"
) -> LanguageHead:
    return LanguageHead(Linear("lm_head.dense"), norm, activation, "lm_head.decoder.weight", bias)


def distilbert(config: Config) -> Architecture:
    layer = "transformer.layer.{}."
    heads, hidden = config["n_heads"], config["dim"]
    size = hidden // heads
    activation = activation_of(config, "activation")
    return Architecture(
        family="DistilBERT",
        hidden=hidden,
        prefixes=("distilbert.",),
        embeddings=Embeddings(EMBEDDINGS.words, EMBEDDINGS.positions, norm=EMBEDDINGS.norm),
        norm=Norm("layer", 1e-12),
        placement="post",
        attention=Attention(
            heads,
            heads,
            size,
            size**-0.5,
            layers(layer + "attention.", "q_lin", "k_lin", "v_lin"),
            Linear(layer + "attention.out_lin"),
        ),
        feed_forward=FeedForward((Linear(layer + "ffn.lin1"),), Linear(layer + "ffn.lin2"), activation),
        names=LayerNames(layer + "sa_layer_norm", layer + "output_layer_norm"),
        reaches=(Reach(),) * config["n_layers"],
        vocabulary=config["vocab_size"],
        positions=config["max_position_embeddings"],
        language_head=LanguageHead(
            Linear("vocab_transform"),
            "vocab_layer_norm",
            activation,
            "vocab_projector.weight",
            "vocab_projector.bias",
        ),
        score_head=ScoreHead(Linear("classifier"), dense=Linear("pre_classifier"), activation="relu"),
    )


def mpnet(config: Config) -> Architecture:
    heads = config["num_attention_heads"]
    size = config["hidden_size"] // heads
    first = first_position(config)
    return Architecture(
        family="MPNet",
        hidden=config["hidden_size"],
        prefixes=("mpnet.",),
        embeddings=Embeddings(EMBEDDINGS.words, EMBEDDINGS.positions, first, norm=EMBEDDINGS.norm),
        norm=Norm("layer", config.get("layer_norm_eps", 1e-12)),
        placement="post",
        attention=Attention(
            heads,
            heads,
            size,
            size**-0.5,
            layers(LAYER + "attention.attn.", "q", "k", "v"),
            Linear(LAYER + "attention.attn.o"),
            relative="mpnet",
        ),
        feed_forward=bert_feed_forward(config),
        names=LayerNames(LAYER + "attention.LayerNorm", LAYER + "output.LayerNorm"),
        reaches=(Reach(),) * config["num_hidden_layers"],
        vocabulary=config["vocab_size"],
        positions=config["max_position_embeddings"],
        language_head=roberta_language_head(activation_of(config, "hidden_act")),
        score_head=ScoreHead(Linear("classifier.out_proj"), dense=Linear("classifier.dense")),
        relative=RelativePositions(
            "encoder.relative_attention_bias.weight", config.get("relative_attention_num_buckets", 32)
        ),
    )


def deberta_convolution(config: Config) -> Convolution | None:
    """Of the largest version 2."""
    if not config.get("conv_kernel_size"):
        return None
    activation = activation_of(config, "conv_act", default="tanh")
    return Convolution("encoder.conv.conv", "encoder.conv.LayerNorm", config.get("conv_groups", 1), activation)


def deberta(config: Config) -> Architecture:
    """Versions 2 and 3. Score: the first token, through a pooler of its own."""
    require(config, "relative_attention", True)
    kinds = config.get("pos_att_type") or []
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    if sorted(kinds) != ["c2p", "p2c"]:
        raise unsupported(f"pos_att_type {quoted(str(config.get('pos_att_type')))} of {architecture_name(config)}")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    width = config.get("embedding_size", hidden)
    shared = config.get("share_att_key", False)
    own = LAYER + "attention.self."
    attention = bert_attention(config, "query_proj", "key_proj", "value_proj")
    farthest = config.get("max_relative_positions", -1)
    return Architecture(
        family="DeBERTa",
        hidden=hidden,
        prefixes=("deberta.",),
        embeddings=Embeddings(
            EMBEDDINGS.words,
            EMBEDDINGS.positions if config.get("position_biased_input", True) else None,
            types=EMBEDDINGS.types if config.get("type_vocab_size", 0) else None,
            projection="embeddings.embed_proj" if width != hidden else None,
            norm=EMBEDDINGS.norm,
        ),
        norm=Norm("layer", config.get("layer_norm_eps", 1e-7)),
        placement="post",
        attention=Attention(
            heads,
            heads,
            attention.head_size,
            (3 * attention.head_size) ** -0.5,  # the sum of three products
            attention.inputs,
            attention.output,
            relative="deberta",
        ),
        feed_forward=bert_feed_forward(config),
        names=NAMES,
        reaches=(Reach(),) * config["num_hidden_layers"],
        vocabulary=config["vocab_size"],
        positions=farthest if farthest > 0 else config["max_position_embeddings"],
        score_head=ScoreHead(
            Linear("classifier"),
            dense=Linear("pooler.dense"),
            activation=activation_of(config, "pooler_hidden_act"),
        ),
        convolution=deberta_convolution(config),
        relative=RelativePositions(
            "encoder.rel_embeddings.weight",
            max(0, config.get("position_buckets", -1)),
            norm="encoder.LayerNorm" if "layer_norm" in str(config.get("norm_rel_ebd", "none")).lower() else None,
            query=own + ("query_proj" if shared else "pos_query_proj"),
            key=own + ("key_proj" if shared else "pos_key_proj"),
        ),
    )


def jina_bert(config: Config) -> Architecture:
    """Version 2. Its models for code have norms of queries and keys, and one more norm in each layer."""
    origin = f"{config.get('auto_map')} {config.get('_name_or_path')}"
    code = "qk-post-norm" in origin
    kind = config.get("feed_forward_type", "geglu")
    if kind not in ("geglu", "reglu"):
        raise unsupported(f"feed_forward_type {quoted(str(kind))} of {architecture_name(config)}")
    activation = "gelu" if kind == "geglu" else "relu"
    attention = bert_attention(config)
    own, output = LAYER + "attention.self.", LAYER + "attention.output.LayerNorm"
    return Architecture(
        family="JinaBERT",
        hidden=config["hidden_size"],
        prefixes=("bert.",),
        embeddings=Embeddings(EMBEDDINGS.words, types=EMBEDDINGS.types, norm=EMBEDDINGS.norm),
        norm=Norm("layer", config.get("layer_norm_eps", 1e-12)),
        placement="post",
        attention=Attention(
            attention.heads,
            attention.heads,
            attention.head_size,
            attention.scale,
            attention.inputs,
            attention.output,
            query_norm=own + "layer_norm_q" if code else None,
            key_norm=own + "layer_norm_k" if code else None,
            norm_heads=False,
            relative="alibi",
        ),
        feed_forward=FeedForward(
            (Linear(LAYER + ("mlp.up_gated_layer" if code else "mlp.gated_layers"), bias=False),),
            Linear(LAYER + ("mlp.down_layer" if code else "mlp.wo")),
            activation,
            halves="gate last" if code else "gate first",
        ),
        names=LayerNames(LAYER + "layer_norm_1", LAYER + "layer_norm_2", attended=output)
        if code
        else LayerNames(output, LAYER + "mlp.layernorm"),
        reaches=(Reach(),) * config["num_hidden_layers"],
        vocabulary=config["vocab_size"],
        positions=config["max_position_embeddings"],
        score_head=ScoreHead(Linear("classifier"), dense=Linear("bert.pooler.dense")),
    )


def slopes(heads: int) -> list[float]:
    """ALiBi's slope of each head: a geometric row; where their number is no power of 2, every second one of the next
    longer row fills it up."""
    whole = 2 ** math.floor(math.log2(heads))
    row = [2 ** (-8 * (number + 1) / whole) for number in range(whole)]
    longer = [2 ** (-8 * (number + 1) / (2 * whole)) for number in range(0, 2 * whole, 2)]
    return row + longer[: heads - whole]
