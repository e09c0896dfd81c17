"""What was asked in the playground, as a program would ask it."""

from __future__ import annotations

import json
import shlex
from typing import Any, NamedTuple

from appliance.core.settings import Settings

FEW = 3  # texts in an example


class Snippet(NamedTuple):
    title: str
    text: str


HEADER = "Authorization: Bearer $TEI_APPLIANCE_KEY"


def of(task: str, name: str, sent: dict[str, str], host: str, settings: Settings, with_key: bool) -> list[Snippet]:
    """host: as the browser calls this machine. with_key: callers are asked for one."""
    host = f"[{host.strip('[]')}]" if ":" in host else host
    texts = [line.strip() for line in sent.get("texts", "").splitlines() if line.strip()][:FEW]
    path, body = http(task, name, sent, texts)
    scheme = "https" if settings.tls.on else "http"
    url = f"{scheme}://{host}:{settings.http_port}{path}"
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    header = f'-H "{HEADER}" ' if with_key else ""
    curl = f"curl -s {url} {header}-H 'Content-Type: application/json' \\\n    -d {data}"
    sent_along = ', headers={"Authorization": f"Bearer {os.environ[\'TEI_APPLIANCE_KEY\']}"}' if with_key else ""
    needed = "import os\n\nimport requests" if with_key else "import requests"
    python = f"{needed}\n\nreply = requests.post({url!r}, json={body!r}{sent_along})\nprint(reply.json())"
    method, message = rpc(task, name, sent, texts)
    plain = "" if settings.tls.on else "-plaintext "
    grpcurl = (
        f"grpcurl {plain}{header}-d {shlex.quote(json.dumps(message, ensure_ascii=False))} \\\n"
        f"    {host}:{settings.grpc_port} tei_multiplexer.v1.TeiMultiplexer/{method}"
    )
    return [Snippet("curl", curl), Snippet("Python", python), Snippet("grpcurl", grpcurl)]


def http(task: str, name: str, sent: dict[str, str], texts: list[str]) -> tuple[str, dict[str, Any]]:
    if task == "similarity":
        return "/v1/embeddings", {"model": name, "input": texts}
    if task == "rerank":
        return "/v1/rerank", {"model": name, "query": sent.get("query", ""), "documents": texts}
    route = {"sparse": "embed_sparse", "tokens": "tokenize"}[task]
    return f"/instances/{name}/{route}", {"inputs": texts}


def rpc(task: str, name: str, sent: dict[str, str], texts: list[str]) -> tuple[str, dict[str, Any]]:
    first = texts[0] if texts else ""
    method, request = {
        "similarity": ("Embed", {"inputs": first, "normalize": True}),
        "rerank": ("Rerank", {"query": sent.get("query", ""), "texts": texts}),
        "sparse": ("EmbedSparse", {"inputs": first}),
        "tokens": ("Tokenize", {"inputs": first, "add_special_tokens": True}),
    }[task]
    return method, {"target": {"instance_name": name}, "request": request}
