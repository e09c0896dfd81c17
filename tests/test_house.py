"""What keeps the house readable. Numbers and lists of exceptions here may only be tightened, never loosened."""

import ast
import re
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = [path for path in sorted((ROOT / "appliance").rglob("*.py")) if "_pb2" not in path.name]

LINES = 350
BROAD_EXCEPTS = 18
ELSEWHERE = re.compile(r"\bCONTRACT\b|\bDESIGN\.md")


@cache
def trees() -> dict[str, ast.Module]:
    """Of all modules, by their paths."""
    return {path.relative_to(ROOT / "appliance").as_posix(): ast.parse(path.read_text()) for path in MODULES}


def test_no_module_is_longer_than_can_be_kept_in_mind() -> None:
    lengths = {path.relative_to(ROOT / "appliance").as_posix(): len(path.read_text().splitlines()) for path in MODULES}
    assert not {name: length for name, length in lengths.items() if length > LINES}


def test_exceptions_are_caught_by_their_names() -> None:
    handlers = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    caught = [ast.unparse(handler.type) if handler.type else "BaseException" for handler in handlers]
    assert len([kind for kind in caught if re.search(r"\b(Base)?Exception\b", kind)]) <= BROAD_EXCEPTS


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert not {name: files for name, files in places.items() if len(files) > 1}


def test_no_text_cites_a_document_that_is_not_here() -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    kinds = {".py", ".md", ".toml", ".cfg", ".conf", ".yml", ".html", ".sh", ".proto", ""}
    citing = []
    for path in (ROOT / name for name in names if Path(name).suffix in kinds):
        if path.is_file() and path != Path(__file__) and ELSEWHERE.search(path.read_text(errors="replace")):
            citing.append(path.relative_to(ROOT).as_posix())
    assert citing == []


def test_the_map_in_the_readme_is_that_of_the_tree() -> None:
    section = (ROOT / "README.md").read_text().partition("\n## The map\n")[2].partition("\n## ")[0]
    mapped = re.findall(r"^\| `([a-z]+)/` \|", section, re.M)
    assert sorted(mapped) == sorted(path.parent.name for path in (ROOT / "appliance").glob("*/__init__.py"))


def test_the_tests_have_the_folders_of_the_appliance() -> None:
    across = {"e2e", "faults", "security", "examples"}  # of several programs at once, and of what stands beside them
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")} - across
    assert folders <= {path.parent.name for path in (ROOT / "appliance").glob("*/__init__.py")}


def test_neither_the_appliance_nor_a_script_needs_the_tests() -> None:
    harness = re.compile(r"^\s*(from|import) (testing|tests)\b", re.M)
    assert not [name for name in trees() if harness.search((ROOT / "appliance" / name).read_text())]
    tests = re.compile(r"^\s*(from|import) tests\b", re.M)
    outside = [*(ROOT / "scripts").glob("*.py"), *(ROOT / "testing").glob("*.py")]
    assert not [path.name for path in outside if tests.search(path.read_text())]
