"""Unmodified clients of others, each in a process of its own with its own packages (.venv-clients, `make clients`)."""

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

ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
TEXTS = ["hello world", "a rather longer text about nothing in particular", "bonjour"]
VECTORS = (
    "openai_floats openai_default_encoding openai_async hub_feature_extraction langchain_openai langchain_tei "
    "llamaindex_openai"
).split()


def run(*command: str, **variables: str) -> str:
    environ = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    quiet = {"LANGSMITH_TRACING": "false", "HF_HUB_DISABLE_TELEMETRY": "1"}
    found = subprocess.run(
        command, env={**environ, **quiet, **variables}, capture_output=True, text=True, timeout=100, cwd=ROOT
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


@pytest.mark.parametrize("name", ["cohere_v1", "cohere_v2"])
def test_cohere_client_gets_the_scores_of_the_grpc_path(zoo: Http, name: str) -> None:
    request = tei.RerankRequest(query=TEXTS[0], texts=TEXTS, truncate=True)
    target = mux.Target(instance_name="reranker")
    ranks = zoo.running.stub().Rerank(mux.RerankRequest(target=target, request=request)).ranks
    wanted = sorted([rank.index, rank.score] for rank in ranks)
    np.testing.assert_allclose(np.array(program(zoo, name)), np.array(wanted), atol=1e-6)


def test_openai_client_knows_our_errors(zoo: Http) -> None:
    missing, empty, models, one = program(zoo, "openai_errors")
    assert missing == ["NotFoundError", "model_not_found"]
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


def test_curl_example_runs(zoo: Http) -> None:
    printed = run(str(ROOT / "examples" / "curl.sh"), TEI_GATEWAY=zoo.url)
    lines = [json.loads(line) for line in printed.splitlines()]
    assert len(lines) == 7
    assert lines[4] == ["hello world"]
