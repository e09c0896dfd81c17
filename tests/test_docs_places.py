"""Every file, folder, port, page, heading and link that a page names is there.

A check takes the text of a page and returns complaints: so a test can plant an error in a page, and see it found.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from appliance.core import settings
from appliance.core.layout import Layout
from tests.pages import (
    PAGES,
    PATHS,
    ROOT,
    blocks,
    headings,
    line_of,
    planted,
    prose,
    rows,
    section,
    spans,
    tree_texts,
)

SUFFIXES = "cfg|conf|good|html|json|jsonl|lock|log|md|onnx|proto|py|required|service|sh|sock|toml|txt|yml"
FILE = re.compile(rf"(?:[\w.-]+/)*[\w.-]*\w\.(?:{SUFFIXES})|(?:[\w.-]+/)+|(?:appliance|tests|etc)/\w+")
ABSOLUTE = re.compile(r"/(?:data|etc/te[\w-]*|var/lib/[\w-]+)(?:/[\w.-]+)*")
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
QUOTED = re.compile(r"\bsee \"([^\"]+)\"|\"([^\"]+)\" below")
HERE = ("", "appliance", "docs", "etc")  # from where a page names a file
# In the folder of a model or of the hub; tei-manager's; a front's on Kubernetes.
ELSEWHERE = {"config.json", "onnx/model.onnx", "huggingface/", "tei-manager-state.toml", "directory.toml"}
# In the data folder: made anew at each start, or of no worth without the process that made it.
PASSING = {
    "control.sock",
    "express",
    "express-in.sock",
    "express.sock",
    "express.valid",
    "health.json",
    "instances.conf",
    "jobs",
    "locks",
    "multiplexer-0.sock",
    "supervisor.sock",
    "supervisord.conf",
    "supervisord.pid",
    "up.lock",
}
OTHERS_PORTS = {9090, 9100, 9101, 9102}  # Prometheus', and those of a second appliance


def data_folder() -> set[str]:
    """The names of all that is in it, below `Layout`'s folders too."""
    layout = Layout("")
    kept = {name for name, value in vars(Layout).items() if isinstance(value, property)}
    paths = {str(getattr(layout, name)) for name in kept}
    paths |= {layout.manifest("m", ""), layout.multiplexer_socket(0), layout.group_lock(0), layout.job_progress(0)}
    return {path.removeprefix("/") for path in paths} | {"keys.required", "state.toml.good", "models.toml.good"}


DATA = data_folder()
PROGRAMS = ("control", "gateway", "monitor", "supervisord")


def no_such_files(text: str) -> list[str]:
    """Names of files and folders that are neither in the repository nor in a data folder."""
    data = DATA | {f"{name.partition('/')[0]}" for name in DATA} | {f"logs/{name}.log" for name in PROGRAMS}
    found = []
    for span in spans(text):
        if not FILE.fullmatch(span.text) or span.text in ELSEWHERE:
            continue
        name = span.text.rstrip("/")
        there = any((ROOT / place / name).exists() for place in HERE) or name in data or f"logs/{name}" in data
        found += [f"line {span.line}: there is no {span.text}"] * (not there)
    return found


def no_such_places(text: str) -> list[str]:
    """Absolute paths, in code and in what is shown, that neither code nor unit nor image knows."""
    plain = "\n".join(span.text for span in spans(text)) + "\n".join(block.text for block in blocks(text))
    known = " ".join(tree_texts())
    named = {path.rstrip("/.") for path in ABSOLUTE.findall(plain)}
    return [
        f"nothing knows {path}" for path in sorted(named) if not re.search(rf"{re.escape(path[1:])}(?![\w-])", known)
    ]


def wrong_ports(text: str) -> list[str]:
    """Numbers from 8000 to 9999 are ports, and nobody listens there."""
    own = settings.Settings()
    known = {own.api_port, own.grpc_port, own.http_port, own.prometheus_port_start}
    known |= {own.instance_port_start, own.instance_port_end - 1, own.instance_port_end, *OTHERS_PORTS}
    known |= {own.ray_dashboard_port, own.ray_directory_port}
    return [
        f"line {line_of(text, found.start())}: nobody listens on {found[0]}"
        for found in re.finditer(r"(?<![\w.,-])[89]\d{3}(?![\w,]\d|\w)", text)
        if int(found[0]) not in known
    ]


def anchors(text: str) -> set[str]:
    """As the usual renderers make them."""
    plain = [re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings(text)]
    return {re.sub(r"\s", "-", heading.strip()) for heading in plain}


def dead_links(text: str, page: Path) -> list[str]:
    """Links within the repository, and headings that the text sends its reader to."""
    found = []
    for link in LINK.finditer(prose(text)):
        target, _, anchor = link[1].partition("#")
        where = f"line {line_of(text, link.start())}: {link[1]}"
        if re.match(r"https://[\w.-]+/?\S*$", target):
            continue
        path = (page.parent / target) if target else page
        if not path.exists():
            found.append(f"{where} leads nowhere")
        elif anchor and anchor not in anchors(path.read_text() if target else text):
            found.append(f"{where}: there is no such heading")
    for quoted in QUOTED.finditer(prose(text)):
        heading = quoted[1] or quoted[2]
        if heading not in headings(text):
            found.append(f"line {line_of(text, quoted.start())}: there is no heading {heading}")
    return found


def lasting_left_out(text: str) -> list[str]:
    """What has to outlive a start, and is not in the table of the data folder: by that, all else may be lost."""
    listed = rows(section(text, "## The data folder"))
    named = {name.rstrip("/") for row in listed for name in re.findall(r"`([^`]+)`", row.cells[0])}
    lasting = {name.partition("/")[0] for name in DATA} - PASSING
    lasting -= {name for name in lasting if name.removesuffix(".good") in named}
    return [f"{name} is left out" for name in sorted(lasting - named)]


CHECKED = (no_such_files, no_such_places, wrong_ports)


@pytest.mark.parametrize("check", CHECKED)
@pytest.mark.parametrize("page", PAGES)
def test_every_place_that_a_page_names_is_there(page: str, check: Any) -> None:
    assert check(PAGES[page]) == []


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_every_link_of_a_page_leads_somewhere(path: Path) -> None:
    assert dead_links(path.read_text(), path) == []


def test_the_table_of_the_data_folder_has_all_that_lasts() -> None:
    assert lasting_left_out(PAGES["deployment.md"]) == []


# -- planted errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "page", "old", "new"),
    [
        (no_such_files, "README.md", "`etc/appliance.toml`", "`etc/tei-appliance.toml`"),
        (no_such_files, "README.md", "| `docs/moving-in.md` |", "| `docs/migration.md` |"),
        (no_such_files, "README.md", "| `events.jsonl` |", "| `events.json` |"),
        (no_such_files, "README.md", "| `appliance/monitor` |", "| `appliance/watch` |"),
        (no_such_files, "README.md", "`manifests/`, `jobs/`", "`manifest/`, `jobs/`"),
        (no_such_files, "operations.md", "`monitor.log`", "`watchdog.log`"),
        (no_such_files, "grpc.md", "`security.md`.", "`auth.md`."),
        (no_such_files, "CONTRIBUTING.md", "`core/settings.py`", "`core/configuration.py`"),
        (no_such_files, "metrics.md", "`etc/grafana/appliance.json`", "`etc/grafana/dashboard.json`"),
        (no_such_places, "deployment.md", "`/etc/tei-appliance/environment`", "`/etc/tei-appliance/env`"),
        (no_such_places, "deployment.md", "`/data/huggingface`", "`/data/hub`"),
        (no_such_places, "README.md", "`/var/lib/tei-appliance`", "`/var/lib/tei`"),
        (wrong_ports, "README.md", "## REST (9000)", "## REST (9003)"),
        (wrong_ports, "README.md", "8179 |", "8279 |"),
        (wrong_ports, "grpc.md", "Port 9001.", "Port 9010."),
        (wrong_ports, "moving-in.md", "begin at 8700", "begin at 9200"),
        (wrong_ports, "deployment.md", "127.0.0.1:9002:9002", "127.0.0.1:9002:8002"),
    ],
)
def test_a_planted_place_is_found(check: Any, page: str, old: str, new: str) -> None:
    assert len(check(planted(page, old, new))) == 1


@pytest.mark.parametrize(
    ("page", "old", "new"),
    [
        ("README.md", "`docs/design.md` says", "[the design](docs/designs.md) says"),
        ("README.md", "`docs/design.md` says", "[the design](docs/design.md#the-houses) says"),
        ("README.md", "`docs/design.md` says", "[the design](#the-maps) says"),
        ("README.md", "https://github.com/fullstorydev/grpcurl", "http:/github.com/fullstorydev/grpcurl"),
        ("operations.md", '"Calls that end replicas" below', '"Calls that kill" below'),
        ("operations.md", 'see "Calls that end replicas"', 'see "Poison"'),
        ("operations.md", "## Calls that end replicas", "## Calls"),
    ],
)
def test_a_dead_link_is_found(page: str, old: str, new: str) -> None:
    path = next(path for path in PATHS if path.name == page)
    assert len(dead_links(planted(page, old, new), path)) >= 1


def test_a_link_that_leads_somewhere_is_none() -> None:
    text = planted("README.md", "`docs/design.md` says", "[one](docs/design.md#the-house), [two](#the-map) say")
    assert dead_links(text, ROOT / "README.md") == []


@pytest.mark.parametrize("name", ["keys.required", "golden/", "audit.jsonl", "state.toml"])
def test_a_file_that_the_table_of_the_data_folder_leaves_out_is_found(name: str) -> None:
    whole = section(PAGES["deployment.md"], "## The data folder")
    cut = whole.replace(f"`{name}`", "")
    assert f"{name.rstrip('/')} is left out" in lasting_left_out(PAGES["deployment.md"].replace(whole, cut))
