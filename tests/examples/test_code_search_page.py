"""The page of the code search as its reader meets it, in a real browser before a gateway that answers as told."""

import re
from typing import Any

import pytest

from tests.examples.code_search_names import CHUNKS, EVIL, EVIL_NAME, IMAGE
from tests.examples.conftest import program

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What was on the page after each step, by the step's name."""
    return program("code_search_browser", tmp_path_factory.mktemp("page"))


def test_nothing_of_an_indexed_file_is_executed(seen: Any) -> None:
    """Nor of its name, of the question, or of what was typed as a source; and the page needs no other host."""
    assert seen["seen"] == []
    assert seen["elements"] == 0
    assert seen["found"] == ["evil.py:1-3"]
    assert seen["text"] == [f"{number}{line}" for number, line in enumerate(EVIL.split("\n"), 1)]
    assert seen["marked"] == ["evil"]
    assert seen["named"] == f"{EVIL_NAME}:1"
    assert seen[IMAGE] == f"{IMAGE!r} is no folder of this machine."
    assert seen["left out"] == "1 file left out<script>alert(1)<script>.bin: binary"


def test_what_is_no_source_is_told(seen: Any) -> None:
    assert seen["at first"] == ""
    assert "index it first" in seen["nothing indexed"]
    assert "neither a folder nor the URL" in seen["ext::sh -c x"]
    assert "must begin with one of https, http, ssh, file" in seen["ftp://host/x"]


def test_an_indexing_that_broke_goes_on(seen: Any) -> None:
    assert "The gateway refused (500): The model failed." in seen["broken"]
    assert f"64 of {CHUNKS} chunks of {CHUNKS} files" in seen["broken"]
    assert f"{CHUNKS} of {CHUNKS} chunks" in seen["goes on"]
    assert f"64 were there, {CHUNKS - 64} written, 0 deleted" in seen["goes on"]
    assert seen["asked"] == [CHUNKS, CHUNKS]  # nothing twice


def test_a_rebuild_shows_what_the_cache_is_for(seen: Any) -> None:
    assert seen["computed"] == ["0", str(CHUNKS - 64), "0.0"]
    hits, misses, saved = seen["rebuilt"]
    assert (hits, misses) == (str(CHUNKS), "0")
    assert re.fullmatch(r"-?\d+\.\d", saved)
    assert re.search(r"A computed text took [\d.]+ ms\. Seconds saved = hits × the seconds", seen["formula"])  # noqa: RUF001


def test_results_are_filtered_and_ranked(seen: Any) -> None:
    assert sorted(seen["in a folder"]) == ["sub/long.py:1", "sub/short.md:1"]
    assert seen["of a language"] == ["sub/short.md:1"]
    assert seen["reranked"] == ["sub/long.py:1", "sub/short.md:1"]  # the longest first, as the fake ranks
    ranked = r"2 results \([\d.]+ s, scores of the reranker, the question's vector: cache miss\) for: this word"
    assert re.fullmatch(ranked, seen["head"])


def test_an_indexing_ends_when_the_reader_says(seen: Any) -> None:
    assert seen["stopped"] == "Stopped. Index goes on where it stopped."
    assert seen["asked after a stop"] == 64  # the request in work, and no other
    assert f"{CHUNKS} of {CHUNKS} chunks" in seen["after a stop"]


def test_an_absent_gateway_is_told(seen: Any) -> None:
    assert re.match(r"No gateway answers at http://127\.0\.0\.1:\d+: start the appliance", seen["away"])
