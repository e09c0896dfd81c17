"""What a file is written in, and the blocks of its syntax, by the grammars of tree-sitter's language pack."""

from functools import cache
from pathlib import PurePosixPath

from tree_sitter import Node, Parser
from tree_sitter_language_pack import get_parser

from examples.code_search.cutting import LIMIT, Block

DEEP = 40  # levels of syntax that are looked at: hostile files nest brackets by the thousand
TEXT = "text"  # what has no grammar here: cut along its paragraphs
# Of a definition that follows: they are in its chunk.
BEFORE = ("comment", "attribute", "decorator", "annotation")
NAMES = {"Makefile": "make", "GNUmakefile": "make", "Dockerfile": "dockerfile", "CMakeLists.txt": "cmake"}
SUFFIXES = {
    suffix: language
    for language, suffixes in {
        "bash": ".sh .bash",
        "c": ".c .h",
        "cmake": ".cmake",
        "cpp": ".cc .cpp .cxx .hh .hpp",
        "csharp": ".cs",
        "css": ".css",
        "dart": ".dart",
        "elixir": ".ex .exs",
        "erlang": ".erl .hrl",
        "go": ".go",
        "graphql": ".graphql",
        "haskell": ".hs",
        "hcl": ".hcl .tf",
        "html": ".html .htm",
        "java": ".java",
        "javascript": ".js .jsx .mjs .cjs",
        "json": ".json",
        "julia": ".jl",
        "kotlin": ".kt .kts",
        "lua": ".lua",
        "make": ".mk",
        "markdown": ".md",
        "nix": ".nix",
        "ocaml": ".ml",
        "perl": ".pl .pm",
        "php": ".php",
        "powershell": ".ps1",
        "proto": ".proto",
        "python": ".py .pyi",
        "r": ".r",
        "ruby": ".rb",
        "rust": ".rs",
        "scala": ".scala",
        "sql": ".sql",
        "svelte": ".svelte",
        "swift": ".swift",
        "toml": ".toml",
        "tsx": ".tsx",
        "typescript": ".ts .mts .cts",
        "vue": ".vue",
        "xml": ".xml .svg",
        "yaml": ".yaml .yml",
        "zig": ".zig",
    }.items()
    for suffix in suffixes.split()
}


def language_of(path: str) -> str:
    """By the file's name; `text` where that says nothing."""
    name = PurePosixPath(path)
    return NAMES.get(name.name) or SUFFIXES.get(name.suffix.lower(), TEXT)


@cache
def _parser(language: str) -> Parser:
    return get_parser(language)


def outline(text: str, language: str) -> list[Block]:
    """The outermost blocks of a text with what is inside of the long ones; none for `text`."""
    if language == TEXT:
        return []
    return _blocks(_parser(language).parse(text.encode()).root_node, DEEP)


def _blocks(node: Node, depth: int) -> list[Block]:
    found: list[Block] = []
    begin = None  # the line where comments right above the next child begin
    end = -1
    for child in node.children:
        row, last = child.start_point.row, child.end_point.row
        first = begin if begin is not None and row <= end + 1 else row
        # A comment behind code on its line is that code's.
        leads = any(word in child.type for word in BEFORE) and row > end
        begin = first if leads else None
        # A comment of some grammars ends at column 0 of the next line.
        end = last - (child.end_point.column == 0 and last > row)
        inner = _blocks(child, depth - 1) if depth and child.end_byte - child.start_byte > LIMIT else []
        found.append(Block(first, end, inner))
    return found
