"""A CLIP whose weights are set by hand: it knows six colours, as words and as images.

One layer, width 6, one head, no positions. A patch becomes its mean colour and that negated, so that its layer norm is
its direction; attention with equal weights for all gives the class token the mean of the patches, and the last token of
a text the mean of its words. Words that are no colours are zero.
"""

import json
import struct
from pathlib import Path

import numpy as np

SIDE, PATCH, WIDTH = 32, 8, 6
COLOURS = {
    "red": (1, -1, -1),
    "green": (-1, 1, -1),
    "blue": (-1, -1, 1),
    "yellow": (1, 1, -1),
    "white": (1, 1, 1),
    "black": (-1, -1, -1),
}
WORDS = ["<start>", "<pad>", "<unk>", *COLOURS, "circle", "square", "triangle", "<end>"]


def write(folder: Path) -> Path:
    """The model's folder."""
    folder.mkdir(parents=True)
    tower = dict(
        hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4, hidden_act="quick_gelu"
    )
    text = dict(tower, vocab_size=len(WORDS), max_position_embeddings=16, eos_token_id=len(WORDS) - 1)
    vision = dict(tower, image_size=SIDE, patch_size=PATCH)
    config = dict(model_type="clip", architectures=["CLIPModel"], projection_dim=3)
    save(folder / "config.json", config | dict(text_config=text, vision_config=vision))
    save(folder / "tokenizer.json", tokenizer())
    sides = dict(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, resample=2)
    flat = dict(image_mean=[0.5, 0.5, 0.5], image_std=[0.5, 0.5, 0.5])
    save(folder / "preprocessor_config.json", sides | flat | dict(do_center_crop=True))
    write_safetensors(folder / "model.safetensors", weights())
    return folder


def save(file: Path, content: object) -> None:
    file.write_text(json.dumps(content))


def tokenizer() -> dict[str, object]:
    ends = [("<start>", 0), ("<end>", len(WORDS) - 1)]
    special = [dict(SpecialToken=dict(id=name, type_id=0)) for name, _ in ends]
    sequence = dict(Sequence=dict(id="A", type_id=0))
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [special[0], sequence, special[1]],
            "pair": [special[0], sequence, special[1]],
            "special_tokens": {name: dict(id=name, ids=[number], tokens=[name]) for name, number in ends},
        },
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(WORDS)},
            "unk_token": "<unk>",
        },
    }


def weights() -> dict[str, np.ndarray]:
    both = np.concatenate([np.eye(3), -np.eye(3)])  # [6, 3]: a colour, and that negated
    words = np.array([both @ COLOURS.get(word, (0, 0, 0)) for word in WORDS])
    patch = both[:, :, None, None] * np.ones((1, 1, PATCH, PATCH)) / PATCH**2
    first = np.eye(3, WIDTH)
    tensors = {
        "text_model.embeddings.token_embedding.weight": words,
        "text_model.embeddings.position_embedding.weight": np.zeros((16, WIDTH)),
        "text_projection.weight": first,
        "vision_model.embeddings.class_embedding": np.zeros(WIDTH),
        "vision_model.embeddings.patch_embedding.weight": patch,
        "vision_model.embeddings.position_embedding.weight": np.zeros(((SIDE // PATCH) ** 2 + 1, WIDTH)),
        "visual_projection.weight": first,
    }
    for norm in ("text_model.final_layer_norm", "vision_model.pre_layrnorm", "vision_model.post_layernorm"):
        tensors |= {f"{norm}.weight": np.ones(WIDTH), f"{norm}.bias": np.zeros(WIDTH)}
    for tower in ("text_model", "vision_model"):
        tensors |= {f"{tower}.encoder.layers.0.{name}": value for name, value in layer().items()}
    return tensors


def layer() -> dict[str, np.ndarray]:
    tensors = {}
    for name, value in (("q", 0.0), ("k", 0.0), ("v", 1.0), ("out", 1.0)):
        tensors[f"self_attn.{name}_proj.weight"] = value * np.eye(WIDTH)
        tensors[f"self_attn.{name}_proj.bias"] = np.zeros(WIDTH)
    for norm in ("layer_norm1", "layer_norm2"):
        tensors |= {f"{norm}.weight": np.ones(WIDTH), f"{norm}.bias": np.zeros(WIDTH)}
    tensors |= {"mlp.fc1.weight": np.zeros((4, WIDTH)), "mlp.fc1.bias": np.zeros(4)}
    return tensors | {"mlp.fc2.weight": np.zeros((WIDTH, 4)), "mlp.fc2.bias": np.zeros(WIDTH)}


def write_safetensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    header, offset, parts = {}, 0, []
    for name, value in tensors.items():
        raw = np.ascontiguousarray(value, "<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [offset, offset + len(raw)]}
        offset += len(raw)
        parts.append(raw)
    head = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(parts))
