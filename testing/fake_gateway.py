"""A gateway for programs that ask one: it embeds by counting words, and fails, is busy and remembers as a test says."""

import base64
import json
import re
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

WIDTH = 64


class FakeGateway:
    """Has the model `minilm` and the reranker `reranker`, whose score is the length of the document.

    texts: all that were embedded, in order. plan: for requests to come, `busy` (429), `broken` (500), `halt`
    (until ``goes_on``), `ok`, or another reply as text; then all is well. cache: whether answers say `x-tei-cache`.
    width: of the vectors. port: where it listens; 0 is a free one.
    """

    def __init__(self, port: int = 0) -> None:
        self.texts: list[str] = []
        self.plan: list[str] = []
        self.known: set[str] = set()
        self.cache = True
        self.width = WIDTH
        self.halted, self.goes_on = threading.Event(), threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], object]:
        step = self.plan.pop(0) if self.plan else "ok"
        if step == "busy":
            return 429, {"Retry-After": "1"}, {"error": {"message": "All replicas are full."}}
        if step == "broken":
            return 500, {}, {"error": {"message": "The model failed."}}
        if step == "halt":
            self.halted.set()
            self.goes_on.wait(300)
        elif step != "ok":
            return 200, {}, step
        if body["model"] not in ("minilm", "reranker"):
            return 404, {}, {"error": {"message": f"There is no {body['model']}; there are minilm, reranker."}}
        if path == "/v1/rerank":
            ranks = [{"index": at, "relevance_score": len(text)} for at, text in enumerate(body["documents"])]
            return 200, {}, {"results": ranks[::-1]}
        texts = body["input"]
        hits = sum(text in self.known for text in texts)
        self.known.update(texts)
        self.texts += texts
        one = "hit" if hits else "miss"
        told = one if len(texts) == 1 else f"hits={hits}, misses={len(texts) - hits}"
        rows = [{"index": at, "embedding": self.vector(text)} for at, text in enumerate(texts)]
        # The order is the client's business: it has the index of each.
        return 200, {"x-tei-cache": told} if self.cache else {}, {"data": rows[::-1]}

    def vector(self, text: str) -> str:
        counts = np.full(self.width, 1e-3, "<f4")
        for word in re.findall(r"[a-z]+", text.lower()):
            counts[zlib.crc32(word.encode()) % self.width] += 1
        return base64.b64encode((counts / np.linalg.norm(counts)).tobytes()).decode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, headers, found = gateway.answer(self.path, body)
                raw = found.encode() if isinstance(found, str) else json.dumps(found).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(raw))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        return Handler
