"""Every status that the page of the HTTP interfaces tells is proved: by a request here, or by tests that it names.

`ASKED` has a request for each status of each route that one request provokes; `test_docs_running` sends them. What is
left over stands in `SELDOM` and `LEFT`, and is held against the code's own tables by `test_docs_answers`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from appliance.gateway.openapi import EXAMPLES
from appliance.gateway.routes import ROUTES as SERVING
from appliance.gateway.routes import TEI
from testing.engines import FAMILIES
from testing.running import MINILM
from tests.pages import PAGES, planted
from tests.test_docs_answers import CLAIMED, claimed

MODEL = f"/models/{MINILM.replace('/', '%2F')}"
OWN = {"name": "told", "model_id": str(FAMILIES / "bert-rerank")}
BENCH = "/instances/{name}/bench"
JSON = {"Content-Type": "application/json"}
Key = tuple[int, str, str]  # port, method, path as the page has it


class Asked(NamedTuple):
    """A request, and the status that it gets. route: as the page has it, where the path is of another form."""

    port: int
    method: str
    path: str
    status: int
    body: Any = None
    headers: dict[str, str] | None = None
    route: str = ""

    @property
    def key(self) -> Key:
        return self.port, self.method, self.route or self.path.partition("?")[0]


def management(method: str, path: str, route: str, **statuses: Any) -> Iterator[Asked]:
    """One request for each status, by what follows the path: `s200=""`."""
    for name, rest in statuses.items():
        yield Asked(9000, method, f"{path}{rest}", int(name[1:]), route=route)


def bodies(path: str, route: str, good: Any, wrong: Any, status: int, method: str = "POST") -> Iterator[Asked]:
    """The refusals that every request with a body has, and one with a field that is wrong."""
    yield Asked(9000, method, path, 400, b"{", JSON, route)
    yield Asked(9000, method, path, 413, b"{}", {**JSON, "Content-Length": "3000000"}, route)
    yield Asked(9000, method, path, 415, b"{}", {"Content-Type": "text/plain"}, route)
    yield Asked(9000, method, path, 422, wrong, None, route)
    if good is not None:
        yield Asked(9000, method, path, status, good, None, route)


MANAGEMENT = [
    *(Asked(9000, "GET", path, 200) for path in ("/health", "/ready", "/metrics", "/instances", "/models", "/gpus")),
    *(Asked(9000, "GET", path, 200) for path in ("/keys", "/events", "/openapi.json", "/doctor")),
    *(Asked(9000, "GET", path, 422) for path in ("/events?since=x", "/events/stream?since=x", "/doctor?fast=true")),
    *bodies("/instances?dry_run=true", "/instances", {**OWN, "name": "dry"}, {"name": "dry"}, 200),
    Asked(9000, "POST", "/instances", 409, {"name": "minilm", "model_id": MINILM}),
    *management("GET", "/instances/", "/instances/{name}", s200="minilm", s404="nobody"),
    *management("DELETE", "/instances/", "/instances/{name}", s404="nobody"),
    *bodies("/instances/minilm", "/instances/{name}", {}, {"replicas": 700}, 200, "PATCH"),
    *bodies("/instances/minilm", "/instances/{name}", {"model_id": MINILM}, {"name": "minilm"}, 200, "PUT"),
    Asked(9000, "PUT", "/instances/nobody", 404, {}, route="/instances/{name}"),
    Asked(9000, "PUT", "/instances/minilm", 409, OWN | {"name": "minilm"}, route="/instances/{name}"),
    Asked(9000, "POST", "/instances/told/undo", 409, route="/instances/{name}/undo"),
    Asked(9000, "PATCH", "/instances/nobody", 404, {}, route="/instances/{name}"),
    Asked(9000, "PATCH", "/instances/minilm", 409, {"aliases": ["told"]}, route="/instances/{name}"),
    *(
        Asked(9000, "POST", f"/instances/nobody/{verb}", 404, route=f"/instances/{{name}}/{verb}")
        for verb in ("start", "stop", "restart", "undo", "sleep", "wake")
    ),
    *management(
        "GET",
        "/instances/",
        "/instances/{name}/logs",
        s200="minilm/logs",
        s404="nobody/logs",
        s422="minilm/logs?replica=64",
    ),
    *management(
        "GET",
        "/instances/",
        "/instances/{name}/series",
        s200="minilm/series",
        s404="nobody/series",
        s422="minilm/series?minutes=0",
    ),
    *management("POST", "/instances/", BENCH, s202="minilm/bench?secs=0.5&force=true", s404="nobody/bench"),
    *management("POST", "/instances/", BENCH, s409="minilm/bench", s422="minilm/bench?secs=x"),  # it is measured now
    *management("GET", "/instances/", BENCH, s200="minilm/bench", s404="told/bench", s422="minilm/bench?secs=1"),
    *bodies("/models", "/models", None, {"model_id": 1}, 0),
    *management("GET", "", "/models/{model_id}", s200=MODEL, s404="/models/none", s422="/models/%FF"),
    *management("DELETE", "", "/models/{model_id}", s404="/models/none", s409=MODEL, s422="/models/none?keep_files=1"),
    *management("POST", "/models/", "/models/{model_id}/download", s404="none/download", s422="none/download?wait=1"),
    *bodies(f"{MODEL}/load", "/models/{model_id}/load", None, {"name": "a"}, 0),
    Asked(9000, "POST", "/models/none/load", 404, route="/models/{model_id}/load"),
    *management("POST", "/models/", "/models/{model_id}/cancel", s404="none/cancel", s422="%FF/cancel"),
    Asked(9000, "POST", f"{MODEL}/cancel", 200, route="/models/{model_id}/cancel"),
    *management("GET", "/models/", "/models/{model_id}/archive", s404="none/archive", s422="%FF/archive"),
    Asked(9000, "POST", "/archives", 422, b"no archive"),
    *bodies("/keys", "/keys", None, {"name": "a"}, 0),
    Asked(9000, "DELETE", "/keys/none", 404, route="/keys/{name}"),
    Asked(9000, "GET", "/cache", 200),
    *management("DELETE", "/cache", "/cache", s200="?instance=minilm", s404="?instance=nobody", s422="?name=minilm"),
    *management("GET", "/compatibility?", "/compatibility", s200="a=minilm&b=told", s404="a=a&b=b", s422="a=minilm"),
]
INSTANCE = {"/rerank": "told", "/v1/rerank": "told", "/v2/rerank": "told"}
OF_OTHERS = ("/embed_sparse", "/predict")  # which neither instance can answer: `tests/gateway` has some that can


def inference() -> Iterator[Asked]:
    for route in SERVING:
        operation = route.operation
        if operation is None or operation.request is None:
            continue
        body = EXAMPLES[operation.request]
        right = {"X-TEI-Instance": INSTANCE.get(route.path, "minilm")}
        if route.path not in OF_OTHERS:
            yield Asked(9002, "POST", route.path, 200, body, right)
        yield Asked(9002, "POST", route.path, 400, b"{")
        yield Asked(9002, "POST", route.path, 404, body, {"X-TEI-Instance": "nobody"})
        if route.path not in OF_OTHERS:
            yield Asked(9002, "POST", route.path, 409, body, {**right, "X-TEI-Expect-Fingerprint": "another"})
        yield Asked(9002, "POST", route.path, 413, b"{}", {"Content-Length": "70000000"})
        yield Asked(9002, "POST", route.path, 415, b"{}", {"Content-Encoding": "br"})
        if route.dialect is TEI:
            yield Asked(9002, "POST", route.path, 422, b"[]")
        if route.dialect is TEI and route.path not in ("/vertex", "/tokenize", "/decode"):
            wrong = "minilm" if route.path in (*INSTANCE, *OF_OTHERS) else "told"
            yield Asked(9002, "POST", route.path, 424, body, {"X-TEI-Instance": wrong})
    for path in ("/v1/models", "/info", "/health"):
        yield Asked(9002, "GET", path, 200, None, {"X-TEI-Instance": "minilm"})
        yield Asked(9002, "GET", f"/instances/nobody{path}", 404, route=path)
    yield Asked(9002, "GET", "/api/tags", 200)


INFERENCE = list(inference())
# What an instance of its own goes through, in this order.
STORY = [
    Asked(9000, "POST", "/instances", 201, {"name": "story", "model_id": str(FAMILIES / "bert-cls")}),
    Asked(9000, "POST", "/instances/story/start", 409, route="/instances/{name}/start"),
    Asked(9000, "POST", "/instances/story/stop", 200, route="/instances/{name}/stop"),
    Asked(9000, "POST", "/instances/story/stop", 409, route="/instances/{name}/stop"),
    Asked(9002, "POST", "/embed", 503, {"inputs": "a"}, {"X-TEI-Instance": "story"}),
    Asked(9000, "POST", "/instances/story/start", 200, route="/instances/{name}/start"),
    Asked(9000, "POST", "/instances/story/restart", 200, route="/instances/{name}/restart"),
    Asked(9000, "PATCH", "/instances/story", 200, {"max_batch_tokens": 4096}, route="/instances/{name}"),
    Asked(9000, "POST", "/instances/story/undo", 200, route="/instances/{name}/undo"),
    Asked(9000, "POST", "/instances/story/sleep", 200, route="/instances/{name}/sleep"),
    Asked(9000, "POST", "/instances/story/wake", 200, route="/instances/{name}/wake"),
    Asked(9000, "POST", "/instances/story/stop", 200, route="/instances/{name}/stop"),
    Asked(9000, "POST", "/instances/story/sleep", 409, route="/instances/{name}/sleep"),
    Asked(9000, "POST", "/instances/story/wake", 409, route="/instances/{name}/wake"),
    Asked(9000, "DELETE", "/instances/story", 200, route="/instances/{name}"),
    Asked(9000, "POST", "/models", 201, {"model_id": "nobody/story"}),
    Asked(9000, "POST", "/models", 200, {"model_id": "nobody/story"}),
    Asked(9000, "DELETE", "/models/nobody%2Fstory", 200, route="/models/{model_id}"),
]
# What one goes through whose model was deleted meanwhile.
GONE = [
    Asked(9000, "POST", "/instances/gone/start", 422, route="/instances/{name}/start"),
    Asked(9000, "POST", "/instances/gone/restart", 422, route="/instances/{name}/restart"),
    Asked(9000, "DELETE", "/instances/gone", 200, route="/instances/{name}"),
]
ASKED = [*MANAGEMENT, *INFERENCE, *STORY, *GONE]
# 401, 403: `tests/security`. 500, 503, 504, 507: `tests/faults`. 429: `tests/gateway`. 405: of other methods.
SELDOM = {401, 403, 405, 429, 500, 503, 504, 507}
OF_JOBS, OF_KEYS = "tests/jobs, tests/operations", "would turn authentication on: tests/control/test_keys"
OF_FINGERPRINTS = "an instance without one: tests/e2e/test_cache.py"
LEFT: dict[Key, tuple[set[int], str]] = {
    (9000, "POST", "/instances/{name}/restart"): ({409}, "a port that is taken: tests/faults"),
    (9000, "POST", "/instances/{name}/undo"): ({422}, "its model was deleted meanwhile"),
    (9000, "POST", "/instances/{name}/wake"): ({422}, "more than there is room for: tests/e2e/test_sleep.py"),
    (9000, "GET", "/events/stream"): ({200}, "it does not end: tests/control/test_streaming.py"),
    (9000, "POST", "/models"): ({409}, OF_JOBS),
    (9000, "POST", "/models/{model_id}/download"): ({200, 202, 409}, OF_JOBS),
    (9000, "POST", "/models/{model_id}/load"): ({200, 202, 409}, OF_JOBS),
    (9000, "GET", "/models/{model_id}/archive"): ({200}, OF_JOBS),
    (9000, "POST", "/archives"): ({201, 400, 409}, OF_JOBS),
    (9000, "GET", "/keys"): ({422}, OF_KEYS),
    (9000, "POST", "/keys"): ({201, 409}, OF_KEYS),
    (9000, "DELETE", "/keys/{name}"): ({200, 422}, OF_KEYS),
    (9000, "DELETE", "/cache"): ({409}, OF_FINGERPRINTS),
    (9000, "GET", "/compatibility"): ({409}, OF_FINGERPRINTS),
    **{(9002, "POST", path): ({200, 409}, "tests/gateway") for path in OF_OTHERS},
    **{(9002, "POST", path): ({424}, "an engine that fails") for path in ("/vertex", "/tokenize", "/decode")},
    **{(9002, "GET", path): ({400, 404, 409}, "of all routes of a dialect") for path in ("/v1/models", "/api/tags")},
    **{(9002, "GET", path): ({400, 409, 422, 424}, "of all routes of a dialect") for path in ("/info", "/health")},
}


def contradicted(text: str, asked: list[Asked]) -> list[str]:
    """What requests get, and the page of the HTTP interfaces does not tell of their routes."""
    told = claimed(text)
    return [f"{each.method} {each.path} is {each.status}" for each in asked if each.status not in told[each.key][0]]


def unproved(text: str, asked: list[Asked]) -> list[str]:
    """What the page tells, and neither a request of this file nor a reason why there is none stands for."""
    proved: dict[Key, set[int]] = {}
    for each in asked:
        proved.setdefault(each.key, set()).add(each.status)
    return [
        f"line {line}: nothing proves that {key[1]} {key[2]} is {status}"
        for key, (statuses, line) in claimed(text).items()
        for status in sorted(statuses - proved.get(key, set()) - SELDOM - LEFT.get(key, (set(), ""))[0])
    ]


def test_every_status_that_is_got_is_told() -> None:
    assert contradicted(PAGES["rest.md"], ASKED) == []


def test_every_status_that_is_told_is_asked_for_or_explained() -> None:
    assert unproved(PAGES["rest.md"], ASKED) == []
    assert not [key for key, (statuses, _) in LEFT.items() if not statuses <= CLAIMED[key][0]]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("- answers: 200 list of Gpu", "- answers: 201 list of Gpu"),
        (
            "- answers: 200 Instance; 201 Instance; refusals: 400, 401, 403, 409, 413",
            "- answers: 200 Instance; refusals: 401",
        ),
        ("- answers: 200 Ranks; refusals: 400", "- answers: 200 Ranks; refusals: 402"),
    ],
)
def test_a_status_that_is_got_and_not_told_is_found(old: str, new: str) -> None:
    assert len(contradicted(planted("rest.md", old, new), ASKED)) >= 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("- answers: 200 Health", "- answers: 200 Health; 202 Health"),
        ("- answers: 200 list of Event; refusals: 401, 403", "- answers: 200 list of Event; refusals: 401, 403, 404"),
        ("- answers: 200 Embeddings; refusals: 400", "- answers: 200 Embeddings; refusals: 400, 410"),
    ],
)
def test_a_status_that_is_told_and_not_proved_is_found(old: str, new: str) -> None:
    assert len(unproved(planted("rest.md", old, new), ASKED)) == 1
