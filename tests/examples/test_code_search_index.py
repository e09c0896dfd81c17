"""The index has what the files have: nothing is lost, nothing is asked for twice, and nothing stays that is gone."""

from typing import Any

import pytest

from tests.examples.conftest import program

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each of the programs gave."""
    return program("code_search_programs", tmp_path_factory.mktemp("index"))


@pytest.mark.parametrize("number", [1, 10, 63, 64, 65, 100, 1000])
def test_no_chunk_is_lost(found: Any, number: int) -> None:
    """Whether or not the last batch is full."""
    assert found["counts"][str(number)] == [number] * 4


def test_what_was_interrupted_goes_on_where_it_stopped(found: Any) -> None:
    first, second, asked, different = found["resumes"]
    assert (first["written"], first["there"], first["finished"]) == (128, 128, False)
    assert first["note"] == "The gateway refused (500): The model failed."
    assert (second["kept"], second["written"], second["there"], second["finished"]) == (128, 172, 300, True)
    assert asked == different == 300  # nothing twice


def test_only_what_changed_is_written(found: Any) -> None:
    new, same, changed, rebuilt, equal = found["changes"]
    keys = ("total", "kept", "written", "deleted", "there", "hits", "misses")
    assert [new[key] for key in keys] == [3, 0, 3, 0, 3, 0, 3]
    assert [same[key] for key in keys] == [3, 3, 0, 0, 3, 0, 0]
    assert [changed[key] for key in keys] == [3, 1, 2, 2, 3, 0, 2]
    assert [rebuilt[key] for key in keys] == [3, 0, 3, 0, 3, 3, 0]  # all from the cache
    assert equal


def test_a_busy_gateway_is_asked_again_and_the_reader_told(found: Any) -> None:
    notes, written = found["busy"]
    assert notes == ["The gateway is busy: All replicas are full. Asks again in 1 s."] * 2
    assert written == 1


def test_filters(found: Any) -> None:
    assert found["filters"] == {
        "all": ["src/app.md", "src/app.py", "src/deep/app.py", "src2/app.py"],
        "folder": ["src/app.md", "src/app.py", "src/deep/app.py"],
        "file": ["src/app.py"],
        "part of a name": [],
        "language": ["src/app.md"],
        "both": [],
        "best": ["src/app.md"],
        "reranked": ["src/deep/app.py"],  # the longest
        "languages": ["python", "markdown"],
    }


def test_vectors_of_two_models_are_never_in_one_index(found: Any) -> None:
    first, refused, rebuilt, paths = found["another_model"]
    assert first["there"] == refused["there"] == 1
    assert "64 numbers, and the model gives 32" in refused["note"]
    assert (rebuilt["there"], rebuilt["finished"]) == (2, True)
    assert paths == ["a.py", "b.py"]


def test_a_definition_is_one_chunk_with_what_is_said_of_it(found: Any) -> None:
    heads = {
        "python": ["# Says it.", "@wraps", "def {}(x):"],
        "rust": ["/// Says it.", "#[inline]", "fn {}() {{"],
        "go": ["// Says it.", "func {}() {{"],
        "javascript": ["// Says it.", "function {}() {{"],
        "java": ["class A {{", "  // Says it.", "  @Override"],
        "c": ["/* Says it. */", "int {}(void) {{"],
    }
    last = {"python": "        x = call(x)"}
    for language, head in heads.items():
        chunks = [chunk[: len(head)] + chunk[3:] for chunk in found["languages"][language]]
        for name in ("first", "second", "third"):
            assert [*(line.format(name) for line in head), last.get(language, "}")] in chunks, (language, chunks)


def test_every_language_has_a_grammar_that_takes_anything(found: Any) -> None:
    names, length = found["grammars"]
    assert len(names) > 40
    assert length == 100_000
