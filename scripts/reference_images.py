"""Write tests/data/images/: CLIP and SigLIP with random weights, images of every kind, and what transformers says.

Made and used as tests/data/families; run in the same environment, which needs Pillow, too:
    python scripts/reference_images.py [NAME ...]
"""

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from PIL import Image
from tokenizers import Tokenizer, processors

sys.path.insert(0, str(Path(__file__).parent.parent))
from scripts.reference_families import ROOT, TEXTS, byte_bpe, numbers, unigram

TARGET = ROOT / "tests" / "data" / "images"
TOWER = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
SIDE, PATCH = 32, 8
EXIF_TURN = 0x0112


def drawn(width: int, height: int, seed: int) -> Image.Image:
    """Soft shapes with some noise, so that filters differ."""
    rows, columns = np.mgrid[0:height, 0:width]
    random = np.random.default_rng(seed)
    waves = [np.sin(columns / (5 + seed + shift) + rows / (9 + shift)) * 90 + 128 for shift in range(3)]
    pixels = np.stack(waves, axis=-1) + random.normal(0, 12, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def samples() -> dict[str, bytes]:
    """By file name."""
    photo, small = drawn(90, 60, 1), drawn(20, 24, 2)
    clear = drawn(50, 50, 3).convert("RGBA")
    clear.putalpha(Image.fromarray((np.mgrid[0:50, 0:50][1] * 5).astype(np.uint8)))
    turned = Image.Exif()
    turned[EXIF_TURN] = 6
    frames = [drawn(40, 40, seed).quantize(64) for seed in (4, 5)]
    return {
        "photo.jpg": encoded(photo, "JPEG", quality=92),
        "small.png": encoded(small, "PNG"),
        "tall.webp": encoded(drawn(33, 120, 6), "WEBP", lossless=True),
        "alpha.png": encoded(clear, "PNG"),
        "palette.png": encoded(photo.quantize(32), "PNG", transparency=3),
        "grey.png": encoded(photo.convert("L"), "PNG"),
        "cmyk.jpg": encoded(photo.convert("CMYK"), "JPEG", quality=95),
        "turned.jpg": encoded(photo, "JPEG", quality=92, exif=turned),
        "moving.gif": encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "exact.bmp": encoded(drawn(SIDE, SIDE, 7), "BMP"),
        "plain.tif": encoded(drawn(45, 37, 8), "TIFF"),
    }


def spread(model: Any) -> None:
    for parameter in model.parameters():
        mean, deviation = (0.0, 0.25) if parameter.dim() > 1 else (0.5, 0.2)
        torch.nn.init.normal_(parameter, mean, deviation)


def make(name: str) -> None:
    folder = TARGET / name
    torch.manual_seed(sum(map(ord, name)))
    vision = dict(**TOWER, image_size=SIDE, patch_size=PATCH)
    if name == "clip":
        tokens = byte_bpe()
        tokens.add_special_tokens(["<|endoftext|>"])  # the highest id, as in CLIP's: some code looks for that
        end = tokens.token_to_id("<|endoftext|>")
        tokens.post_processor = processors.TemplateProcessing(
            single="<s> $A <|endoftext|>", pair=None, special_tokens=[("<s>", 0), ("<|endoftext|>", end)]
        )
        text = dict(**TOWER, vocab_size=tokens.get_vocab_size(), max_position_embeddings=48)
        ids = dict(bos_token_id=0, eos_token_id=end, pad_token_id=1)
        config: Any = tf.CLIPConfig(text_config=dict(**text, **ids), vision_config=vision, projection_dim=24)
        processor: Any = tf.CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=SIDE)
    else:
        tokens = unigram()
        tokens.post_processor = processors.TemplateProcessing(single="$A </s>", pair=None, special_tokens=[("</s>", 2)])
        text = dict(**TOWER, vocab_size=tokens.get_vocab_size(), max_position_embeddings=24, pad_token_id=1)
        config = tf.SiglipConfig(text_config=text, vision_config=vision)
        processor = tf.SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    model = tf.AutoModel.from_config(config).eval()
    spread(model)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    tokens.save(str(folder / "tokenizer.json"))
    expected: dict[str, Any] = {"texts": TEXTS, "text": text_vectors(name, model, tokens), "images": {}, "pixels": {}}
    for file, raw in samples().items():
        image = upright(Image.open(io.BytesIO(raw)))
        pixels = processor(image, return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            found = model.get_image_features(pixel_values=pixels)
        vector = getattr(found, "pooler_output", found)[0]
        expected["images"][file] = numbers([torch.nn.functional.normalize(vector, dim=0)])[0]
        expected["pixels"][file] = numbers(pixels[0].reshape(3, -1))
    (folder / "expected.json").write_text(json.dumps(expected, ensure_ascii=False, indent=0))


def upright(image: Image.Image) -> Image.Image:
    """transformers' own `load_image` turns images and makes them RGB; its processors composite on white."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def text_vectors(name: str, model: Any, tokens: Tokenizer) -> list[list[float]]:
    found = []
    length = model.config.text_config.max_position_embeddings
    for text in TEXTS:
        ids = tokens.encode(text).ids
        ids = ids if len(ids) <= length else [*ids[: length - 1], ids[-1]]
        if name != "clip":
            ids = [*ids, *[1] * (length - len(ids))]
        with torch.no_grad():
            features = model.get_text_features(input_ids=torch.tensor([ids]))
        vector = getattr(features, "pooler_output", features)[0]
        found.append(numbers([torch.nn.functional.normalize(vector, dim=0)])[0])
    return found


if __name__ == "__main__":
    (TARGET / "samples").mkdir(parents=True, exist_ok=True)
    for file, raw in samples().items():
        (TARGET / "samples" / file).write_bytes(raw)
    for name in sys.argv[1:] or ("clip", "siglip"):
        shutil.rmtree(TARGET / name, ignore_errors=True)
        make(name)
        print(name, sum(file.stat().st_size for file in (TARGET / name).rglob("*") if file.is_file()) // 1024, "kB")
