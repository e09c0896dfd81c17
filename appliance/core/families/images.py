"""Models with two towers, one for texts and one for images, into one space: CLIP and SigLIP (SigLIP 2 where its
images have one fixed size).

Both towers are pre-norm transformers. CLIP's image has a class token in front of its patches, which is pooled, and
its text, which sees only what is before, is pooled at its end. SigLIP pools the patches by attention, and its text is
filled up to its full length with tokens that all others see, the last of which is pooled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from appliance.core.architecture import (
    Architecture,
    Attention,
    Embeddings,
    FeedForward,
    LayerNames,
    Linear,
    Norm,
    Reach,
)
from appliance.core.families.common import Config, activation_of, unsupported

KINDS = ("clip", "siglip")


@dataclass(frozen=True)
class ImageTower:
    """body: the layers over the patches. patch: the convolution; class_token, before: a token in front of the patches,
    and the norm before the layers, where there are any; after: the norm behind them; pool: the class token, or
    attention by one learnt query under the name ``head``; projection: the last layer, where there is one."""

    body: Architecture
    patch: Linear
    positions: str
    after: str
    pool: Literal["class", "attention"]
    class_token: str | None = None
    before: str | None = None
    projection: str | None = None
    head: str = "vision_model.head"


def takes_images(config: Config) -> bool:
    """Whether a model takes images."""
    return config.get("model_type") in KINDS


def text_config(config: Config) -> Config:
    return config.get("text_config") or {}


def text_positions(config: Config) -> int:
    default = 77 if config["model_type"] == "clip" else 64
    return int(text_config(config).get("max_position_embeddings") or default)


def tower(
    config: Config,
    name: str,
    prefix: str,
    embeddings: Embeddings | None = None,
    final_norm: str | None = None,
    causal: bool = False,
) -> Architecture:
    """The layers of either tower. prefix: of its tensors; embeddings: None where patches go in."""
    hidden = int(config.get("hidden_size") or (512 if name == "clip" else 768))
    heads = int(config.get("num_attention_heads") or (8 if name == "clip" else 12))
    own = f"{prefix}.encoder.layers.{{}}."
    inputs = tuple(Linear(f"{own}self_attn.{part}_proj") for part in "qkv")
    size = hidden // heads
    activation = activation_of(config, "hidden_act", default="quick_gelu" if name == "clip" else "gelu_pytorch_tanh")
    return Architecture(
        family=name.upper(),
        hidden=hidden,
        prefixes=(),
        norm=Norm("layer", float(config.get("layer_norm_eps") or (1e-5 if name == "clip" else 1e-6))),
        placement="pre",
        attention=Attention(heads, heads, size, size**-0.5, inputs, Linear(f"{own}self_attn.out_proj"), causal=causal),
        feed_forward=FeedForward((Linear(f"{own}mlp.fc1"),), Linear(f"{own}mlp.fc2"), activation),
        names=LayerNames(f"{own}layer_norm1", f"{own}layer_norm2"),
        reaches=(Reach(),) * int(config.get("num_hidden_layers") or 12),
        vocabulary=int(config.get("vocab_size") or 0),
        positions=int(config.get("max_position_embeddings") or 0),
        embeddings=embeddings or Embeddings(""),
        final_norm=final_norm,
    )


def texts(config: Config) -> Architecture:
    """The text tower, up to the norm behind its layers."""
    name = str(config["model_type"])
    embeddings = Embeddings(
        "text_model.embeddings.token_embedding.weight",
        positions="text_model.embeddings.position_embedding.weight",
    )
    own = {**text_config(config), "max_position_embeddings": text_positions(config)}
    final, causal = "text_model.final_layer_norm", name == "clip"
    return tower(own, name, "text_model", embeddings=embeddings, final_norm=final, causal=causal)


def text_projection(config: Config) -> Linear:
    """The layer behind the pooled token."""
    return Linear("text_projection", bias=False) if config["model_type"] == "clip" else Linear("text_model.head")


def images(config: Config) -> ImageTower:
    """Raises: Problem for what is no such model."""
    if not takes_images(config):
        raise unsupported(f"images with model type {config.get('model_type')}")
    name, own = str(config["model_type"]), config.get("vision_config") or {}
    hidden, heads = 768, 12
    body = tower({"hidden_size": hidden, "num_attention_heads": heads, **own}, name, "vision_model")
    patch = Linear("vision_model.embeddings.patch_embedding", bias=name == "siglip")
    positions = "vision_model.embeddings.position_embedding.weight"
    after = "vision_model.post_layernorm"
    if name == "siglip":
        if own.get("vision_use_head") is False:
            raise unsupported("a SigLIP without its pooling head")
        return ImageTower(body, patch, positions, after, "attention")
    token, before = "vision_model.embeddings.class_embedding", "vision_model.pre_layrnorm"
    return ImageTower(body, patch, positions, after, "class", token, before, "visual_projection")
