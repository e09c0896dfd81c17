"""Every status, error code, header and metadata key that a page tells is one that the appliance gives.

Here the pages are held against the code's own tables; `test_docs_running` asks a running appliance. A check takes the
text of a page and returns complaints: so a test can plant an error in a page, and see it found.
"""

import ast
import re
from collections import defaultdict
from functools import cache

import grpc
import pytest

from appliance.control.errors import FRAMEWORK
from appliance.control.errors import STATUS as REST
from appliance.core.problems import Kind
from appliance.drivers.grpccalls import CODES as GRPC
from appliance.gateway import openai, tei_dialect
from appliance.gateway.routes import ROUTES as SERVING
from appliance.gateway.routes import TEI
from appliance.wire.envelope import CODE_KEY
from appliance.wire.http1 import REASONS
from tests.pages import PAGES, ROOT, paragraphs, planted, prose, rows, spans, tree_words
from tests.test_docs_routes import meant, mentions

DONE = {200, 201, 202}
OF_BODIES = {413, 415}
HEADED = re.compile(r"^### `([A-Z]+) (/\S*)`$")
TOLD = re.compile(r"(?<![\w.:,/-])(20[0-4]|[45]\d\d)(?![\w.]?\d|[-\w%])(?! MB| characters| entries| or newer)")
CODED = re.compile(r"\b([2-5]\d\d) `([A-Z]+(?:_[A-Z]+)*)`")
NAMES = {code.name for code in grpc.StatusCode}
SENT = re.compile(r"([A-Za-z]+(?:-[A-Za-z]+)+|[Aa]uthorization): (\S+)(?: .*)?")
HYPHENED = re.compile(r"[A-Za-z]+(?:-[A-Za-z]+)*-(?:[A-Za-z]+|\*)")
FOREIGN = {"nvidia-smi", "allkeys-lru"}  # names of other programs that only the pages name


@cache
def kinds_by_code() -> dict[str, set[Kind]]:
    """The codes of all Problems, and of which kinds they are."""
    found: dict[str, set[Kind]] = defaultdict(set)
    for path in (ROOT / "appliance").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or len(node.args) < 2 or not isinstance(node.args[1], ast.Constant):
                continue
            kind = re.fullmatch(r"Kind\.([A-Z]+)", ast.unparse(node.args[0]))
            if kind:
                found[str(node.args[1].value)].add(Kind[kind[1]])
            elif ast.unparse(node.func) == "invalid":
                found[str(node.args[1].value)].add(Kind.INVALID)
    return found


def possible(port: int, method: str, path: str) -> set[int]:
    """What the program's own tables allow."""
    bodies = set() if method in ("POST", "PUT", "PATCH") else OF_BODIES
    if port == 9000:
        return (DONE | set(REST.values()) | set(FRAMEWORK)) - bodies
    dialect = next(route.dialect for route in SERVING if route.path == path)
    forms = tei_dialect.ERROR_FORMS if dialect is TEI else openai.ERROR_FORMS  # Cohere and Ollama have OpenAI's
    return ({200} | {form.status for form in forms.values()}) - bodies


ANYWHERE = DONE | set(REST.values()) | set(FRAMEWORK) | set(REASONS)
ANYWHERE |= {form.status for dialect in (openai, tei_dialect) for form in dialect.ERROR_FORMS.values()}


# -- statuses of HTTP -------------------------------------------------------------------------------------------------


def claimed(text: str) -> dict[tuple[int, str, str], tuple[set[int], int]]:
    """(port, method, path) -> the statuses that the page of the HTTP interfaces tells of it, and their line."""
    found: dict[tuple[int, str, str], tuple[set[int], int]] = {}
    port, operation = 0, ("", "")
    for number, line in enumerate(text.splitlines(), 1):
        if named := re.search(r"^## .*\((\d{4})\)$", line):
            port = int(named[1])
        elif named := HEADED.match(line):
            operation = named[1], named[2]
        elif line.startswith("- answers: "):
            found[port, *operation] = {int(status) for status in re.findall(r"\b[1-5]\d\d\b", line)}, number
    return found


CLAIMED = claimed(PAGES["rest.md"])


def impossible_of_routes(text: str) -> list[str]:
    """Statuses of a route that its program cannot give there; for the page of the HTTP interfaces."""
    return [
        f"line {line}: {method} {path} never answers {status}"
        for (port, method, path), (statuses, line) in claimed(text).items()
        for status in sorted(statuses - possible(port, method, path))
    ]


def impossible_statuses(text: str) -> list[str]:
    """Statuses that nobody gives, that do not go with the error code beside them, or that no route of a row has."""
    plain = prose(text)
    found = [
        f"line {number}: nobody answers {status}"
        for number, line in enumerate(plain.splitlines(), 1)
        for status in TOLD.findall(re.sub(r"`[^`]*`", "", line))
        if int(status) not in ANYWHERE
    ]
    for number, line in enumerate(plain.splitlines(), 1):
        for status, code in CODED.findall(line):
            if int(status) not in {REST[kind] for kind in kinds_by_code().get(code, ())}:
                found.append(f"line {number}: {code} is not {status}")
    return [*found, *impossible_in_rows(text)]


def impossible_in_rows(text: str) -> list[str]:
    """What a row tells is of the routes in the cells before its last, unless they are "the same" as of other rows."""
    found = []
    for row in rows(text):
        told = [status for cell in row.cells[1:] for status in TOLD.findall(cell)]
        asked = f"| {' | '.join(row.cells[:-1])} |"
        named = {(each.port, each.path) for one in mentions(asked) for each in meant(one.path, one.port)}
        own = set[int]().union(*(CLAIMED[key][0] for key in CLAIMED if (key[0], key[2]) in named))
        if own and "the same" not in row.cells[0]:
            found += [f"line {row.line}: none of its routes answers {each}" for each in told if int(each) not in own]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_status_that_a_page_tells_can_be(page: str) -> None:
    assert impossible_statuses(PAGES[page]) == []


def test_every_status_of_a_route_can_be() -> None:
    assert len(CLAIMED) > 40
    assert impossible_of_routes(PAGES["rest.md"]) == []


# -- names: error codes, headers and metadata, statuses of gRPC -------------------------------------------------------


def unknown_names(text: str) -> list[str]:
    """Words in capitals, headers and keys of metadata that stand nowhere in the code; values of headers, likewise."""
    known = tree_words()
    lower = {word.lower() for word in known}
    found = []
    for span in spans(text):
        sent = SENT.fullmatch(span.text)
        name, value = (sent[1], sent[2]) if sent else (span.text, "")
        capitals = re.fullmatch(r"[A-Z]+(?:_[A-Z0-9]+)+", name) and name not in known | NAMES
        header = HYPHENED.fullmatch(name) and name not in FOREIGN and not is_known(name.lower(), lower)
        values = set(re.findall(r"\w{2,}", value.lower())) if name.lower() in lower else set()
        if capitals or header:
            found.append(f"line {span.line}: {name} is nobody's name")
        elif not values <= lower or (name == CODE_KEY and value and value not in kinds_by_code()):
            found.append(f"line {span.line}: {name} never has {value}")
    return found


def is_known(name: str, words: set[str]) -> bool:
    """x-compute-* stands for every name that begins so."""
    return name in words or (name.endswith("*") and any(word.startswith(name[:-1]) for word in words))


def wrong_grpc(text: str) -> list[str]:
    """An error code beside a status of gRPC that it does not have, and statuses that no refusal has."""
    found = []
    given = {code.name for code in GRPC.values()}
    for paragraph, line in paragraphs(text):
        status = ""
        words = re.findall(r"`(?:x-tei-code: )?([A-Z]+(?:_[A-Z]+)+|INTERNAL|UNAVAILABLE)`", paragraph)
        if paragraph.startswith("|"):  # the code is in the last cell, and counts for the whole row
            status = next((word for word in reversed(words) if word in NAMES), "")
        for word in words:
            if word in NAMES:
                status = status if paragraph.startswith("|") else word
                found += [f"line {line}: no call ends with {word}"] * (word not in given)
            elif (
                status and word in kinds_by_code() and status not in {GRPC[kind].name for kind in kinds_by_code()[word]}
            ):
                found.append(f"line {line}: {word} is not {status}")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_code_header_and_key_that_a_page_names_exists(page: str) -> None:
    assert unknown_names(PAGES[page]) == []


def test_the_statuses_of_grpc_are_those_of_the_codes() -> None:
    assert wrong_grpc(PAGES["grpc.md"]) == []


# -- planted errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "old", "new"),
    [
        ("README.md", "(409 `MODEL_CHANGED`)", "(410 `MODEL_CHANGED`)"),
        ("README.md", "(422 `INSUFFICIENT_GPU_MEMORY`)", "(409 `INSUFFICIENT_GPU_MEMORY`)"),
        ("README.md", "(503 `STATE_UNREADABLE`)", "(507 `STATE_UNREADABLE`)"),
        ("README.md", "429 has a `Retry-After`", "420 has a `Retry-After`"),
        ("README.md", "| list; create (201,", "| list; create (202,"),
        ("README.md", "answers 202 at once", "answers 204 at once"),
        ("deployment.md", "| 200, or 503 when", "| 200, or 504 when"),
        ("security.md", "Refusals are 401 `UNAUTHENTICATED`", "Refusals are 403 `UNAUTHENTICATED`"),
        ("security.md", "202 at once when no thread", "200 at once, 429 when no thread"),
        ("security.md", "403 for all others", "418 for all others"),
        ("operations.md", "changes are refused with 507", "changes are refused with 508"),
        ("moving-in.md", "a taken port 422", "a taken port 425"),
    ],
)
def test_a_planted_status_is_found(page: str, old: str, new: str) -> None:
    assert len(impossible_statuses(planted(page, old, new))) >= 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("- answers: 200 list of Gpu; refusals: 401", "- answers: 200 list of Gpu; refusals: 400, 402"),
        ("- answers: 200 Models; refusals: 400", "- answers: 200 Models; refusals: 400, 413"),
        ("- answers: 200 Embeddings; refusals: 400", "- answers: 200 Embeddings; refusals: 400, 424"),
        ("- answers: 200 Instance; 201 Instance", "- answers: 200 Instance; 205 Instance"),
    ],
)
def test_a_planted_status_of_a_route_is_found(old: str, new: str) -> None:
    assert len(impossible_of_routes(planted("rest.md", old, new))) == 1


@pytest.mark.parametrize(
    ("page", "old", "new"),
    [
        ("README.md", "`X-TEI-Instance` or", "`X-TEI-Instnce` or"),
        ("README.md", "`Retry-After`", "`Rety-After`"),
        ("README.md", "`x-compute-*`", "`x-computed-*`"),
        ("README.md", "`Server-Timing`", "`Sever-Timing`"),
        ("README.md", "`Content-Encoding: gzip`", "`Content-Encoding: zopfli`"),
        ("README.md", "`X-TEI-Token-Ids: decoded`", "`X-TEI-Token-Ids: translated`"),
        ("README.md", "`x-arrow-on-error: null`", "`x-arrow-on-failure: null`"),
        ("README.md", "409 `MODEL_CHANGED`", "409 `MODEL_CHANGD`"),
        ("README.md", "`INVALID_ARGUMENT`", "`INVALID_ARGUMENTS`"),
        ("security.md", "`x-api-key: KEY`", "`x-api-token: KEY`"),
        ("security.md", "`TEI_APPLIANCE_CA`", "`TEI_APPLIANCE_CERTS`"),
        ("grpc.md", "`x-arrow-error-row`", "`x-arrow-bad-row`"),
        ("grpc.md", "`retry-after-ms`", "`retry-after-secs`"),
        ("grpc.md", "x-tei-code: WRONG_ANSWER", "x-tei-code: WRONG_REPLY"),
        ("operations.md", "`ENDS_REPLICAS` or", "`ENDS_REPLICA` or"),
    ],
)
def test_a_planted_name_is_found(page: str, old: str, new: str) -> None:
    assert len(unknown_names(planted(page, old, new))) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(`AMBIGUOUS_MODEL`) | `INVALID_ARGUMENT`", "(`AMBIGUOUS_MODEL`) | `NOT_FOUND`"),
        (
            "it is `INTERNAL` with\n  `x-tei-code: ENDS_REPLICAS`",
            "it is `UNAVAILABLE` with\n  `x-tei-code: ENDS_REPLICAS`",
        ),
        ("| the instance is stopped | `FAILED_PRECONDITION` |", "| the instance is stopped | `OUT_OF_RANGE` |"),
    ],
)
def test_a_planted_status_of_grpc_is_found(old: str, new: str) -> None:
    assert len(wrong_grpc(planted("grpc.md", old, new))) == 1
