"""Encoders with rotary positions: ModernBERT, NomicBERT, GTE, Jina's XLM-R.

    family       model types          norms  feed-forward                  window
    ModernBERT   modernbert           pre    gated, one layer of 2 halves  every layer but each third
    NomicBERT    nomic_bert           post   gated, two layers             none
    GTE          new, gte             post   gated, one layer of 2 halves  none
    Jina XLM-R   jina_embeddings_v3   post   plain                         none
                 xlm-roberta

The names are those of the published files, which transformers 5 writes, too, whatever it calls the parts inside.
"""

from __future__ import annotations

from appliance.core.architecture import (
    Architecture,
    Attention,
    Embeddings,
    FeedForward,
    LanguageHead,
    LayerNames,
    Linear,
    Mixture,
    Norm,
    Reach,
    ScoreHead,
)
from appliance.core.families.bert import EMBEDDINGS, roberta, roberta_language_head
from appliance.core.families.common import Config, activation_of, first_position, require, rope_of, unsupported


def modernbert(config: Config) -> Architecture:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = hidden // heads
    bias = bool(config.get("attention_bias", False))
    mlp_bias = bool(config.get("mlp_bias", False))
    head = Linear("head.dense", bool(config.get("classifier_bias", False)))
    head_activation = activation_of(config, "classifier_activation")
    return Architecture(
        family="ModernBERT",
        hidden=hidden,
        prefixes=("model.",),
        embeddings=Embeddings("embeddings.tok_embeddings.weight", norm="embeddings.norm"),
        norm=Norm("layer", config.get("norm_eps", 1e-5), bool(config.get("norm_bias", False))),
        placement="pre",
        attention=Attention(
            heads, heads, size, size**-0.5, (Linear("layers.{}.attn.Wqkv", bias),), Linear("layers.{}.attn.Wo", bias)
        ),
        feed_forward=FeedForward(
            (Linear("layers.{}.mlp.Wi", mlp_bias),),
            Linear("layers.{}.mlp.Wo", mlp_bias),
            activation_of(config, "hidden_activation"),
            halves="gate first",
        ),
        names=LayerNames("layers.{}.attn_norm", "layers.{}.mlp_norm"),
        reaches=modernbert_reaches(config, size),
        vocabulary=config["vocab_size"],
        positions=config["max_position_embeddings"],
        final_norm="final_norm",
        first_attention_norm=False,
        language_head=LanguageHead(
            head,
            "head.norm",
            head_activation,
            "decoder.weight",
            "decoder.bias" if config.get("decoder_bias", True) else None,
        ),
        score_head=ScoreHead(
            Linear("classifier"),
            pool="mean" if config.get("classifier_pooling") == "mean" else "first",
            dense=head,
            activation=head_activation,
            norm="head.norm",
        ),
    )


def modernbert_reaches(config: Config, size: int) -> tuple[Reach, ...]:
    """Layers 0, 3, 6, ... see all tokens, the others half of `local_attention` to either side, that far included."""
    every = config.get("global_attn_every_n_layers", 3)
    count = config["num_hidden_layers"]
    kinds = config.get("layer_types") or [
        "sliding_attention" if number % every else "full_attention" for number in range(count)
    ]
    wide = rope_of(config, config.get("global_rope_theta") or 160_000.0, size, "full_attention")
    near = rope_of(config, config.get("local_rope_theta") or 10_000.0, size, "sliding_attention")
    window = config.get("local_attention", 128) // 2
    return tuple(
        Reach(wide.theta, None, wide.stretch) if kind == "full_attention" else Reach(near.theta, window, near.stretch)
        for kind in kinds
    )


def nomic_bert(config: Config) -> Architecture:
    """config: with the keys that Nomic published, or with those that transformers 5 has. Of version 2 each second layer
    is a mixture of experts, and the others have no gate."""
    require(config, "prenorm", False)
    require(config, "use_rms_norm", False)
    require(config, "rotary_emb_interleaved", False)
    require(config, "rotary_emb_fraction", 1.0)
    hidden = config.get("n_embd") or config["hidden_size"]
    heads = config.get("n_head") or config["num_attention_heads"]
    size = hidden // heads
    layer = "encoder.layers.{}."
    bias = bool(config.get("qkv_proj_bias", False))
    rope = rope_of(config, config.get("rotary_emb_base") or 1000.0, size)
    typed = config.get("type_vocab_size", 2)
    count = config.get("n_layer") or config["num_hidden_layers"]
    return Architecture(
        family="NomicBERT",
        hidden=hidden,
        prefixes=("nomic_bert.", "bert."),
        embeddings=Embeddings(EMBEDDINGS.words, types=EMBEDDINGS.types if typed else None, norm="emb_ln"),
        norm=Norm("layer", config.get("layer_norm_epsilon") or config.get("layer_norm_eps", 1e-12)),
        placement="post",
        attention=Attention(
            heads,
            heads,
            size,
            size**-0.5,
            (Linear(layer + "attn.Wqkv", bias),),
            Linear(layer + "attn.out_proj", bias),
        ),
        feed_forward=nomic_feed_forward(config, layer + "mlp."),
        names=LayerNames(layer + "norm1", layer + "norm2"),
        reaches=(Reach(rope.theta, None, rope.stretch),) * count,
        vocabulary=config["vocab_size"],
        positions=config.get("n_positions") or config["max_position_embeddings"],
        mixture=nomic_mixture(config, layer + "mlp.", count),
    )


def nomic_feed_forward(config: Config, part: str) -> FeedForward:
    up, down = (bool(config.get(key, False)) for key in ("mlp_fc1_bias", "mlp_fc2_bias"))
    output = Linear(part + "fc2", down)
    published = config.get("activation_function")
    if published == "gelu":
        return FeedForward((Linear(part + "fc1", up),), output, published)
    activation = str(published or config.get("hidden_act", "silu"))
    gates = {"swiglu": "silu", "silu": "silu", "geglu": "gelu", "gelu": "gelu"}
    if activation not in gates:
        raise unsupported(f"the activation {activation} of NomicBERT")
    return FeedForward((Linear(part + "fc12", up), Linear(part + "fc11", up)), output, gates[activation])


def nomic_mixture(config: Config, part: str, layers: int) -> Mixture | None:
    if not config.get("num_experts"):
        return None
    require(config, "moe_normalize_expert_weights", False)
    require(config, "expert_choice_router", False)
    require(config, "num_shared_experts", 0)
    require(config, "activation_function", "gelu")
    every = config["moe_every_n_layers"]
    return Mixture(
        layers=tuple(number for number in range(layers) if number % every == 1),
        experts=config["num_experts"],
        chosen=config["moe_top_k"],
        router=part + "router.layer.weight",
        up=part + "experts.mlp.w1",
        down=part + "experts.mlp.w2",
        bias=part + "experts.bias",
        activation="gelu",
    )


def gte(config: Config) -> Architecture:
    require(config, "position_embedding_type", "rope")
    require(config, "layer_norm_type", "layer_norm")
    require(config, "logn_attention_scale", False)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = hidden // heads
    layer = "encoder.layer.{}."
    rope = rope_of(config, 160_000.0 if config["model_type"] == "gte" else 10_000.0, size)
    typed = config.get("type_vocab_size", 1)
    return Architecture(
        family="GTE",
        hidden=hidden,
        prefixes=("new.", "gte."),
        embeddings=Embeddings(EMBEDDINGS.words, types=EMBEDDINGS.types if typed else None, norm=EMBEDDINGS.norm),
        norm=Norm("layer", config.get("layer_norm_eps", 1e-12)),
        placement="post",
        attention=Attention(
            heads,
            heads,
            size,
            size**-0.5,
            (Linear(layer + "attention.qkv_proj"),),
            Linear(layer + "attention.o_proj"),
        ),
        feed_forward=FeedForward(
            (Linear(layer + "mlp.up_gate_proj", bias=False),),
            Linear(layer + "mlp.down_proj"),
            activation_of(config, "hidden_act"),
            halves="gate last",
        ),
        names=LayerNames(layer + "attn_ln", layer + "mlp_ln"),
        reaches=(Reach(rope.theta, None, rope.stretch),) * config["num_hidden_layers"],
        vocabulary=config["vocab_size"],
        positions=config["max_position_embeddings"],
        language_head=roberta_language_head("gelu", norm="lm_head.norm", bias="lm_head.decoder.bias"),
        score_head=ScoreHead(Linear("classifier"), dense=Linear("pooler.dense")),
    )


def jina_xlm_roberta(config: Config) -> Architecture:
    """jina-embeddings-v3, as published (`xlm-roberta` with rotary positions and adapters) or as transformers keeps it
    (without adapters), and jina-reranker-v2, whose positions are a table."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = hidden // heads
    layer = "encoder.layers.{}."
    rope = rope_of(config, config.get("rotary_emb_base") or 20_000.0, size)
    has_table = config["model_type"] == "xlm-roberta" and config.get("position_embedding_type") != "rotary"
    first = first_position(config)
    return Architecture(
        family="Jina XLM-R",
        hidden=hidden,
        prefixes=("roberta.",),
        embeddings=Embeddings(
            EMBEDDINGS.words,
            EMBEDDINGS.positions if has_table else None,
            first if has_table else None,
            EMBEDDINGS.types,
            norm="emb_ln",
        ),
        norm=Norm("layer", config.get("layer_norm_eps", 1e-5)),
        placement="post",
        attention=Attention(
            heads, heads, size, size**-0.5, (Linear(layer + "mixer.Wqkv"),), Linear(layer + "mixer.out_proj")
        ),
        feed_forward=FeedForward(
            (Linear(layer + "mlp.fc1"),), Linear(layer + "mlp.fc2"), activation_of(config, "hidden_act")
        ),
        names=LayerNames(layer + "norm1", layer + "norm2"),
        reaches=(Reach() if has_table else Reach(rope.theta, None, rope.stretch),) * config["num_hidden_layers"],
        vocabulary=config["vocab_size"],
        positions=config["max_position_embeddings"],
        language_head=roberta_language_head(activation_of(config, "hidden_act")),
        score_head=ScoreHead(Linear("classifier.out_proj"), dense=Linear("classifier.dense")),
        adapter_scale=adapter_scale(config),
    )


def adapter_scale(config: Config) -> float | None:
    return config.get("lora_alpha", 1) / config["lora_rank"] if config.get("lora_adaptations") else None


def xlm_roberta(config: Config) -> Architecture:
    """Jina's code has names of its own for the layers."""
    is_jinas = "XLMRobertaFlash" in str(config.get("auto_map")) or config.get("position_embedding_type") == "rotary"
    return jina_xlm_roberta(config) if is_jinas else roberta(config)
