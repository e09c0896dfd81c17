"""Images over HTTP: among the texts of TEI's, OpenAI's and Jina's routes, as base64, data URLs and URLs."""

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import requests

from testing.arrows import ipc
from testing.engines import FAMILIES, IMAGES
from testing.running import RunningAppliance
from tests.gateway.conftest import Http

pytestmark = pytest.mark.processes

SAMPLES = {path.name: path.read_bytes() for path in sorted((IMAGES / "samples").iterdir())}
PHOTO, SMALL = SAMPLES["photo.jpg"], SAMPLES["small.png"]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Http]:
    with RunningAppliance(tmp_path_factory.mktemp("images"), seeds="") as appliance:
        appliance.create("clip", model_id=str(IMAGES / "clip"))
        appliance.create("texts", model_id=str(FAMILIES / "bert-cls"))
        for name in ("clip", "texts"):
            appliance.wait_ready(name)
        yield Http(appliance)


def b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def ok(answer: Any) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def embed(http: Http, inputs: Any, **fields: Any) -> np.ndarray:
    return np.array(ok(http.post("/instances/clip/embed", {"inputs": inputs, **fields})))


@pytest.fixture(scope="module")
def vectors(http: Http) -> dict[Any, np.ndarray]:
    """One by one: of the samples, and of a text."""
    found: dict[Any, np.ndarray] = {
        raw: embed(http, {"type": "image", "data": b64(raw)})[0] for raw in SAMPLES.values()
    }
    return found | {"rain": embed(http, "rain")[0]}


def test_texts_and_images_are_mixed_in_order(http: Http, vectors: Any) -> None:
    inputs = [
        {"type": "text", "value": "rain"},
        {"type": "image", "data": b64(PHOTO)},
        "rain",
        {"image": f"data:image/png;base64,{b64(SMALL)}"},
        {"text": "rain"},
    ]
    wanted = ["rain", PHOTO, "rain", SMALL, "rain"]
    np.testing.assert_allclose(embed(http, inputs), [vectors[each] for each in wanted], atol=1e-5)


@pytest.mark.parametrize("path", ["/instances/clip/", "/instances/clip/invocations"])
def test_the_route_of_a_single_model_takes_one(http: Http, vectors: Any, path: str) -> None:
    found = ok(http.post(path, {"inputs": {"type": "image", "data": b64(PHOTO)}}))
    np.testing.assert_allclose(found, [vectors[PHOTO]], atol=1e-5)


def test_many_images_travel_as_one_batch(http: Http, vectors: Any) -> None:
    images = list(SAMPLES.values()) * 3
    found = embed(http, [{"type": "image", "data": b64(raw)} for raw in images])
    np.testing.assert_allclose(found, [vectors[raw] for raw in images], atol=1e-5)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_openai_s_and_jina_s_route_takes_them_too(http: Http, vectors: Any, encoding: str) -> None:
    body = {"model": "clip", "input": [{"image": b64(PHOTO)}, {"text": "rain"}], "encoding_format": encoding}
    answer = ok(http.post("/v1/embeddings", body))
    found = [each["embedding"] for each in answer["data"]]
    rows = [np.frombuffer(base64.b64decode(row), "<f4") if encoding == "base64" else row for row in found]
    np.testing.assert_allclose(rows, [vectors[PHOTO], vectors["rain"]], atol=1e-5)
    assert answer["usage"]["prompt_tokens"] > 16


def test_cohere_s_route_takes_them_too(http: Http, vectors: Any) -> None:
    url = f"data:image/jpeg;base64,{b64(PHOTO)}"
    body = {"model": "clip", "images": [url], "input_type": "image", "embedding_types": ["float"]}
    found = ok(http.post("/v2/embed", body))
    np.testing.assert_allclose(found["embeddings"]["float"], [vectors[PHOTO]], atol=1e-5)
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "rain"}]
    inputs = [{"content": [part]} for part in parts]
    mixed = ok(http.post("/v2/embed", {"model": "clip", "inputs": inputs, "embedding_types": ["float"]}))
    np.testing.assert_allclose(mixed["embeddings"]["float"], [vectors[PHOTO], vectors["rain"]], atol=1e-5)
    assert mixed["texts"] == ["rain"]
    both = http.post("/v2/embed", {**body, "texts": ["rain"]})  # none of them is left out silently
    assert both.status_code == 400
    assert "`images` cannot stand beside `texts`" in both.text


def test_options_are_those_of_texts(http: Http, vectors: Any) -> None:
    found = embed(http, [{"image": b64(PHOTO)}, {"image": b64(SMALL)}], dimensions=8, output_dtype="int8")
    wanted = vectors[PHOTO][:8] / np.linalg.norm(vectors[PHOTO][:8])
    np.testing.assert_allclose(found[0] / 127, wanted, atol=1 / 127)


def test_a_column_of_bytes_is_a_column_of_images(http: Http, vectors: Any) -> None:
    body = ipc(pa.table({"image": pa.array([PHOTO, None, SMALL], pa.binary())}))
    kind = {"Content-Type": "application/vnd.apache.arrow.stream"}
    answer = requests.post(f"{http.url}/embed?model=clip", body, headers=kind, timeout=60)
    assert answer.status_code == 200, answer.text
    rows = pa.ipc.open_stream(answer.content).read_all().column("embeddings").to_pylist()
    assert rows[1] is None
    np.testing.assert_allclose([rows[0], rows[2]], [vectors[PHOTO], vectors[SMALL]], atol=1e-5)


@pytest.mark.parametrize(
    ("inputs", "status", "words"),
    [
        ({"type": "image"}, 422, "an image without its content"),
        ({"type": "image", "data": ""}, 422, "an image without its content"),
        ({"type": "image", "data": "x", "url": "y"}, 422, "an image without its content"),
        ([{"image": 7}], 422, "an image without its content"),
        ([{"image": "no base64!"}], 422, "neither base64, nor a data URL"),
        ([{"image": "data:image/png;base64,"}], 422, "has 0 bytes"),
        ([{"type": "video", "data": "x"}], 422, "must hold texts and images"),
        ([101, 102, {"image": b64(PHOTO)}], 422, "entry 0 is 101"),
        (["a", {"image": b64(PHOTO)}, ""], 400, "(input 2)"),
        ([{"type": "text"}], 422, "must hold texts and images"),
        (["a", {"image": b64(b"no image")}], 422, "cannot be read"),
        (["a", {"image": "https://example.com/a.png"}], 422, "URLs of images are off"),
        ([{"image": b64(PHOTO)}, ""], 400, "cannot be empty"),
        ([{"image": b64(PHOTO)}] * 1001, 422, "1001 images > maximum of 1000"),
    ],
)
def test_what_is_no_image_is_refused_by_name(http: Http, inputs: Any, status: int, words: str) -> None:
    answer = http.post("/instances/clip/embed", {"inputs": inputs})
    assert (answer.status_code, words in answer.text) == (status, True), answer.text


def test_the_place_of_a_damaged_image_is_named(http: Http) -> None:
    damaged = {"image": b64(PHOTO[:300])}
    mixed = http.post("/instances/clip/embed", {"inputs": ["a", "b", {"image": b64(PHOTO)}, damaged]})
    assert (mixed.status_code, "(input 3)" in mixed.text) == (422, True), mixed.text
    images = http.post("/instances/clip/embed", {"inputs": [{"image": b64(PHOTO)}, damaged]})
    assert (images.status_code, "(input 1)" in images.text) == (422, True), images.text


def test_ids_of_tokens_may_stand_beside_images(http: Http, vectors: Any) -> None:
    found = embed(http, [[5, 6, 7], {"image": b64(PHOTO)}])
    np.testing.assert_allclose(found[1], vectors[PHOTO], atol=1e-5)


def test_images_have_a_limit_together(http: Http) -> None:
    large = PHOTO + bytes(17 * 2**20)
    answer = http.post("/instances/clip/embed", {"inputs": [{"image": b64(large)}] * 3})
    assert answer.status_code == 413  # as the body, or as what is in it


def test_a_model_of_texts_says_so(http: Http) -> None:
    answer = http.post("/instances/texts/embed", {"inputs": [{"image": b64(PHOTO)}]})
    assert (answer.status_code, "takes no images" in answer.text) == (424, True)
