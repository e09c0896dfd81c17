"""Settings, fields, variables, events, metrics and roles that a page names exist, and their lists are complete.

A check takes the text of a page and returns complaints: so a test can plant an error in a page, and see it found.
"""

import ast
import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple

import pytest

from appliance.control.routes import ROUTES
from appliance.control.schemas import MODEL_STATUS, SCHEMAS
from appliance.core.access import ROLES
from appliance.core.events import Event
from appliance.core.fields import Check
from appliance.core.instance import CHECKS
from appliance.core.moving_in import AUTH, GRPC_KEYS, MTLS
from appliance.core.settings import ENVIRONMENT, KNOBS, CacheSettings, QueueSettings
from appliance.core.tls_settings import RemoteTlsSettings, TlsSettings
from appliance.gateway import schemas as gateway
from tests.pages import PAGES, ROOT, planted, prose, rows, spans, tree_texts, tree_words
from tests.test_dashboards import documented, series

WORD = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)+|[a-z]+")
METRIC = re.compile(r"\b(?:te|tei_manager)_[a-z_]+\b")
VARIABLE = re.compile(r"\b(?:TEI|HF|CUDA|HUGGINGFACE|ORT)_[A-Z_]+[A-Z]\b")
ASSIGNED = re.compile(r"(?:\[(\w+)\] )?\"?(\w+)\"?(?: = |: )(.+)")
TABLE = re.compile(r"\[\[?([a-z_.]+)\]?\](?: (\w+)(?: = .*)?)?")
EVENTS = re.compile(r"\bevents? ((?:`\w+`(?:, (?:then )?| and )?)+)")
METRICS = documented()
KEYS: dict[str, Check] = {name: knob.metadata["check"] for name, knob in KNOBS.items()}
TABLES: dict[str, set[str]] = {
    "queue": {knob.name for knob in fields(QueueSettings)},
    "cache": {knob.name for knob in fields(CacheSettings)},
    "tls": {knob.name for knob in fields(TlsSettings)},
    "remote_tls": {knob.name for knob in fields(RemoteTlsSettings)},
    "keys": {"name", "sha256", "role"},
    "instances": set(CHECKS),
    "auth": {*AUTH.checks, *MTLS.checks},  # tei-manager's, which we take or refuse by name
    "grpc": set(GRPC_KEYS),
}
# What only the pages name, because other people's programs have it.
FOREIGN = set("auto_start azure hosted_vllm jina_ai sudo voyage x_bucket x_count x_sum".split())
OTHERS_KEYS = {"grpc_enabled", "honor_labels", "scheme"}  # tei-manager's, Prometheus', Kubernetes'
OTHERS_VARIABLES = {"TEI_MANAGER_GRPC_TLS"}


def unknown_words(text: str) -> list[str]:
    """Words in code that stand nowhere in the repository: a misspelt setting, field, event or package."""
    known = tree_words() | FOREIGN | set(METRICS)
    return [
        f"line {span.line}: {span.text} is nobody's name"
        for span in spans(text)
        if WORD.fullmatch(span.text) and span.text not in known
    ]


def unknown_metrics(text: str) -> list[str]:
    """docs/metrics.md has every metric, as `test_dashboards` says."""
    known = series({name: kind for name, (kind, _) in METRICS.items()}) | set(METRICS)
    return [f"{name} is no metric" for name in sorted(set(METRIC.findall(text)) - known)]


def unknown_variables(text: str) -> list[str]:
    known = {name for source in tree_texts() for name in VARIABLE.findall(source)} | OTHERS_VARIABLES
    return [f"{name} is read nowhere" for name in sorted(set(VARIABLE.findall(text)) - known)]


def unknown_events(text: str) -> list[str]:
    """Where a page says that it is one."""
    named = {name for words in EVENTS.findall(prose(text)) for name in re.findall(r"\w+", words)} - {"then", "and"}
    return [f"{name} is no event" for name in sorted(named - {event.value for event in Event})]


class Assignment(NamedTuple):
    """A key with a value, as a page shows it."""

    table: str
    key: str
    value: Any
    line: int


def assignments(text: str) -> Iterator[Assignment]:
    """Of settings and fields: `key = value`, as TOML has it, and `"key": value`, as JSON."""
    for span in spans(text):
        found = ASSIGNED.fullmatch(span.text)
        if not found or "-" in span.text.split()[0]:
            continue
        as_json = ": " in span.text.partition(" = ")[0]
        try:
            value = json.loads(found[3]) if as_json else tomllib.loads(f"value = {found[3]}")["value"]
        except ValueError:
            continue
        yield Assignment(found[1] or "", found[2], value, span.line)


def wrong_assignments(text: str) -> list[str]:
    """Keys that neither the configuration nor an instance has, and values that they do not take."""
    found = []
    for table, key, value, line in assignments(text):
        where = f"line {line}: {key}"
        checks = [each[key] for each in (KEYS, CHECKS) if key in each]
        named = table and key in TABLES[table]
        if not (checks or named or key in OTHERS_KEYS | {"instance_name", "instance_index"}):
            found.append(f"{where} is neither a setting nor a field")
        elif checks and not any(takes(check, value) for check in checks):
            found.append(f"{where} does not take {value!r}")
    return found


def takes(check: Check, value: Any) -> bool:
    try:
        check(value)
    except ValueError:
        return False
    return True


def unknown_tables(text: str) -> list[str]:
    """`[tls]`, `[[keys]]`, `[grpc] multiplexer_port`, `queue.max_size`"""
    found = []
    for span in spans(text):
        named = TABLE.fullmatch(span.text) or re.fullmatch(r"(queue|tls|auth)\.(\w+)()", span.text)
        if not named:
            continue
        table, _, inner = named[1].partition(".")
        key = inner or named[2]
        if table not in TABLES or (key and key not in TABLES[table]):
            found.append(f"line {span.line}: {span.text} is not in the configuration")
    return found


@cache
def said() -> list[set[str]]:
    """The words of each text of one line in the code, without what is put into it."""
    nodes = [node for path in (ROOT / "appliance").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    parts: list[list[Any]] = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
    parts += [[node] for node in nodes if isinstance(node, ast.Constant)]
    texts = [" ".join(str(each.value) for each in part if isinstance(each, ast.Constant)) for part in parts]
    return [set(re.findall(r"\w+", text)) for text in texts if "\n" not in text]


def unknown_messages(text: str) -> list[str]:
    """Messages that the table of troubles quotes, and nobody says. What is in brackets, and …, differs each time."""
    found = []
    for row in rows(text):
        if row.header[0] == "what you see":
            for message in re.findall(r"`([^`]* [^`]*)`", row.cells[0]):
                words = set(re.findall(r"[A-Za-z_]{2,}", re.sub(r"\([^)]*\)", "", message)))
                found += [f"line {row.line}: nobody says {message}"] * (not any(words <= each for each in said()))
    return found


CHECKED = (
    unknown_messages,
    unknown_words,
    unknown_metrics,
    unknown_variables,
    unknown_events,
    wrong_assignments,
    unknown_tables,
)


@pytest.mark.parametrize("check", CHECKED)
@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_a_page_exists(page: str, check: Any) -> None:
    assert check(PAGES[page]) == []


# -- what a page claims to have all of --------------------------------------------------------------------------------

ALL_SCHEMAS: dict[str, Any] = {**gateway.SCHEMAS, **SCHEMAS}
BODIES = {operation.body for route in ROUTES for operation in route.operations.values() if operation.body}
BODIES |= {name for name in gateway.SCHEMAS if name.endswith(("Request", "Prompt"))}
ANSWERS = ("Instance", "Model", "Gpu", "Series", "Event")


def difference(named: Iterable[str], there: Iterable[str]) -> list[str]:
    return [
        *(f"{name} does not exist" for name in sorted(set(named) - set(there))),
        *(f"{name} is left out" for name in sorted(set(there) - set(named))),
    ]


def fields_listed(text: str) -> list[str]:
    """The README's list of the fields of an instance, with the words that they take."""
    listed = text.partition("Fields of an instance: ")[2].partition(". ")[0]
    plain = re.sub(r"\((?:`\w+`(?:\s+or\s+)?)+\)", "", listed)
    return difference(re.findall(r"`(\w+)`", plain), CHECKS)


def statuses_listed(text: str) -> list[str]:
    cells = [row.cells[0] for row in rows(text) if row.header == ["status", "means"]]
    return difference(re.findall(r"`(\w+)`", " ".join(cells)), MODEL_STATUS["enum"])


def roles_listed(text: str) -> list[str]:
    headers = [row.header[1:] for row in rows(text) if row.header[0] == "may"]
    return difference(headers[0] if headers else [], ROLES)


def variables_listed(text: str) -> list[str]:
    return difference(re.findall(r"\bTEI_[A-Z_]+[A-Z]\b", text), ENVIRONMENT)


def own_variables_listed(text: str) -> list[str]:
    """Those that the command line's user may set."""
    connection = (ROOT / "appliance" / "cli" / "connection.py").read_text()
    there = re.findall(r"environ\.get\(\"(\w+)\"", connection)
    return difference(re.findall(r"\bTEI_APPLIANCE_\w+", text), there)


def tables_of_fields(text: str) -> list[str]:
    """Each body and each answer has a table with all of its fields; no cell is empty."""
    tables = dict(re.findall(r"^\*\*(\w+)\*\*\n((?:(?!^\*\*|^#).*\n?)*)", text, re.M))
    found = difference(tables, {*BODIES, *ANSWERS})
    for name in sorted(tables.keys() & ALL_SCHEMAS.keys()):
        columns = ["field", "type", "meaning"] if name in ANSWERS else ["field", "type and range", "default", "meaning"]
        known = SCHEMAS["NewInstance"]["properties"] if name == "Instance" else {}
        listed = rows(tables[name])
        if not listed or listed[0].header != columns:
            found.append(f"the table of {name} has other columns than {', '.join(columns)}")
        found += [f"{name}: {row.cells[0]} has an empty cell" for row in listed if not all(row.cells)]
        fields = [row.cells[0].strip("`") for row in listed]
        there = set(ALL_SCHEMAS[name]["properties"]) - set(known)
        found += [f"{name}: {each}" for each in difference({field.partition(".")[0] for field in fields}, there)]
    return found


COMPLETE = {
    "README.md": (fields_listed, statuses_listed),
    "security.md": (roles_listed, own_variables_listed),
    "rest.md": (tables_of_fields,),
}


@pytest.mark.parametrize(("page", "check"), [(page, check) for page, checks in COMPLETE.items() for check in checks])
def test_a_list_has_everything(page: str, check: Any) -> None:
    assert check(PAGES[page]) == []


def test_the_example_of_the_configuration_names_every_variable() -> None:
    assert variables_listed((ROOT / "etc" / "appliance.toml").read_text()) == []


# -- planted errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "page", "old", "new"),
    [
        (unknown_messages, "README.md", "`Port 9000 (api_port) … is in use`", "`Port 9000 (api_port) … is occupied`"),
        (unknown_messages, "README.md", "`tei_binary_path … is no program`", "`tei_binary_path … cannot be run`"),
        (unknown_words, "README.md", "`memory_budget_mb`", "`memory_budgt_mb`"),
        (unknown_words, "README.md", "`extra_args`", "`extra_arguments`"),
        (unknown_words, "deployment.md", "`graceful_shutdown_timeout_secs`", "`gracefull_shutdown_timeout_secs`"),
        (unknown_words, "operations.md", "`monitor_silent`", "`monitor_mute`"),
        (unknown_words, "moving-in.md", "`require_cert_headers`", "`require_certs_headers`"),
        (unknown_words, "security.md", "`allowed_sans`", "`allowed_san`"),
        (unknown_words, "CONTRIBUTING.md", "`add_parsers`", "`add_parser_of`"),
        (unknown_metrics, "operations.md", "`tei_manager_queue_size`", "`tei_manager_queue_length`"),
        (unknown_metrics, "metrics.md", "sum(te_queue_size{", "sum(te_queue_depth{"),
        (unknown_metrics, "metrics.md", "rate(te_batch_next_size_sum", "rate(te_batch_next_size_total"),
        (unknown_variables, "README.md", "`TEI_MANAGER_CONFIG`", "`TEI_MANAGER_CONFIGURATION`"),
        (unknown_variables, "README.md", "TEI_MANAGER_HTTP_PORT=9102", "TEI_MANAGER_HTTPS_PORT=9102"),
        (unknown_variables, "README.md", "`HF_ENDPOINT`", "`HF_ENDPOINTS`"),
        (unknown_variables, "operations.md", "`TEI_APPLIANCE_REPLICA`", "`TEI_APPLIANCE_REPLICAS`"),
        (unknown_events, "README.md", "events `disk_full`", "events `disk_filled`"),
        (unknown_events, "README.md", "(event `convicted`)", "(event `unhealthy_call`)"),
        (unknown_events, "moving-in.md", "the event `moved_in`", "the event `running`"),
        (wrong_assignments, "README.md", '`token_ids = "refuse"`', '`token_ids = "deny"`'),
        (wrong_assignments, "README.md", "`default = true`", '`default = "yes"`'),
        (wrong_assignments, "README.md", '`bind = "0.0.0.0"`', '`listen = "0.0.0.0"`'),
        (wrong_assignments, "README.md", '`"pooling": "splade"`', '`"pooling": "max"`'),
        (wrong_assignments, "deployment.md", "`open_health = true`", "`open_health = 1`"),
        (wrong_assignments, "moving-in.md", '`"download": "never"`', '`"download": "no"`'),
        (wrong_assignments, "moving-in.md", "`port = 0`", "`port = 80`"),
        (unknown_tables, "README.md", "(`[queue]` in", "(`[queues]` in"),
        (unknown_tables, "security.md", "`[[keys]]`", "`[[api_keys]]`"),
        (unknown_tables, "operations.md", "`queue.max_size`", "`queue.max_length`"),
        (unknown_tables, "moving-in.md", "`[grpc] multiplexer_port`", "`[grpc] mux_port`"),
    ],
)
def test_a_planted_name_is_found(check: Any, page: str, old: str, new: str) -> None:
    assert len(check(planted(page, old, new))) == 1


@pytest.mark.parametrize(
    ("check", "page", "old", "new"),
    [
        (fields_listed, "README.md", "`startup_timeout_secs`, `engine`", "`engine`"),
        (
            fields_listed,
            "README.md",
            "`startup_timeout_secs`, `engine`",
            "`startup_timeout`, `startup_timeout_secs`, `engine`",
        ),
        (statuses_listed, "README.md", "| `downloading`, `loading` |", "| `downloading` |"),
        (statuses_listed, "README.md", "| `verified`, `failed` |", "| `verified`, `failed`, `broken` |"),
        (roles_listed, "security.md", "| may | admin | operator |", "| may | admin | writer | operator |"),
        (own_variables_listed, "security.md", "`TEI_APPLIANCE_CERT_KEY`", "its key"),
        (tables_of_fields, "rest.md", "| `gpu_id` | integer", "| `gpu` | integer"),
        (tables_of_fields, "rest.md", "| `1` | processes that serve the model |", "| `1` |  |"),
        (
            tables_of_fields,
            "rest.md",
            "**NewKey**\n\n| field | type and range | default |",
            "**NewKey**\n\n| field | type |",
        ),
        (tables_of_fields, "rest.md", "**RerankRequest**", "**Reranking**"),
    ],
)
def test_a_planted_gap_in_a_list_is_found(check: Any, page: str, old: str, new: str) -> None:
    assert len(check(planted(page, old, new))) >= 1


def test_a_variable_that_the_example_leaves_out_is_found() -> None:
    text = (ROOT / "etc" / "appliance.toml").read_text()
    assert variables_listed(text.replace("TEI_MANAGER_LOG_DIR", "TEI_MANAGER_LOGS_DIR")) == [
        "TEI_MANAGER_LOGS_DIR does not exist",
        "TEI_MANAGER_LOG_DIR is left out",
    ]
