"""Numbers that a format cannot hold are refused before an answer begins, however long it would be."""

from types import SimpleNamespace
from typing import Any

import falcon.testing
import numpy as np
import pytest

from appliance.drivers.memory import Reserve
from appliance.gateway import openai
from tests.gateway.test_budget import app


@pytest.mark.parametrize("kind", ["output_dtype", "encoding_format"])
@pytest.mark.parametrize("rows", [1, 5000])
def test_what_float16_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch, rows: int, kind: str) -> None:
    """It was an internal error, and with many rows one in the midst of a success."""
    calls = SimpleNamespace(usage=None)
    block = np.zeros((rows, 4), np.float32)
    block[-1] = 1e5
    resource: Any = openai.OpenAIEmbeddingsResource
    monkeypatch.setattr(resource, "select", lambda *_: SimpleNamespace(first=None, auto_truncate=True))
    monkeypatch.setattr(resource, "calls", lambda *_: calls)
    monkeypatch.setattr(resource, "refuse_text_model", lambda *_: None)
    monkeypatch.setattr(openai, "dense", lambda *_, **__: [block])
    body = {"input": "a", "model": "m", "prompt_name": "query", "output_dtype": "float16", "normalize": False}
    if kind == "encoding_format":
        body["encoding_format"] = "base64"
    reply = falcon.testing.TestClient(app(Reserve(2**30))).simulate_post("/v1/embeddings", json=body)
    assert reply.status_code == 400, reply.text
    assert "float16 ends at 65504" in reply.json["error"]["message"]
