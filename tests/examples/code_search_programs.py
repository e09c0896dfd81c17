"""What the demonstration does with a folder and a gateway. Run in .venv-demo; prints what came of each as JSON.

All in one process, since to import what they need takes a second:

python -m tests.examples.code_search_programs ROOM
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.code_search import indexing, syntax
from examples.code_search.cutting import LIMIT, cut
from examples.code_search.embedding import Gateway
from examples.code_search.index import Entry, Index
from examples.code_search.indexing import Progress, update
from examples.code_search.problems import Problem
from examples.code_search.savings import Savings
from examples.code_search.searching import search
from testing.fake_gateway import FakeGateway


class Bench:
    """An index in a room, its updates from the room's folder `code`, and the gateway that they ask."""

    def __init__(self, room: Path, plan: str = "") -> None:
        self.fake = FakeGateway()
        self.fake.plan = plan.split()
        self.gateway = Gateway(self.fake.url, "minilm", "reranker")
        self.code, self.place = room / "code", room / "index"
        self.code.mkdir(parents=True)
        self.index = Index(str(self.place))
        self.name = self.index.collection("code", "minilm")
        self.savings = Savings()

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.code / f"{name}.py").write_text(text)

    def updates(self, rebuild: bool = False) -> list[Progress]:
        """Up to a problem, whose words are then the last note."""
        found = [Progress()]
        self.savings = Savings()
        try:
            found += update(self.index, self.gateway, self.savings, self.name, self.code, rebuild)
        except Problem as problem:
            found.append(found[-1]._replace(note=str(problem)))
        return found

    def update(self, rebuild: bool = False) -> dict[str, Any]:
        last = self.updates(rebuild)[-1]
        return {**last._asdict(), "there": len(self.keys()), "hits": self.savings.hits, "misses": self.savings.misses}

    def keys(self) -> set[str]:
        """As another process finds them: from the folder."""
        self.index.close()
        self.index = Index(str(self.place))
        return self.index.keys(self.name)

    def wanted(self) -> set[str]:
        return {entry.key for entry in indexing.entries(self.code) if isinstance(entry, Entry)}

    def find(self, question: str, **options: Any) -> list[str]:
        answer = search(self.index, self.gateway, self.name, question, **options)
        return [hit.entry.path for hit in answer.hits]


def counts(room: Path) -> Any:
    """number of files -> (chunks that are wanted, told, told as written, found by another process)"""
    found = {}
    for number in (1, 10, 63, 64, 65, 100, 1000):
        bench = Bench(room / str(number))
        bench.write(**{f"file{at}": f"number = {at}" for at in range(number)})
        last = bench.updates()[-1]
        found[number] = [len(bench.wanted()), last.total, last.written, len(bench.keys() & bench.wanted())]
        bench.index.close()
    return found


def resumes(room: Path) -> Any:
    """Two updates of 300 chunks, of which the gateway breaks the first; and what it was asked for."""
    bench = Bench(room, "ok ok broken")
    bench.write(**{f"file{at:03}": f"number = {at}" for at in range(300)})
    found = [bench.update(), bench.update()]
    return [*found, len(bench.fake.texts), len(set(bench.fake.texts))]


def changes(room: Path) -> Any:
    """All new; nothing new; one file changed, one gone, one new; all again. Then whether the index equals the files."""
    bench = Bench(room)
    bench.write(a="one = 1", b="two = 2", c="three = 3")
    found = [bench.update(), bench.update()]
    (bench.code / "c.py").unlink()
    bench.write(b="two = 22", d="four = 4")
    found += [bench.update(), bench.update(rebuild=True)]
    return [*found, bench.keys() == bench.wanted()]


def busy(room: Path) -> Any:
    """The notes of an update that the gateway makes wait, and how many chunks it wrote."""
    bench = Bench(room, "busy busy")
    bench.write(a="one = 1")
    found = bench.updates()
    return [[each.note for each in found if each.note], found[-1].written]


def filters(room: Path) -> Any:
    bench = Bench(room)
    for path in ("src/app.py", "src/deep/app.py", "src2/app.py", "src/app.md"):
        (bench.code / path).parent.mkdir(parents=True, exist_ok=True)
        (bench.code / path).write_text("orange juice" if path.endswith("md") else f"orange = {len(path)}")
    bench.updates()
    return {
        "all": sorted(bench.find("orange")),
        "folder": sorted(bench.find("orange", path="src/")),
        "file": bench.find("orange", path="src/app.py"),
        "part of a name": bench.find("orange", path="sr"),
        "language": bench.find("orange", language="markdown"),
        "both": bench.find("orange", path="src2", language="markdown"),
        "best": bench.find("orange juice", limit=1),
        "reranked": bench.find("juice", limit=1, rerank=True),  # by length, as the fake ranks
        "languages": bench.index.languages(bench.name),
    }


def another_model(room: Path) -> Any:
    """Half as wide from the second update on; the third is a rebuild."""
    bench = Bench(room)
    bench.write(a="one = 1")
    found = [bench.update()]
    bench.fake.width //= 2
    bench.write(b="two = 2")
    found += [bench.update(), bench.update(rebuild=True)]
    return [*found, sorted(bench.find("one"))]


SOURCES = {
    "python": "import os\n\n# Says it.\n@wraps\ndef {0}(x):\n{1}\n\nclass A:\n    def b(self):\n{1}\n",
    "rust": "use std::fs;\n\n/// Says it.\n#[inline]\nfn {0}() {{\n{1}\n}}\n",
    "go": "package main\n\n// Says it.\nfunc {0}() {{\n{1}\n}}\n",
    "javascript": "// Says it.\nfunction {0}() {{\n{1}\n}}\n",
    "java": "class A {{\n  // Says it.\n  @Override\n  void {0}() {{\n{1}\n  }}\n}}\n",
    "c": "/* Says it. */\nint {0}(void) {{\n{1}\n}}\n",
}
BODIES = {"python": "        x = call(x)", "rust": "    call(1);", "go": "    call(1)"}


def languages(room: Path) -> Any:
    """language -> the chunks of three functions of some 700 characters each, by their first and last line of text."""
    found = {}
    for language, source in SOURCES.items():
        body = "\n".join([BODIES.get(language, "    call(1);")] * (700 // 16))
        text = "\n".join(source.format(name, body) for name in ("first", "second", "third"))
        chunks = list(cut(text, syntax.outline(text, language)))
        assert all(len(chunk.text) <= LIMIT for chunk in chunks)
        found[language] = [[*chunk.text.split("\n")[:3], chunk.text.split("\n")[-1]] for chunk in chunks]
    return found


def grammars(room: Path) -> Any:
    """Every language that a file's name stands for has its grammar, and takes what is none of it; a deep one, too."""
    names = sorted({*syntax.SUFFIXES.values(), *syntax.NAMES.values()})
    for name in names:
        syntax.outline("\x00}{ <a 'ü\n" * 3, name)
    deep = "(" * 50_000 + "\n" + ")" * 50_000
    return [names, len("".join(chunk.text for chunk in cut(deep, syntax.outline(deep, "python"))))]


if __name__ == "__main__":
    programs: list[Callable[[Path], Any]] = [
        *(counts, resumes, changes, busy, filters, another_model, languages, grammars),
    ]
    print(json.dumps({each.__name__: each(Path(sys.argv[1], each.__name__)) for each in programs}))
