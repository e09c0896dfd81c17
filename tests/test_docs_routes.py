"""Every route and RPC that a page names exists, with that method and those parameters; the page for them has them all.

A check takes the text of a page and returns complaints: so a test can plant an error in a page, and see it found.
"""

import ast
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from appliance.control import routes as control
from appliance.control.route_parts import RestRoute
from appliance.gateway import routes as gateway
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from tests.pages import PAGES, Span, blocks, line_of, planted, rows, section, spans

NOTHING: Any = None
METHODS = ("GET", "POST", "DELETE")
FOLDERS = ("data", "etc", "opt", "srv", "tmp", "var")  # a path below these is one of a file system
SPANNED = re.compile(r"(?:([A-Z]+) )?(…?/(?:\{[\w:]+\}|[^\s?:{}])*)(?::(\d{4}))?(?:\?(\S*))?")
CAMEL = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]+)*")
RPC = re.compile(r"\b((?:tei\w*|grpc)(?:\.\w+)?\.v\d\w*)(\.[A-Z]\w+)?(/\w+)?\b")
ADDRESS = re.compile(r"https?://[\w.]+:(90\d\d)(/[^\s?'\"`)]*)?(?:\?([^\s'\"`)]*))?")
CHAINED = re.compile(r"[,;]?\s*(?:(?:and|or)\s+)?")  # between two paths that have the method of the first


class Route(NamedTuple):
    """pattern: of the paths that a page may write for it. parameters: of its query."""

    port: int
    path: str
    methods: frozenset[str]
    pattern: re.Pattern[str]
    parameters: frozenset[str] = frozenset()

    @property
    def examples(self) -> list[str]:
        plain = re.sub(r"\{[^}]+\}", "NAME", self.path)
        return [plain] if self.port == 9000 else [plain, f"/instances/NAME{plain}"]


def pattern(path: str, prefix: str = "") -> re.Pattern[str]:
    parts = re.split(r"(\{[^}]+\})", path)
    segment = {True: "[^/]+", False: ".+"}
    return re.compile(prefix + "".join(segment[":" not in part] if "{" in part else re.escape(part) for part in parts))


def managing(route: RestRoute) -> Route:
    asked = {each["name"] for operation in route.operations.values() for each in operation.parameters}
    return Route(9000, route.path, frozenset(route.operations), pattern(route.path), frozenset(asked))


def serving(route: gateway.HttpRoute) -> Route:
    resource = route.resource(NOTHING)
    methods = frozenset(method for method in METHODS if hasattr(resource, f"on_{method.lower()}"))
    return Route(9002, route.path, methods, pattern(route.path, r"(?:/instances/[^/]+)?"))


ROUTES = [*map(managing, control.ROUTES), *map(serving, gateway.ROUTES)]
# Pages for people, which no description of an interface has.
CONSOLE = [Route(9000, path, frozenset({"GET"}), pattern(path)) for path in ("/", "/console")]


class Mention(NamedTuple):
    """A route as a page names it. methods: empty where none is said. port: None where both may be meant."""

    methods: tuple[str, ...]
    path: str
    parameters: tuple[str, ...]
    port: int | None
    line: int


def meant(path: str, port: int | None) -> list[Route]:
    """… stands for the beginning or the end of a path."""
    there = [route for route in (*ROUTES, *CONSOLE) if port in (None, route.port)]
    if "…" in path:
        cut = re.compile(re.escape(path).replace("…", ".*"))
        return [route for route in there if any(map(cut.fullmatch, route.examples))]
    return [route for route in there if route.pattern.fullmatch(path)]


def mentions(text: str) -> Iterator[Mention]:
    before: Mention | None = None  # the path or the lone method right before a span
    for span in spans(text):
        follows = before if before and CHAINED.fullmatch(span.before) else None
        before = mention_in(span, follows)
        if before and before.path:
            yield before
        yield from addressed(span.text, span.line, ())
    for block in blocks(text):
        for offset, line in enumerate(block.lines):
            yield from addressed(line, block.line + offset, tuple(re.findall(r"-X ([A-Z]+)", line)))


def mention_in(span: Span, follows: Mention | None) -> Mention | None:
    """follows: what stands right before it, whose method counts, and whose last part it may replace (`/stop`)."""
    if span.text in METHODS:
        return Mention((span.text,), "", (), span.port, span.line)
    found = SPANNED.fullmatch(span.text)
    if not found or found[2].split("/")[1] in FOLDERS:
        return None
    on = re.match(r" on (900[02])\b", span.after)
    port = int(found[3] or (on[1] if on else 0)) or span.port
    methods: tuple[str, ...] = (found[1],) if found[1] else ()
    path = found[2]
    if follows:
        methods = (*follows.methods, *methods) if not follows.path else methods or follows.methods
        if follows.path and not meant(path, port):
            path = follows.path.rpartition("/")[0] + path
    parameters = tuple(re.findall(r"(\w+)=", found[4] or ""))
    return Mention(methods, path, parameters, port, span.line)


def addressed(text: str, line: int, methods: tuple[str, ...]) -> Iterator[Mention]:
    for port, path, query in ADDRESS.findall(text):
        if path:
            yield Mention(methods, path, tuple(re.findall(r"(\w+)=", query)), int(port), line)


def no_such_routes(text: str) -> list[str]:
    """Routes, methods and parameters that the page names and nobody answers."""
    found = []
    for each in mentions(text):
        routes = meant(each.path, each.port)
        where = f"line {each.line}: {each.path}"
        if not routes:
            found.append(f"{where} is no route" + f" on {each.port}" * bool(each.port))
            continue
        answered = set[str]().union(*(route.methods for route in routes))
        found += [f"{where} takes no {method}" for method in each.methods if method not in answered]
        known = set[str]().union(*(route.parameters for route in routes if route.port == 9000))
        found += [f"{where} has no parameter {name}" for name in each.parameters if name not in known]
    return found


def routes_left_out(text: str, port: int) -> list[str]:
    """(method, path) that exist, and that no heading and no first cell of a row names together."""
    entries = [
        line if line.startswith("#") else f"{line[: line.find(' |', 1)]} |"
        for line in text.splitlines()
        if line.startswith(("#", "|"))
    ]
    named = [
        (method, route.path)
        for each in mentions("\n\n".join(entries))
        for route in meant(each.path, each.port)
        for method in each.methods
    ]
    there = [(method, route.path) for route in ROUTES if route.port == port for method in sorted(route.methods)]
    return [f"{method} {path} is left out" for method, path in there if (method, path) not in named]


@pytest.mark.parametrize("page", PAGES)
def test_every_route_that_a_page_names_exists(page: str) -> None:
    assert no_such_routes(PAGES[page]) == []


@pytest.mark.parametrize("port", [9000, 9002])
def test_the_page_of_the_http_interfaces_has_every_route(port: int) -> None:
    assert routes_left_out(PAGES["rest.md"], port) == []


def test_the_readme_has_every_route_of_the_management_api() -> None:
    assert routes_left_out(f"## REST (9000)\n{section(PAGES['README.md'], '## REST (9000)')}", 9000) == []


# -- gRPC -------------------------------------------------------------------------------------------------------------

FILES = (tei.DESCRIPTOR, mux.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
SERVICES = {service.full_name: service for file in FILES for service in file.services_by_name.values()}
MULTIPLEXER = SERVICES["tei_multiplexer.v1.TeiMultiplexer"]
CALLS = {method.name for service in SERVICES.values() for method in service.methods}


def no_such_rpcs(text: str) -> list[str]:
    """Packages, services and calls that no protocol has."""
    found = []
    for name in RPC.finditer(text):
        package, service, call = name[1], f"{name[1]}{name[2] or ''}", (name[3] or "")[1:]
        where = f"line {line_of(text, name.start())}: {name[0]}"
        if name[2] and service not in SERVICES:
            found.append(f"{where} is no service")
        elif call and call not in SERVICES[service].methods_by_name:
            found.append(f"{where} is no call")
        elif package not in {each.rpartition(".")[0] for each in SERVICES}:
            found.append(f"{where} is no package")
    for row in rows(text):
        if row.header[0].startswith("call"):
            named = [name for name in re.findall(r"`([^`]+)`", row.cells[0]) if CAMEL.fullmatch(name)]
            found += [f"line {row.line}: {name} is no call" for name in named if name not in CALLS]
    return found


def rpcs_left_out(text: str) -> list[str]:
    cells = [row.cells[0] for row in rows(text) if row.header[0].startswith("call")]
    named = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    return [f"{method.name} is left out" for method in MULTIPLEXER.methods if method.name not in named]


def no_such_messages(text: str) -> list[str]:
    """Messages and fields of the programs that a page shows, run or not, that no protocol has."""
    found = []
    for block in blocks(text):
        try:
            tree = ast.parse(block.text)
        except SyntaxError:
            continue  # no Python
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            what = ast.unparse(call.func)
            where = f"line {block.line + call.lineno - 1}: {what}"
            if what.startswith("stub.") and what[5:] not in MULTIPLEXER.methods_by_name:
                found.append(f"{where} is no call")
            elif what.startswith(("mux.", "tei.")):
                module = mux if what.startswith("mux.") else tei
                message = module.DESCRIPTOR.message_types_by_name.get(what[4:])
                fields = message.fields_by_name if message else {}
                found += [f"{where} is no message"] * (message is None)
                found += [
                    f"{where} has no field {each.arg}" for each in call.keywords if message and each.arg not in fields
                ]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_rpc_that_a_page_names_exists(page: str) -> None:
    assert [*no_such_rpcs(PAGES[page]), *no_such_messages(PAGES[page])] == []


def test_the_page_of_grpc_has_every_call() -> None:
    assert rpcs_left_out(PAGES["grpc.md"]) == []


# -- planted errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "old", "new"),
    [
        ("README.md", "`GET /gpus`", "`GET /gpu`"),
        ("README.md", "`GET /gpus`", "`POST /gpus`"),
        ("README.md", "`POST /archives`", "`PUT /archives`"),
        ("README.md", "?start=&end=&replica=", "?begin=&end=&replica="),
        ("README.md", "`/stop`, `/restart`", "`/pause`, `/restart`"),
        ("README.md", "/openai/deployments/NAME/embeddings", "/openai/deployment/NAME/embeddings"),
        ("README.md", "`GET`, `DELETE /instances/{name}`", "`GET`, `DELETE /instances`"),
        ("README.md", "POST http://127.0.0.1:9000/instances", "PUT http://127.0.0.1:9000/instances"),
        ("README.md", "`POST …/start`", "`POST …/begin`"),
        ("deployment.md", "`GET /ready` on 9000", "`GET /ready` on 9002"),
        ("deployment.md", "http://127.0.0.1:9000/gpus", "http://127.0.0.1:9001/gpus"),
        ("deployment.md", "http://HOST:9000/metrics", "http://HOST:9000/metric"),
        ("moving-in.md", "`…/v2/embed`", "`…/v3/embed`"),
        ("moving-in.md", "`/instances/NAME/embed`", "`/instance/NAME/embed`"),
        ("security.md", "`DELETE /keys/NAME`", "`DELETE /keys`"),
        ("security.md", "`/instances/{name}/stop:9000`", "`/instances/{name}/halt:9000`"),
        ("security.md", "`/v1/models/{model:path}`", "`/v2/models/{model:path}`"),
        ("operations.md", "`GET /events?since=N`", "`GET /events?after=N`"),
        ("rest.md", "### `GET /v1/models`", "### `GET /v1/model`"),
    ],
)
def test_a_planted_route_is_found(page: str, old: str, new: str) -> None:
    assert len(no_such_routes(planted(page, old, new))) == 1


@pytest.mark.parametrize(
    ("port", "old"),
    [(9000, "### `GET /gpus`"), (9000, "### `POST /keys`"), (9002, "### `POST /score`"), (9002, "| `GET /ping` |")],
)
def test_a_route_that_is_left_out_is_found(port: int, old: str) -> None:
    name = old.strip("#| `")
    assert routes_left_out(planted("rest.md", old, ""), port) == [f"{name} is left out"]


@pytest.mark.parametrize(
    ("page", "old", "new"),
    [
        ("grpc.md", "`EmbedArrow`, `EmbedSparseArrow`,", "`EmbedArrow`, `EmbedSparsArrow`,"),
        ("grpc.md", "TeiMultiplexer/Tokenize", "TeiMultiplexer/Tokenise"),
        ("grpc.md", "`tei.v1.Embed`", "`tei.v1.Embeds`"),
        ("grpc.md", "`grpc.health.v1`", "`grpc.health.v2`"),
        ("README.md", "tei_multiplexer.v1.TeiMultiplexer/Embed", "tei_multiplexer.v1.Multiplexer/Embed"),
        ("operations.md", "`EmbedAll`, `EmbedAllStream`", "`EmbedAll`, `EmbedAllTokens`"),
    ],
)
def test_a_planted_rpc_is_found(page: str, old: str, new: str) -> None:
    assert len(no_such_rpcs(planted(page, old, new))) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("stub.Rerank(", "stub.ReRank("),
        ("mux.EmbedSparseRequest(", "mux.SparseRequest("),
        ('query="greeting"', 'question="greeting"'),
        ("truncate=True, normalize=True", "truncate=True, normalise=True"),
    ],
)
def test_a_planted_message_is_found(old: str, new: str) -> None:
    assert len(no_such_messages(planted("grpc.md", old, new))) == 1


def test_a_call_that_is_left_out_is_found() -> None:
    assert rpcs_left_out(planted("grpc.md", "| `RerankStream` |", "| |")) == ["RerankStream is left out"]
