"""How an image becomes what a model takes, as its preprocessor_config.json says, and how large it may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.core.problems import invalid

LARGEST_IMAGE = 20 * 1024 * 1024  # bytes of a file
LARGEST_SIDE = 2048
FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by Pillow's number
CLIP_MEAN, CLIP_DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Preprocessing:
    """In this order: resize (the shortest side to ``size``, or both sides to ``exact``), cut out the middle (height,
    width), multiply, subtract ``mean`` and divide by ``deviation`` of each channel. filter: a name of Pillow's."""

    size: int | None
    exact: tuple[int, int] | None
    filter: str
    crop: tuple[int, int] | None
    factor: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """The width and height of an image after the first step."""
        if self.exact:
            return self.exact[1], self.exact[0]
        if self.size is None:
            return width, height
        short, long = sorted((width, height))
        other = int(self.size * long / short)
        return (self.size, other) if width <= height else (other, self.size)


def parse(config: Mapping[str, Any]) -> Preprocessing:
    """Of the file's content. Raises: Problem for a size that is none, or a filter that nobody knows."""
    size = config.get("size", {"shortest_edge": 224})
    size = {"shortest_edge": size} if isinstance(size, int) else dict(size)
    resizes, crops = config.get("do_resize", True), config.get("do_center_crop", "crop_size" in config)
    exact = side_pair(size) if resizes and "height" in size else None
    shortest = side(size.get("shortest_edge")) if resizes and exact is None else None
    crop = config.get("crop_size", size)
    number = int(config.get("resample", 3))
    if not 0 <= number < len(FILTERS):
        raise invalid(f"preprocessor_config.json has the unknown filter {number}", "UNSUPPORTED_MODEL")
    normalizes = config.get("do_normalize", True)
    return Preprocessing(
        size=shortest,
        exact=exact,
        filter=FILTERS[number],
        crop=side_pair(crop) if crops else None,
        factor=float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1.0,
        mean=triple(config.get("image_mean"), CLIP_MEAN) if normalizes else (0.0, 0.0, 0.0),
        deviation=triple(config.get("image_std"), CLIP_DEVIATION) if normalizes else (1.0, 1.0, 1.0),
    )


def side(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= LARGEST_SIDE:
        raise invalid(f"preprocessor_config.json has a side of {value!r}: 1 to {LARGEST_SIDE} is possible")
    return value


def side_pair(value: Any) -> tuple[int, int]:
    """(height, width)"""
    if isinstance(value, int):
        return side(value), side(value)
    return side(value.get("height")), side(value.get("width"))


def triple(value: Any, default: tuple[float, ...]) -> tuple[float, ...]:
    if value is None:
        return default
    numbers = tuple(float(each) for each in value)
    if len(numbers) != 3:
        raise invalid("preprocessor_config.json has other than three channels", "UNSUPPORTED_MODEL")
    return numbers
