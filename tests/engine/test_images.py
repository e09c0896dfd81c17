"""Images against the pixels and vectors of transformers (scripts/reference_images.py); damaged and hostile ones."""

import io
import json
import random
import shutil
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from PIL import Image

from appliance.core import preprocessing
from appliance.core.preprocessing import LARGEST_IMAGE
from appliance.core.problems import Problem
from appliance.drivers.modelfolder import read_card
from appliance.engine.images import MOST_PIXELS, ImageReader
from appliance.engine.model import LoadedModel
from appliance.engine.runtime import ImageRuntime
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_appliance.v1.images_pb2 import EmbedImageRequest
from testing.engines import FAMILIES, IMAGES, ServedModel

SAMPLES = {path.name: path.read_bytes() for path in sorted((IMAGES / "samples").iterdir())}
NAMES = ["clip", "siglip"]
DAMAGED = 10_000


def expected(name: str) -> Any:
    return json.loads((IMAGES / name / "expected.json").read_text())


def reader(name: str) -> ImageReader:
    return ImageReader(preprocessing.parse(json.loads((IMAGES / name / "preprocessor_config.json").read_text())), 16)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    room = tmp_path_factory.mktemp("graphs")
    running = {name: ServedModel(IMAGES / name, room) for name in NAMES}
    running["bert"] = ServedModel(FAMILIES / "bert-cls", room)
    yield running
    for each in running.values():
        each.stop()


@pytest.mark.parametrize("file", SAMPLES)
@pytest.mark.parametrize("name", NAMES)
def test_pixels_are_those_of_transformers(name: str, file: str) -> None:
    """JPEGs, alpha, palettes, greys, CMYK, EXIF's turns, the first frame: to a step of 1/255."""
    wanted = np.array(expected(name)["pixels"][file], np.float32).reshape(3, 32, 32)
    found = reader(name).read(SAMPLES[file]).values
    deviation = np.array(preprocessing.CLIP_DEVIATION if name == "clip" else (0.5,) * 3)[:, None, None]
    assert (np.abs(found - wanted) * deviation).max() <= 1 / 255 + 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_vectors_of_images_are_those_of_transformers(served: Any, name: str) -> None:
    wanted = expected(name)["images"]
    requests = (EmbedImageRequest(image=raw) for raw in SAMPLES.values())
    replies = served[name].images().EmbedImageStream(requests)
    for file, reply in zip(SAMPLES, replies, strict=True):
        single = served[name].images().EmbedImage(EmbedImageRequest(image=SAMPLES[file]))
        np.testing.assert_allclose(reply.embeddings, single.embeddings, atol=1e-5)
        assert np.dot(reply.embeddings, wanted[file]) > 0.9999
        np.testing.assert_allclose(reply.embeddings, wanted[file], atol=2e-3)  # pixels may differ by a step
        assert reply.metadata.compute_tokens == 16


@pytest.mark.parametrize("name", NAMES)
def test_int8_is_near_for_images_too(tmp_path: Path, name: str) -> None:
    card = read_card(IMAGES / name)
    pixels = np.stack([reader(name).read(raw).values for raw in SAMPLES.values()])
    exact, small = (ImageRuntime(card, tmp_path, 1, "onnxruntime", dtype).run(pixels) for dtype in (None, "int8"))
    assert not np.array_equal(exact, small)
    cosines = (exact * small).sum(axis=1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(small, axis=1)
    assert cosines.min() > 0.99


@pytest.mark.parametrize("name", NAMES)
def test_vectors_of_texts_are_those_of_transformers(served: Any, name: str) -> None:
    wanted = expected(name)
    requests = [tei.EmbedRequest(inputs=text, truncate=True) for text in wanted["texts"]]
    found = [reply.embeddings for reply in served[name].stub("Embed").EmbedStream(iter(requests))]
    np.testing.assert_allclose(found, wanted["text"], atol=1e-5)


@pytest.mark.parametrize("pad", ["<unk>", {"content": "<unk>"}, "no such token"])
def test_texts_are_filled_up_with_the_tokenizer_s_own_padding(tmp_path: Path, pad: Any) -> None:
    """SigLIP 2 has another one than SigLIP, and its config.json does not say so."""
    folder = tmp_path / "siglip"
    shutil.copytree(IMAGES / "siglip", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": pad}))
    tokens = LoadedModel(folder, tmp_path / "graphs", threads=1).tokens
    ids = tokens.encode("rain", truncate=True).ids
    assert len(ids) == 24
    assert ids[-1] == (1 if pad == "no such token" else tokens.tokenizer.token_to_id("<unk>"))


def test_options_are_those_of_texts(served: Any) -> None:
    embed = served["clip"].images().EmbedImage
    raw = SAMPLES["photo.jpg"]
    long = np.array(embed(EmbedImageRequest(image=raw, normalize=False)).embeddings)
    unit = np.array(embed(EmbedImageRequest(image=raw)).embeddings)
    np.testing.assert_allclose(long / np.linalg.norm(long), unit, atol=1e-6)
    short = np.array(embed(EmbedImageRequest(image=raw, dimensions=6)).embeddings)
    np.testing.assert_allclose(short, long[:6] / np.linalg.norm(long[:6]), atol=1e-6)


def refusal(call: Any, request: Any) -> tuple[Any, str]:
    with pytest.raises(grpc.RpcError) as failed:
        call(request)
    return failed.value.code(), str(failed.value.details())


def test_a_model_of_texts_takes_no_image(served: Any) -> None:
    code, words = refusal(served["bert"].images().EmbedImage, EmbedImageRequest(image=SAMPLES["photo.jpg"]))
    assert (code, "takes no images" in words) == (grpc.StatusCode.FAILED_PRECONDITION, True)


def png(width: int, height: int, content: bytes = b"") -> bytes:
    """A PNG that says it is so large; its content need not be."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(content)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
HOSTILE = {
    "empty": (b"", "is empty"),
    "text": (b"hello", "cannot be read"),
    "svg": (SVG, "cannot be read"),
    "pdf": (b"%PDF-1.4 ...", "cannot be read"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be read"),
    "a bomb of 4 gigapixels": (png(65535, 65535), "far more than the 40000000 pixels"),
    "one above the limit": (png(MOST_PIXELS + 1, 1), "pixels: at most"),
    "too narrow": (png(200, 1, b"\0" * 601), "too narrow"),
    "cut off": (SAMPLES["photo.jpg"][:400], "cannot be read"),
    "too long": (b"\xff\xd8" + bytes(LARGEST_IMAGE), "at most"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_images_are_refused_by_name(served: Any, kind: str) -> None:
    raw, words = HOSTILE[kind]
    code, details = refusal(served["clip"].images().EmbedImage, EmbedImageRequest(image=raw))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in details, details


def test_damaged_images_are_refused_and_nothing_else() -> None:
    """Ten thousand: bytes changed, cut out, doubled. Each gives pixels or a Problem, and memory stays where it was."""
    generator, one = random.Random(7), reader("clip")
    files = list(SAMPLES.values())
    outcomes = {True: 0, False: 0}
    before = 0
    for number in range(DAMAGED):
        if number == DAMAGED // 10:
            before = psutil.Process().memory_info().rss
        try:
            values = one.read(damaged(generator, files)).values
            assert values.shape == (3, 32, 32)
            assert np.isfinite(values).all()
            outcomes[True] += 1
        except Problem:
            outcomes[False] += 1
    assert min(outcomes.values()) > DAMAGED / 20
    assert psutil.Process().memory_info().rss - before < 150 * 2**20


def damaged(generator: random.Random, files: list[bytes]) -> bytes:
    raw = bytearray(generator.choice(files))
    for _ in range(generator.choice((1, 2, 4, 16))):
        at, length = generator.randrange(len(raw)), generator.randrange(1, 9)
        kind = generator.randrange(5)
        if kind == 0:
            raw[at : at + length] = generator.randbytes(length)
        elif kind == 1:
            raw[at] ^= 1 << generator.randrange(8)
        elif kind == 2 and len(raw) > 64:
            del raw[at : at + length]
        elif kind == 3:
            raw[at:at] = raw[at : at + length]
        else:
            raw[at : at + 4] = struct.pack("<I", generator.choice((0, 1, 2**15, 2**31 - 1, 2**32 - 1)))
    return bytes(raw)


def test_sixteen_bits_of_grey_are_not_cut_off() -> None:
    ramp = np.linspace(0, 65535, 32 * 32).reshape(32, 32).astype(np.uint16)
    file = io.BytesIO()
    Image.fromarray(ramp).save(file, "PNG")
    values = reader("siglip").read(file.getvalue()).values
    np.testing.assert_allclose(values[0], ramp / 65535 * 2 - 1, atol=0.02)


@pytest.mark.parametrize("mode", ["I;16", "RGBA"])
def test_a_large_image_takes_some_ten_bytes_a_pixel(mode: str) -> None:
    """Grey of 16 bits and colours with alpha, of which each step could be a copy of eight bytes a pixel."""
    side, file = 3000, io.BytesIO()
    Image.new(mode, (side, side)).save(file, "PNG")
    process, ended, peaks = psutil.Process(), threading.Event(), [0]
    before = process.memory_info().rss

    def watch() -> None:
        while not ended.wait(0.002):
            peaks.append(process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    reader("clip").read(file.getvalue())
    ended.set()
    watcher.join()
    assert max(peaks) - before < 14 * side**2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"size": {"shortest_edge": 0}}, "a side of 0"),
        ({"size": {"height": 32}}, "a side of None"),
        ({"crop_size": "x"}, "of the wrong shape"),
        ({"resample": 9}, "unknown filter 9"),
        ({"resample": float("inf")}, "of the wrong shape"),
        ({"image_mean": [0.5]}, "three channels"),
    ],
)
def test_a_wrong_preprocessor_is_refused(tmp_path: Path, config: Any, words: str) -> None:
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / file).write_bytes((IMAGES / "clip" / file).read_bytes())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    with pytest.raises(Problem, match=words):
        LoadedModel(tmp_path, tmp_path / "graphs", threads=1)
