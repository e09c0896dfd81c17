"""Decoders that embed: Qwen2, Qwen3, Mistral, Llama and Gemma 3; EuroBERT; static models, which are a table of words.

A decoder's token sees itself and those before it, unless the configuration says otherwise (`is_causal` false,
`use_bidirectional_attention`). Gemma's norms multiply with 1 + their weight and stand on both sides of each part; its
`sliding_window` counts both directions together, so half of it is how far a token sees.
"""

from __future__ import annotations

from dataclasses import replace

from appliance.core.architecture import (
    Architecture,
    Attention,
    Embeddings,
    FeedForward,
    LayerNames,
    Linear,
    Norm,
    Reach,
    ScoreHead,
)
from appliance.core.families.common import Config, activation_of, require, rope_of, unsupported

YES, NO = "true_token_id", "false_token_id"
OWN, MLP = "layers.{}.self_attn.", "layers.{}.mlp."


def causal(config: Config) -> bool:
    return not config.get("use_bidirectional_attention") and config.get("is_causal") is not False


def decoder(config: Config, family: str, bias: bool, head_norms: bool, theta: float) -> Architecture:
    """bias: of query, key and value; head_norms: whether each head's query and key have a norm."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    output_bias = bool(config.get("attention_bias", False))
    bias = bias or output_bias
    mlp_bias = bool(config.get("mlp_bias", False))
    gate, other, down = (Linear(MLP + name, mlp_bias) for name in ("gate_proj", "up_proj", "down_proj"))
    return Architecture(
        family=family,
        hidden=hidden,
        prefixes=("model.",),
        embeddings=Embeddings("embed_tokens.weight"),
        norm=Norm("rms", config.get("rms_norm_eps", 1e-6), bias=False),
        placement="pre",
        attention=Attention(
            heads,
            config.get("num_key_value_heads") or heads,
            size,
            size**-0.5,
            tuple(Linear(OWN + name, bias) for name in ("q_proj", "k_proj", "v_proj")),
            Linear(OWN + "o_proj", output_bias and family != "Qwen2"),
            causal=causal(config),
            query_norm=OWN + "q_norm" if head_norms else None,
            key_norm=OWN + "k_norm" if head_norms else None,
        ),
        feed_forward=FeedForward((gate, other), down, activation_of(config, "hidden_act", default="silu")),
        names=LayerNames("layers.{}.input_layernorm", "layers.{}.post_attention_layernorm"),
        reaches=decoder_reaches(config, size, theta),
        vocabulary=config["vocab_size"],
        positions=config["max_position_embeddings"],
        final_norm="norm",
        score_head=score_head(config),
    )


def score_head(config: Config) -> ScoreHead:
    """Of a sequence classifier, or of a model that answers yes or no: its `LogitScore` module names the two tokens."""
    if YES not in config:
        return ScoreHead(Linear("score", bias=False), pool="last")
    tokens = (config[YES], config[NO]) if config.get(NO) is not None else (config[YES],)
    if any(not 0 <= token < config["vocab_size"] for token in tokens):
        raise unsupported(f"tokens {list(tokens)} of the answers, of {config['vocab_size']}")
    return ScoreHead(Linear("lm_head", bias=False), pool="last", tokens=tokens)


def decoder_reaches(config: Config, size: int, theta: float) -> tuple[Reach, ...]:
    """The window of a causal model counts the token itself; it holds where the configuration uses it at all."""
    rope = rope_of(config, theta, size)
    count = config["num_hidden_layers"]
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    first = config.get("max_window_layers", 0)
    kinds = config.get("layer_types") or [
        "sliding_attention" if window and number >= first else "full_attention" for number in range(count)
    ]
    return tuple(
        Reach(rope.theta, window - 1 if window and kind == "sliding_attention" else None, rope.stretch)
        for kind in kinds
    )


def qwen2(config: Config) -> Architecture:
    return decoder(config, "Qwen2", bias=True, head_norms=False, theta=10_000.0)


def qwen3(config: Config) -> Architecture:
    return decoder(config, "Qwen3", bias=False, head_norms=True, theta=10_000.0)


def mistral(config: Config) -> Architecture:
    return decoder(config, "Mistral", bias=False, head_norms=False, theta=10_000.0)


def llama(config: Config) -> Architecture:
    return decoder(config, "Llama", bias=False, head_norms=False, theta=10_000.0)


def eurobert(config: Config) -> Architecture:
    """An encoder with the parts of a Llama."""
    own = {**config, "is_causal": False}
    return replace(decoder(own, "EuroBERT", bias=False, head_norms=False, theta=250_000.0), score_head=None)


def gemma3(config: Config) -> Architecture:
    require(config, "attn_logit_softcapping")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim", 256)
    bias = bool(config.get("attention_bias", False))
    gate, other, down = (Linear(MLP + name, bias=False) for name in ("gate_proj", "up_proj", "down_proj"))
    return Architecture(
        family="Gemma 3",
        hidden=hidden,
        prefixes=("model.",),
        embeddings=Embeddings("embed_tokens.weight", scale=hidden**0.5),
        norm=Norm("rms+1", config.get("rms_norm_eps", 1e-6), bias=False),
        placement="sandwich",
        attention=Attention(
            heads,
            config.get("num_key_value_heads", 4),
            size,
            config.get("query_pre_attn_scalar", 256) ** -0.5,
            tuple(Linear(OWN + name, bias) for name in ("q_proj", "k_proj", "v_proj")),
            Linear(OWN + "o_proj", bias),
            causal=causal(config),
            query_norm=OWN + "q_norm",
            key_norm=OWN + "k_norm",
        ),
        feed_forward=FeedForward(
            (gate, other), down, activation_of(config, "hidden_activation", default="gelu_pytorch_tanh")
        ),
        names=LayerNames(
            "layers.{}.input_layernorm",
            "layers.{}.pre_feedforward_layernorm",
            after_attention="layers.{}.post_attention_layernorm",
            after_feed_forward="layers.{}.post_feedforward_layernorm",
        ),
        reaches=gemma3_reaches(config, size),
        vocabulary=config["vocab_size"],
        positions=config["max_position_embeddings"],
        final_norm="norm",
    )


def gemma3_reaches(config: Config, size: int) -> tuple[Reach, ...]:
    """Every sixth layer sees all tokens."""
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    kinds = config.get("layer_types") or [
        "sliding_attention" if (number + 1) % every else "full_attention"
        for number in range(config["num_hidden_layers"])
    ]
    wide = rope_of(config, 1_000_000.0, size, "full_attention")
    local = {**config, "rope_theta": config.get("rope_local_base_freq")}
    near = rope_of(local, 10_000.0, size, "sliding_attention")
    window = config.get("sliding_window", 4096)
    reach = window - 1 if causal(config) else window // 2
    return tuple(
        Reach(wide.theta, None, wide.stretch) if kind == "full_attention" else Reach(near.theta, reach, near.stretch)
        for kind in kinds
    )


def static(config: Config) -> Architecture:
    """model2vec: a vector for each token, and nothing else; its mean is the text's."""
    require(config, "vocabulary_quantization")  # then several tokens share a vector, each with a weight of its own
    return Architecture(
        family="static",
        hidden=config["hidden_dim"],
        prefixes=("",),
        embeddings=Embeddings("embeddings"),
        norm=Norm("layer", 0.0),
        placement="post",
        attention=Attention(1, 1, 1, 1.0, (), Linear("")),
        feed_forward=FeedForward((), Linear(""), "gelu"),
        names=LayerNames("", ""),
        reaches=(),
        vocabulary=0,
        positions=config.get("seq_length") or 1_000_000,
    )
