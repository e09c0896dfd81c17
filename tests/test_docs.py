"""The pages in docs/ are part of the product: what they show parses or runs, and what they list is complete.

What they name and claim has files of its own: `test_docs_routes`, `_answers`, `_proved`, `_running`, `_names`,
`_commands`, `_places` and `_claims`. Their checks take a text and return complaints; each is proved by planted errors.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from appliance.cli.main import parser
from appliance.core import listing, settings
from appliance.core.events import Event
from testing.running import RunningAppliance
from tests import pages
from tests.test_readme import here

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
SOURCE = "\n".join(path.read_text() for path in (ROOT / "appliance").rglob("*.py"))


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of each fenced block in that language: the end of one is not taken for the beginning of another."""
    found = [(page.name, block) for page in PAGES for block in pages.blocks(page.read_text())]
    return [(name, block.text) for name, block in found if re.fullmatch(language, block.language)]


@pytest.mark.processes
def test_the_page_of_the_http_interfaces_is_that_of_their_descriptions() -> None:
    code = "import runpy; print(runpy.run_path('scripts/docs.py')['page'](), end='')"
    written = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs" / "rest.md").read_text() == written


def events() -> set[str]:
    """The words of those events that some code records, or names as a condition."""
    return {Event[name].value for name in re.findall(r"\bEvent\.([A-Z][A-Z_]*)\b", SOURCE)}


def test_the_runbook_has_every_event() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    listed = {name for row in re.findall(r"^\| (`[^|]*) \|", page, re.M) for name in re.findall(r"`([a-z_]+)`", row)}
    assert len(events()) > 20
    assert listed == events() == {event.value for event in Event}


def test_configuration_blocks_are_accepted() -> None:
    assert len(blocks("toml")) >= 2
    for name, block in blocks("toml"):
        content = tomllib.loads(block)
        is_listing = any("addresses" in each for each in content.get("instances", ()))
        try:
            listing.parse(content) if is_listing else settings.parse(content, {}, {}, "/data")
        except Exception as error:
            raise AssertionError(f"{name}: {block}") from error


def test_yaml_blocks_parse() -> None:
    for name, block in blocks("ya?ml"):
        assert list(yaml.safe_load_all(block)), name


def test_commands_that_are_shown_exist() -> None:
    """Blocks that are not run (they need other machines) are at least commands that there are."""
    shown = [line for _, block in blocks("") for line in re.sub(r"\\\n", " ", block).splitlines()]
    ours = [line for line in shown if re.match(r"appliance [a-z]", line)]
    assert len(ours) >= 5
    for line in ours:
        parser().parse_args(line.split("#")[0].split()[1:])  # exits with 2, and fails, for what it does not know


@pytest.mark.parametrize(("name", "block"), [found for found in blocks("python") if found[0] != "README.md"])
def test_programs_run(appliance: RunningAppliance, name: str, block: str) -> None:
    command = [sys.executable, "-c", here(block, appliance)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout, name
