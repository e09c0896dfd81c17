"""Find images by words, over a model that puts both into one space (CLIP, SigLIP): a page in the browser.

Needs `make demo`, and an appliance with such an instance:

    .venv-demo/bin/python -m examples.image_search --model clip ~/Pictures

Without a folder it draws some images of its own. Vectors are kept in memory: it is an example, and no database.
"""

import argparse
import base64
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported

import gradio
import numpy as np
import requests
from PIL import Image, ImageDraw

KINDS = (".jpg", ".jpeg", ".png", ".webp", ".gif")
AT_ONCE = 32  # images of one request
BEST = 6
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 180, 60),
    "blue": (40, 60, 220),
    "yellow": (240, 220, 40),
    "white": (245, 245, 245),
    "black": (15, 15, 15),
}
SHAPES = ("circle", "square", "triangle")
SIDE = 160


def drawn() -> Iterator[tuple[str, Image.Image]]:
    """(what it shows, the image): every shape in every colour, on a ground of nearly that colour."""
    for colour, rgb in COLOURS.items():
        for shape in SHAPES:
            image = Image.new("RGB", (SIDE, SIDE), tuple(int(0.75 * value + 32) for value in rgb))
            pen, low, high = ImageDraw.Draw(image), SIDE // 5, SIDE - SIDE // 5
            if shape == "circle":
                pen.ellipse((low, low, high, high), fill=rgb)
            elif shape == "square":
                pen.rectangle((low, low, high, high), fill=rgb)
            else:
                pen.polygon(((SIDE // 2, low), (low, high), (high, high)), fill=rgb)
            yield f"{colour} {shape}", image


def pictures_in(folder: Path) -> Iterator[tuple[str, Image.Image]]:
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in KINDS:
            with Image.open(path) as image:
                small = image.convert("RGB")
                small.thumbnail((512, 512))
                yield path.name, small


class Search:
    """The vectors of some images, and the gateway that has made them."""

    def __init__(self, gateway: str, model: str, key: str) -> None:
        self.url, self.model = f"{gateway.rstrip('/')}/embed", model
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.names: list[str] = []
        self.images: list[Image.Image] = []
        self.vectors = np.zeros((0, 0), np.float32)

    def embed(self, inputs: Sequence[dict[str, str]]) -> np.ndarray:
        """[inputs, width]. Raises: gradio.Error with the gateway's words."""
        try:
            answer = requests.post(
                self.url, json={"model": self.model, "inputs": inputs}, headers=self.headers, timeout=300
            )
        except requests.RequestException as error:
            raise gradio.Error(f"No gateway answers at {self.url}: {type(error).__name__}") from error
        if answer.status_code != 200:
            raise gradio.Error(answer.text[:500])
        return np.array(answer.json(), np.float32)

    def index(self, images: Iterator[tuple[str, Image.Image]]) -> str:
        """Embed all of them, some at once. Returns what to tell."""
        found = list(images)
        if not found:
            raise gradio.Error("There is no image")
        blocks = []
        for begin in range(0, len(found), AT_ONCE):
            part = found[begin : begin + AT_ONCE]
            blocks.append(self.embed([{"type": "image", "data": as_base64(image)} for _, image in part]))
        self.names, self.images = [name for name, _ in found], [image for _, image in found]
        self.vectors = np.concatenate(blocks)
        return f"{len(found)} images are in the index"

    def search(self, words: str) -> list[tuple[Image.Image, str]]:
        """The nearest images, each with its name and its cosine."""
        if not self.images:
            raise gradio.Error("Nothing is indexed yet: press Index")
        if not words.strip():
            raise gradio.Error("Say what you look for")
        cosines = self.vectors @ self.embed([{"type": "text", "value": words}])[0]
        order = np.argsort(-cosines, kind="stable")[:BEST]
        return [(self.images[at], f"{self.names[at]} ({cosines[at]:.3f})") for at in order]


def as_base64(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def build(search: Search, folder: Path | None) -> Any:
    """The page."""
    with gradio.Blocks(title="Image search") as page:
        gradio.Markdown("# Image search\nFind images by words. Nothing leaves this machine.")
        status = gradio.Markdown("Nothing is indexed yet.", elem_id="status")
        index = gradio.Button("Index", elem_id="index")
        words = gradio.Textbox(label="What do you look for?", elem_id="words")
        find = gradio.Button("Search", variant="primary", elem_id="search")
        gallery = gradio.Gallery(label="Results", columns=3, elem_id="results")
        index.click(lambda: search.index(pictures_in(folder) if folder else drawn()), outputs=status)
        find.click(search.search, words, gallery)
        words.submit(search.search, words, gallery)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(prog="examples.image_search", description="Find images by words.")
    parser.add_argument("folder", nargs="?", type=Path, help="a folder of images; without it some are drawn")
    parser.add_argument("--gateway", default=os.environ.get("TEI_GATEWAY", "http://127.0.0.1:9002"), help="its URL")
    parser.add_argument("--model", default="clip", help="the instance that embeds texts and images")
    parser.add_argument("--port", type=int, default=7861, help="of the page")
    options = parser.parse_args()
    search = Search(options.gateway, options.model, os.environ.get("TEI_APPLIANCE_KEY", ""))
    page = build(search, options.folder)
    page.launch(server_name="127.0.0.1", server_port=options.port, share=False, quiet=True, ssr_mode=False)


if __name__ == "__main__":
    main()
