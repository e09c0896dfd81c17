"""transformers' CLIP in a process of its own, for scripts/bench_images.py; in the environment of the benchmark.

    python scripts/bench_image_reference.py FOLDER

Writes a CLIP of the usual size (ViT-B/32, random weights) into the folder and images into its `samples`, prints
`ready`, and then answers a JSON line for each it reads: {} the seconds for all images, {"vectors": file} writes them.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers as tf
from PIL import Image
from tokenizers import processors

sys.path.insert(0, str(Path(__file__).parent.parent))
from scripts.reference_families import byte_bpe
from scripts.reference_images import drawn, encoded

IMAGES, BATCH = 96, 32


def make(folder: Path) -> None:
    torch.manual_seed(5)
    tokens = byte_bpe()
    tokens.add_special_tokens(["<|endoftext|>"])
    end = tokens.token_to_id("<|endoftext|>")
    tokens.post_processor = processors.TemplateProcessing(
        single="<s> $A <|endoftext|>", pair=None, special_tokens=[("<s>", 0), ("<|endoftext|>", end)]
    )
    text = dict(vocab_size=tokens.get_vocab_size(), bos_token_id=0, eos_token_id=end, pad_token_id=1)
    tf.CLIPModel(tf.CLIPConfig(text_config=text)).save_pretrained(folder)
    tf.CLIPImageProcessorPil().save_pretrained(folder)
    tokens.save(str(folder / "tokenizer.json"))
    (folder / "samples").mkdir()
    for number in range(IMAGES):
        photo = encoded(drawn(640, 400 + number, number), "JPEG", quality=90)
        (folder / "samples" / f"{number:03}.jpg").write_bytes(photo)


def vectors(folder: Path, model: tf.CLIPModel, processor: tf.CLIPImageProcessorPil) -> np.ndarray:
    files = sorted((folder / "samples").iterdir())
    found = []
    for at in range(0, len(files), BATCH):
        pixels = processor([Image.open(file) for file in files[at : at + BATCH]], return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            features = model.get_image_features(pixel_values=pixels)
        found.append(torch.nn.functional.normalize(getattr(features, "pooler_output", features), dim=1).numpy())
    return np.concatenate(found)


if __name__ == "__main__":
    room = Path(sys.argv[1])
    make(room)
    clip = tf.CLIPModel.from_pretrained(room).eval()
    pictures = tf.CLIPImageProcessorPil.from_pretrained(room)
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        began = time.perf_counter()
        answer = vectors(room, clip, pictures)
        if "vectors" in job:
            np.save(job["vectors"], answer)
        print(json.dumps([time.perf_counter() - began]), flush=True)
