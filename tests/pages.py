"""The pages of documentation as their tests read them: code spans, blocks, tables and headings, each with its line."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PATHS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES = {path.name: path.read_text() for path in PATHS}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
HEADING = re.compile(r"^#+ (.+)$", re.M)
PORT = re.compile(r"\((\d{4})\)$")
# What the pages may name: all of the repository but its words about itself, and its tests, which plant what is wrong.
SOURCES = (
    *("appliance/**/*", "protos/**/*", "etc/**/*", "examples/**/*", "scripts/*"),
    *("*.lock", "Makefile", "Dockerfile", "setup.cfg", "pyproject.toml"),
)
BINARY = {".pyc", ".png"}


class Span(NamedTuple):
    """Inline code. before: the text of its paragraph between the span before it and this one; after: the text that
    follows. port: of the nearest heading that has one, such as `## REST (9000)`."""

    text: str
    line: int
    before: str
    after: str
    port: int | None


class Block(NamedTuple):
    """A fenced block, its continued lines joined."""

    language: str
    text: str
    line: int

    @property
    def lines(self) -> list[str]:
        return re.sub(r"\s*\\\n\s*", " ", self.text).splitlines()


class Row(NamedTuple):
    """A row of a table. header: the cells of its first row."""

    cells: list[str]
    header: list[str]
    line: int


def blocks(text: str) -> list[Block]:
    return [Block(found[1], found[2], line_of(text, found.start()) + 1) for found in FENCED.finditer(text)]


def prose(text: str) -> str:
    """The page without its blocks; every line is where it was."""
    return FENCED.sub(lambda found: "\n" * found[0].count("\n"), text)


def line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def paragraphs(text: str) -> Iterator[tuple[str, int]]:
    """(a paragraph, or a row of a table; its line)"""
    plain = prose(text)
    for found in re.finditer(r"^\|.*$|(?:^(?!\|).*\S.*\n?)+", plain, re.M):
        yield found[0], line_of(plain, found.start())


def spans(text: str) -> list[Span]:
    """A span may go on in the next line of its paragraph."""
    found: list[Span] = []
    port: int | None = None
    for paragraph, line in paragraphs(text):
        end = 0
        for code in re.finditer(r"`([^`]+)`", paragraph):
            at, words = line_of(paragraph, code.start()) + line - 1, " ".join(code[1].split())
            found.append(Span(words, at, paragraph[end : code.start()], paragraph[code.end() :], port))
            end = code.end()
        if paragraph.startswith("## "):
            named = PORT.search(paragraph.strip())
            port = int(named[1]) if named else None
    return found


def rows(text: str) -> list[Row]:
    found: list[Row] = []
    header: list[str] = []
    lines = prose(text).splitlines()
    for number, line in enumerate(lines, 1):
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells_of(line)
        elif not set(line) <= set("|-: "):
            found.append(Row(cells_of(line), header, number))
    return found


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of its level or above."""
    level, words = len(heading) - len(heading.lstrip("#")), re.escape(heading)
    found = re.search(rf"^{words}\n(.*?)(?=^#{{1,{level}}} |\Z)", text, re.M | re.S)
    assert found, f"there is no section {heading}"
    return found[1]


def headings(text: str) -> list[str]:
    return HEADING.findall(prose(text))


@cache
def tree_texts() -> tuple[str, ...]:
    """Everything that a page may name."""
    paths = [path for pattern in SOURCES for path in sorted(ROOT.glob(pattern)) if path.suffix not in BINARY]
    return tuple(path.read_text(errors="replace") for path in paths if path.is_file())


@cache
def tree_words() -> frozenset[str]:
    """Every word of those: names with underscores, dots within, or hyphens are one word, and their parts are words."""
    words: set[str] = set()
    for text in tree_texts():
        words.update(re.findall(r"\w+", text))
        words.update(re.findall(r"\w+(?:[.-]\w+)+", text))
    return frozenset(words)


def planted(page: str, old: str, new: str) -> str:
    """A page with an error in it."""
    text = PAGES[page]
    assert old in text, f"{page} has no {old!r} any more: plant the error elsewhere"
    return text.replace(old, new, 1)
