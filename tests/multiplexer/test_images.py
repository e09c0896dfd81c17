"""Images through the multiplexer: single ones, streams, and whole Arrow batches of a binary column."""

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pytest

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_appliance.v1.engine_pb2_grpc import ImagesStub
from appliance.wire.tei_appliance.v1.images_pb2 import EmbedImageRequest
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.arrows import ipc, rows
from testing.engines import FAMILIES, IMAGES
from testing.running import RunningAppliance

pytestmark = pytest.mark.processes

CODES = grpc.StatusCode
SAMPLES = [path.read_bytes() for path in sorted((IMAGES / "samples").iterdir())]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    with RunningAppliance(tmp_path_factory.mktemp("images"), seeds="") as appliance:
        appliance.create("clip", model_id=str(IMAGES / "clip"), replicas=2)
        appliance.create("texts", model_id=str(FAMILIES / "bert-cls"))
        for name in ("clip", "texts"):
            appliance.wait_ready(name)
        yield appliance


def message(raw: bytes, name: str = "clip", **options: Any) -> mux.EmbedImageRequest:
    inner = EmbedImageRequest(image=raw, **options)
    return mux.EmbedImageRequest(target=mux.Target(instance_name=name), request=inner)


@pytest.fixture(scope="module")
def alone(running: RunningAppliance) -> dict[bytes, np.ndarray]:
    return {raw: np.array(running.stub().EmbedImage(message(raw), timeout=30).embeddings) for raw in SAMPLES}


def arrow(column: Any, name: str = "image", **fields: Any) -> mux.EmbedArrowRequest:
    table = pa.table({"id": pa.array(range(len(column))), name: column})
    target = mux.Target(instance_name=fields.pop("to", "clip"))
    return mux.EmbedArrowRequest(target=target, arrow_ipc=ipc(table), normalize=True, **fields)


def test_streams_answer_in_order(running: RunningAppliance, alone: Any) -> None:
    replies = running.stub().EmbedImageStream((message(raw) for raw in SAMPLES), timeout=60)
    for raw, reply in zip(SAMPLES, replies, strict=True):
        np.testing.assert_allclose(reply.embeddings, alone[raw], atol=1e-5)


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_whole_batches_come_back_row_for_row(running: RunningAppliance, alone: Any, kind: pa.DataType) -> None:
    """Twice the same, and null rows; the type of the column decides, whatever its name."""
    images = [*SAMPLES, None, *SAMPLES[::-1], None]
    found = rows(running.stub().EmbedArrow(arrow(pa.array(images, kind), "picture"), timeout=60))
    assert found.schema.field(0).type == pa.list_(pa.field("item", pa.float32(), False), 24)
    for raw, row in zip(images, found.column(0).to_pylist(), strict=True):
        assert (row is None) == (raw is None)
        if raw is not None:
            np.testing.assert_allclose(row, alone[raw], atol=1e-5)


def test_options_of_a_batch_are_those_of_texts(running: RunningAppliance, alone: Any) -> None:
    request = arrow(pa.array(SAMPLES[:2]), dimensions=8, output_dtype=mux.OUTPUT_DTYPE_FLOAT16)
    found = rows(running.stub().EmbedArrow(request, timeout=60)).column(0)
    assert found.type.value_type == pa.float16()
    wanted = alone[SAMPLES[0]][:8]
    np.testing.assert_allclose(found[0].as_py(), wanted / np.linalg.norm(wanted), atol=1e-3)


def test_texts_of_the_same_model_are_embedded_beside(running: RunningAppliance) -> None:
    inner = tei.EmbedRequest(inputs="rain", truncate=True, normalize=True)
    single = running.stub().Embed(mux.EmbedRequest(target=mux.Target(instance_name="clip"), request=inner), timeout=30)
    both = arrow(pa.array(["rain"]), "text", truncate=True)
    found = rows(running.stub().EmbedArrow(both, timeout=30)).column(0)
    np.testing.assert_allclose(found[0].as_py(), single.embeddings, atol=1e-5)


def refusal(call: Any) -> tuple[Any, str, dict[str, Any]]:
    with pytest.raises(grpc.RpcError) as failed:
        call()
    return failed.value.code(), str(failed.value.details()), dict(failed.value.trailing_metadata())


def test_a_damaged_image_fails_the_call_with_its_row(running: RunningAppliance) -> None:
    batch = arrow(pa.array([SAMPLES[0], b"no image", SAMPLES[1]]))
    code, words, trailing = refusal(lambda: running.stub().EmbedArrow(batch, timeout=30))
    assert (code, trailing["x-arrow-error-row"]) == (CODES.INVALID_ARGUMENT, "1")
    assert "the image cannot be read" in words


def test_damaged_images_are_null_rows_when_asked(running: RunningAppliance, alone: Any) -> None:
    metadata = (("x-arrow-on-error", "null"),)
    batch = arrow(pa.array([b"no image", SAMPLES[0]]))
    found = rows(running.stub().EmbedArrow(batch, metadata=metadata, timeout=30))
    assert found.column("embeddings")[0].as_py() is None
    np.testing.assert_allclose(found.column("embeddings")[1].as_py(), alone[SAMPLES[0]], atol=1e-5)
    errors = found.column("error").to_pylist()
    assert "the image cannot be read" in errors[0]
    assert errors[1] is None
    none = rows(running.stub().EmbedArrow(arrow(pa.array([b"x", None])), metadata=metadata, timeout=30))
    assert none.column("embeddings").to_pylist() == [None, None]


def test_who_has_no_images_says_so(running: RunningAppliance) -> None:
    stub = running.stub()
    code, words, _ = refusal(lambda: stub.EmbedImage(message(SAMPLES[0], "texts"), timeout=30))
    assert (code, "takes no images" in words) == (CODES.FAILED_PRECONDITION, True)
    code, words, _ = refusal(lambda: stub.EmbedArrow(arrow(pa.array(SAMPLES[:1]), to="texts"), timeout=30))
    assert (code, "takes no images" in words) == (CODES.FAILED_PRECONDITION, True)
    sparse = mux.EmbedSparseArrowRequest(target=mux.Target(instance_name="clip"))
    sparse.arrow_ipc = ipc(pa.table({"image": pa.array(SAMPLES[:1])}))
    code, words, _ = refusal(lambda: stub.EmbedSparseArrow(sparse, timeout=30))
    assert (code, "dense vectors alone" in words) == (CODES.INVALID_ARGUMENT, True)


def test_the_engine_s_own_service_takes_the_target_from_the_metadata(running: RunningAppliance, alone: Any) -> None:
    """As a peer calls, who asks for nothing but what its replicas have."""
    with grpc.insecure_channel(f"127.0.0.1:{running.grpc_port}") as channel:
        reply = ImagesStub(channel).EmbedImage(
            EmbedImageRequest(image=SAMPLES[0]), metadata=(("x-tei-instance", "clip"),), timeout=30
        )
    np.testing.assert_allclose(reply.embeddings, alone[SAMPLES[0]], atol=1e-5)


def test_a_replica_that_dies_loses_no_image(running: RunningAppliance, alone: Any) -> None:
    batch = arrow(pa.array(SAMPLES * 20))
    call = running.stub().EmbedArrow.future(batch, timeout=60)
    running.processes_of("clip", 0)[0].kill()
    found = rows(call.result()).column(0).to_pylist()
    for raw, row in zip(SAMPLES * 20, found, strict=True):
        np.testing.assert_allclose(row, alone[raw], atol=1e-5)
    running.wait_ready("clip")
