"""Images as bytes to what a model takes: decoded under limits, turned upright, resized, cut and normalised.

Decoding is Pillow's (extra `images`). The steps are those of transformers' processors, with the same filters. Images
come from strangers: the format is looked at before anything is decoded, the number of pixels before memory is used.
"""

from __future__ import annotations

import io
import struct
import threading
import warnings
import zlib
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import numpy as np

from appliance.core.preprocessing import LARGEST_IMAGE, Preprocessing
from appliance.core.problems import Problem, invalid

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MOST_PIXELS = 40_000_000  # some 400 MB while it is decoded: 10 bytes a pixel
LARGE_PIXELS = 4_000_000  # of these, one at a time
AT_ONCE = 4  # images that are decoded
# What Pillow's decoders raise for damaged files; MemoryError: for sizes that only the decoder sees.
DAMAGED = (
    *(OSError, ValueError, SyntaxError, EOFError, MemoryError, struct.error, zlib.error),
    *(LookupError, TypeError, AttributeError, OverflowError, RuntimeError, AssertionError, ZeroDivisionError),
)


def refuse_without_pillow() -> None:
    """Raises: Problem when images cannot be decoded here."""
    if find_spec("PIL") is None:
        raise invalid("Images need Pillow: pip install '.[images]' in the source of the appliance", "UNSUPPORTED_MODEL")


def wrong_image(why: str) -> Problem:
    return invalid(f"Input validation error: the image {why}")


class Pixels:
    """One image as the model takes it. values: [3, height, width] float32. Its length counts for batches as that of a
    text does."""

    def __init__(self, values: np.ndarray, patches: int) -> None:
        self.values, self.patches = values, patches

    def __len__(self) -> int:
        return self.patches


class ImageReader:
    """Reads the images of one model. patches: of one image. Thread-safe."""

    def __init__(self, steps: Preprocessing, patches: int) -> None:
        refuse_without_pillow()
        # Pillow warns of what is odd in a file. Each other warning would be kept for good.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        self.steps, self.patches = steps, patches
        self.permits, self.large_permit = threading.BoundedSemaphore(AT_ONCE), threading.Lock()
        self.factor = np.float32(steps.factor)
        self.mean = np.array(steps.mean, np.float32)[:, None, None]
        self.deviation = np.array(steps.deviation, np.float32)[:, None, None]

    def blank(self) -> Pixels:
        """A black image."""
        values = np.zeros((3, *self.sides()), np.float32)
        return Pixels((values - self.mean) / self.deviation, self.patches)

    def read(self, raw: bytes) -> Pixels:
        """Raises: Problem for what is no image, is too large, or is damaged."""
        if not raw:
            raise wrong_image("is empty")
        if len(raw) > LARGEST_IMAGE:
            raise wrong_image(f"has {len(raw)} bytes: at most {LARGEST_IMAGE} are read")
        with self.permits:
            try:
                values = self.prepared(raw)
            except DAMAGED as error:
                from PIL import UnidentifiedImageError

                if isinstance(error, UnidentifiedImageError):  # whose words show an address of Python's
                    raise wrong_image(f"cannot be read: it is none of {', '.join(FORMATS)}") from None
                raise wrong_image(f"cannot be read: {error or type(error).__name__}") from None
        return Pixels(values, self.patches)

    def prepared(self, raw: bytes) -> np.ndarray:
        from PIL import Image, ImageOps  # only now: texts do without it

        steps = self.steps
        try:
            with Image.open(io.BytesIO(raw), formats=FORMATS) as image:  # of an animation, the first frame
                if (count := image.width * image.height) > MOST_PIXELS:
                    raise wrong_image(f"has {image.width} x {image.height} pixels: at most {MOST_PIXELS} are read")
                with self.large_permit if count > LARGE_PIXELS else nullcontext():
                    upright = self.small(as_rgb(ImageOps.exif_transpose(image)))
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):  # Pillow has a limit, too
            raise wrong_image(f"has far more than the {MOST_PIXELS} pixels that are read") from None
        pixels = np.asarray(upright, np.uint8).transpose(2, 0, 1)
        pixels = cut_out(pixels, steps.crop) if steps.crop else pixels
        return (pixels.astype(np.float32) * self.factor - self.mean) / self.deviation

    def small(self, image: Any) -> Any:
        """In the size that the model's first step gives it."""
        from PIL import Image

        width, height = self.steps.resized(image.width, image.height)
        if max(width, height) > 8 * max(self.sides()):
            raise wrong_image(f"is {image.width} x {image.height}, which is too narrow")
        if (width, height) == image.size:
            return image
        return image.resize((width, height), getattr(Image.Resampling, self.steps.filter.upper()))

    def sides(self) -> tuple[int, int]:
        """Height and width of what the model takes."""
        size = self.steps.size or 1
        return self.steps.crop or self.steps.exact or (size, size)


def as_rgb(image: Any) -> Any:
    """What is transparent lies on white, as in transformers; 16 bits of grey become 8, which Pillow would cut off."""
    from PIL import Image

    if image.mode.startswith("I"):
        values = np.asarray(image)
        shift = 8 if values.max(initial=0) > 255 else 0
        image = Image.fromarray((values.clip(0, 65535) >> shift).astype(np.uint8))
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        upper = image.convert("RGBA")
        image = Image.new("RGB", upper.size, (255, 255, 255))
        image.paste(upper, mask=upper.getchannel("A"))
    return image if image.mode == "RGB" else image.convert("RGB")


def cut_out(pixels: np.ndarray, crop: tuple[int, int]) -> np.ndarray:
    """The middle of [3, height, width]; what it lacks is black."""
    height, width = crop
    missing = (max(0, height - pixels.shape[1]), max(0, width - pixels.shape[2]))
    if any(missing):
        before = [-(-each // 2) for each in missing]
        pads = [(first, each - first) for first, each in zip(before, missing, strict=True)]
        pixels = np.pad(pixels, [(0, 0), *pads])
    top, left = (pixels.shape[1] - height) // 2, (pixels.shape[2] - width) // 2
    return pixels[:, top : top + height, left : left + width]
