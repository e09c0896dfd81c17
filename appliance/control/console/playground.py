"""The playground: what a model makes of a few texts, and the same call for a program."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import falcon

from appliance.control.console import pictures, snippets
from appliance.control.console.middleware import form
from appliance.control.console.rendering import answer
from appliance.control.console.resource import ConsoleResource
from appliance.core.problems import Kind, Problem, invalid
from appliance.node import overview, servable
from appliance.node.authentication import Authenticator
from appliance.node.context import Node

MOST_TEXTS, MOST_IN_A_MATRIX, NEIGHBOURS = 2000, 16, 10
MOST_AT_ONCE = 2  # of a worker: its other threads manage
TASKS = ("similarity", "rerank", "sparse", "tokens")
FITTING = {
    "embedding": "similarity",
    "sparse": "sparse",
    "reranker": "rerank",
    "classifier": "tokens",
    "multivector": "rerank",
}
EXAMPLE = (
    "How do I reset my password?",
    "I forgot my login credentials",
    "What are your opening hours?",
    "When does the shop close?",
)


def texts_of(sent: dict[str, str], least: int) -> list[str]:
    """One for each line that is not empty. Raises: Problem."""
    texts = [line.strip() for line in sent.get("texts", "").splitlines() if line.strip()]
    if not least <= len(texts) <= MOST_TEXTS:
        raise invalid(f"Write {least} to {MOST_TEXTS} texts, one in each line; these are {len(texts)}")
    return texts


class PlaygroundPage(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        shown = overview.show_all(self.node)
        tasks = {each.name: task_of(each.instance.spec) for each in shown}
        asked = request.get_param("instance") or next((each.name for each in shown if each.status == "running"), "")
        task = request.get_param("task") or tasks.get(asked, TASKS[0])
        values: dict[str, Any] = {
            "instances": shown,
            "asked": asked,
            "task": task if task in TASKS else TASKS[0],
            "tasks": TASKS,
        }
        answer(response, "playground.html", example="\n".join(EXAMPLE), **values, **self.common(request, "playground"))


def task_of(spec: Any) -> str:
    card = servable.card_of(spec)
    return FITTING.get(card.task, TASKS[0]) if card else TASKS[0]


class PlaygroundTask(ConsoleResource):
    """Computes, and changes nothing."""

    permits = threading.BoundedSemaphore(MOST_AT_ONCE)

    def __init__(self, node: Node, authenticator: Authenticator) -> None:
        super().__init__(node, authenticator)
        self.tasks: dict[str, Callable[[Any, str, dict[str, str]], dict[str, Any]]] = {
            "similarity": similarity,
            "rerank": rerank,
            "sparse": sparse,
            "tokens": tokens,
        }

    def on_post(self, request: falcon.Request, response: falcon.Response, task: str) -> None:
        from appliance.control.console.computing import Computing  # only now: grpc takes 20 MB, and few look here

        if task not in self.tasks:
            raise falcon.HTTPNotFound(description=f"There is no task {task}")
        sent = form(request)
        name = sent.get("instance", "")
        self.node.state.read().get(name)
        began = time.monotonic()
        if not self.permits.acquire(blocking=False):
            raise Problem(Kind.UNAVAILABLE, "BUSY", "Others are just trying something here: press again in a moment")
        try:
            with Computing(self.node, request.context.principal.name) as computing:
                values = self.tasks[task](computing, name, sent)
        finally:
            self.permits.release()
        values |= {"took_ms": (time.monotonic() - began) * 1000, "cached": computing.cached}
        values["fingerprint"] = computing.fingerprint
        settings = self.node.settings
        with_key = self.authenticator.keys.current().required
        values["snippets"] = snippets.of(task, name, sent, request.host or "localhost", settings, with_key)
        answer(response, f"playground_{task}.html", **values)


def similarity(computing: Any, name: str, sent: dict[str, str]) -> dict[str, Any]:
    texts = texts_of(sent, 2)
    vectors = computing.embed(name, texts)
    matrix = pictures.similarities(vectors)
    return {
        "texts": texts,
        "width": vectors.shape[1],
        "matrix": pictures.heat(matrix) if len(texts) <= MOST_IN_A_MATRIX else [],
        "neighbours": pictures.neighbours(matrix, NEIGHBOURS),
        "points": pictures.plane(vectors),
        "tokens": computing.tokens,
    }


def rerank(computing: Any, name: str, sent: dict[str, str]) -> dict[str, Any]:
    texts, query = texts_of(sent, 1), sent.get("query", "").strip()
    if not query:
        raise invalid("Write what the texts are to be ranked for")
    return {"query": query, "ranks": [(texts[index], score) for index, score in computing.rerank(name, query, texts)]}


def sparse(computing: Any, name: str, sent: dict[str, str]) -> dict[str, Any]:
    return {"texts": [(text, computing.sparse(name, text)) for text in texts_of(sent, 1)[:MOST_IN_A_MATRIX]]}


def tokens(computing: Any, name: str, sent: dict[str, str]) -> dict[str, Any]:
    longest = computing.longest(name)
    texts = texts_of(sent, 1)[:MOST_IN_A_MATRIX]
    return {"texts": [(text, computing.tokenize(name, text)) for text in texts], "longest": longest}
