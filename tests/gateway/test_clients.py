"""Unmodified clients of others, each in a process of its own with its own packages (.venv-clients, `make clients`)."""

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from tests.gateway.conftest import Http

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
TEXTS = ["hello world", "a rather longer text about nothing in particular", "bonjour"]
VECTORS = (
    "openai_floats openai_default_encoding openai_async azure hub_feature_extraction langchain_openai langchain_tei "
    "langchain_ollama llamaindex_openai cohere_v1_embed ollama_embed infinity_embed"
).split()


def run(*command: str, **variables: str) -> str:
    environ = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    quiet = {"LANGSMITH_TRACING": "false", "HF_HUB_DISABLE_TELEMETRY": "1"}
    found = subprocess.run(
        command, env={**environ, **quiet, **variables}, capture_output=True, text=True, timeout=500, cwd=ROOT
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


def program(zoo: Http, name: str, texts: list[str] = TEXTS) -> Any:
    script = str(ROOT / "tests" / "gateway" / "client_programs.py")
    return json.loads(run(str(PYTHON), script, name, zoo.url, json.dumps(texts)).splitlines()[-1])


def by_grpc(zoo: Http, texts: list[str]) -> np.ndarray:
    target, stub = mux.Target(instance_name="minilm"), zoo.running.stub()
    requests = [tei.EmbedRequest(inputs=text, truncate=True, normalize=True) for text in texts]
    return np.array([stub.Embed(mux.EmbedRequest(target=target, request=request)).embeddings for request in requests])


@pytest.mark.parametrize("name", VECTORS)
def test_client_gets_the_vectors_of_the_grpc_path(zoo: Http, name: str) -> None:
    np.testing.assert_allclose(np.array(program(zoo, name)), by_grpc(zoo, TEXTS), atol=2e-6)


def test_llamaindex_tei_puts_its_instruction_in_front(zoo: Http) -> None:
    found = np.array(program(zoo, "llamaindex_tei"))
    np.testing.assert_allclose(found, by_grpc(zoo, TEXTS), atol=2e-5)


@pytest.mark.parametrize("name", ["cohere_v1", "cohere_v2", "infinity_rerank"])
def test_client_gets_the_ranks_of_the_grpc_path(zoo: Http, name: str) -> None:
    request = tei.RerankRequest(query=TEXTS[0], texts=TEXTS, truncate=True)
    target = mux.Target(instance_name="reranker")
    ranks = zoo.running.stub().Rerank(mux.RerankRequest(target=target, request=request)).ranks
    wanted = [[rank.index, rank.score] for rank in ranks]  # the best first
    assert [index for index, _ in wanted] != [0, 1, 2]
    np.testing.assert_allclose(np.array(program(zoo, name)), np.array(wanted), atol=1e-6)


def test_cohere_client_gets_every_type_of_the_same_vectors(zoo: Http) -> None:
    found = program(zoo, "cohere_types")
    data = zoo.post("/v1/embeddings", {"model": "minilm", "input": TEXTS}).json()["data"]
    wanted = np.array([item["embedding"] for item in data], np.float32)
    assert wanted.shape == (3, 384)
    np.testing.assert_allclose(found["float"], wanted, atol=2e-6)
    decoded = [np.frombuffer(base64.b64decode(row), "<f4") for row in found["base64"]]
    np.testing.assert_allclose(decoded, wanted, atol=2e-6)
    np.testing.assert_allclose(np.array(found["int8"]) / 127, wanted, atol=0.5 / 127 + 1e-6)
    np.testing.assert_array_equal(np.array(found["uint8"]) - 128, found["int8"])
    np.testing.assert_array_equal(found["ubinary"], np.packbits(wanted > 0, axis=1))
    np.testing.assert_array_equal(np.array(found["binary"]) + 128, found["ubinary"])


def test_the_hubs_client_gets_similarities(zoo: Http) -> None:
    source, *_ = vectors = np.array(by_grpc(zoo, TEXTS))
    np.testing.assert_allclose(program(zoo, "hub_similarity"), vectors @ source, atol=1e-5)


def test_ollama_client_lists_shows_and_embeds_as_before(zoo: Http) -> None:
    missing, models, capabilities, old = program(zoo, "ollama_others")
    assert missing == 404
    assert set(models) == {"classifier:latest", "minilm:latest", "reranker:latest", "sparse:latest"}
    assert all(size > 0 for size in models.values())
    assert capabilities == ["embedding"]
    lengths = np.linalg.norm(old, axis=1, keepdims=True)
    assert (lengths > 1.1).all()  # the older route's vectors are as the model gives them
    np.testing.assert_allclose(np.array(old) / lengths, by_grpc(zoo, TEXTS), atol=2e-6)


def test_openai_client_knows_our_errors(zoo: Http) -> None:
    missing, empty, models, one = program(zoo, "openai_errors")
    assert missing == ["NotFoundError", "model_not_found"]
    refused = zoo.post("/v1/embeddings", {"model": "nobody", "input": "a"}).json()
    assert refused["detail"] == refused["error"]["message"]  # all that Voyage's and Jina's clients read
    assert empty == ["BadRequestError", "empty"]
    assert "minilm" in models
    assert one == "minilm"


def test_newest_hub_client_too(zoo: Http) -> None:
    """The huggingface_hub of our own environment, which is newer than what LangChain allows."""
    client = InferenceClient(model=f"{zoo.url}/instances/minilm")
    found = np.array([client.feature_extraction(text)[0] for text in TEXTS])
    np.testing.assert_allclose(found, by_grpc(zoo, TEXTS), atol=2e-6)


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_example_runs(zoo: Http, script: str) -> None:
    printed = run(str(PYTHON), str(ROOT / "examples" / script), TEI_GATEWAY=zoo.url)
    assert "384" in printed or "candidates:" in printed


def test_code_search_finds_code_by_what_it_does(zoo: Http, tmp_path: Path) -> None:
    """The demonstration over an appliance; the examples are what it searches."""
    python = str(ROOT / ".venv-demo" / "bin" / "python")
    arguments = (zoo.url, str(ROOT / "examples"), str(tmp_path))
    printed = run(python, "-m", "tests.examples.code_search_appliance", *arguments)
    total, written, there, nearest, reranked = json.loads(printed.splitlines()[-1])
    assert total == written == there > 50
    assert nearest[0] == "retrieve_then_rerank.py"
    assert len(reranked) == 3


def test_curl_example_runs(zoo: Http) -> None:
    printed = run(str(ROOT / "examples" / "curl.sh"), TEI_GATEWAY=zoo.url)
    lines = [json.loads(line) for line in printed.splitlines()]
    assert len(lines) == 7
    assert lines[4] == ["hello world"]
