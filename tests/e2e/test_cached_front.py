"""What a front with a cache in Qdrant got wrong, by the harm that it did; one test, or more, for each.

1  answers shift silently: a group that failed was left out      test_one_bad_text_…
2  the prompt is not in the key                                  test_a_prompt_is_…
3  what is stored is normalised                                  test_what_is_kept_is_…
4  another model of the same width poisons                       test_another_model_…
5  the indexer loses its last batch                              tests/examples/test_code_search_index.py
6  one call at a time, and a start deletes what is stored        test_calls_run_…, test_a_restart_…
7  a lone surrogate is a 500, and a request is unbounded         test_nonsense_…
8  equal texts are computed many times                           test_duplicates_…, test_cache.py: 64 callers
9  health says ok while the store is down; texts lie open        test_a_store_that_is_down_…, test_no_text_…
10 a vector index for data that nobody searches                  test_a_look_up_…
"""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import requests

from testing.arrows import dense_request
from testing.cached import FAMILIES, CachedAppliance, batch_of, openai
from testing.running import RunningAppliance, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(600)]
SECRET = "a text that nobody else shall read"


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CachedAppliance]:
    running = CachedAppliance(tmp_path_factory.mktemp("front"))
    with running:
        running.add("dense")
        yield running


def test_one_bad_text_fails_the_request_and_is_named_cached_or_not(box: CachedAppliance) -> None:
    texts = [f"shift {number}" for number in range(40)]
    long = "word " * 2000
    for _ in range(2):  # the second time all others are in the cache
        request = dense_request("dense", [*texts[:8], long, *texts[8:]])
        request.truncate = False
        with pytest.raises(grpc.RpcError, match="Row 8: ") as caught:
            box.channel_stub().EmbedArrow(request, timeout=30)
        assert dict(caught.value.trailing_metadata())["x-arrow-error-row"] == "8"
        request = dense_request("dense", list(texts))
        request.truncate = False
        assert len(box.channel_stub().EmbedArrow(request, timeout=30).arrow_ipc) > 0
    assert len(openai(box, "dense", texts)[0]) == 40


def test_a_prompt_is_a_part_of_what_is_asked(box: CachedAppliance) -> None:
    folder = box.model("prompted")
    prompts = {"prompts": {"query": "ask about: ", "passage": "tell of: "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    box.create("prompted", model_id=str(folder))
    box.wait_ready("prompted")
    box.wait_kept("prompted")
    found = {name: box.embed("prompted", "the same text", prompt_name=name) for name in ("query", "passage")}
    plain = box.embed("prompted", "the same text")
    assert [said for _, said in (*found.values(), plain)] == ["miss"] * 3
    assert len({vector for vector, _ in (*found.values(), plain)}) == 3
    again = {name: box.embed("prompted", "the same text", prompt_name=name) for name in ("query", "passage")}
    assert again == {name: (vector, "hit") for name, (vector, _) in found.items()}
    box.delete("/instances/prompted")


def test_what_is_kept_is_not_normalised(box: CachedAppliance) -> None:
    first, _ = box.embed("dense", "how long", normalize=False)
    again, said = box.embed("dense", "how long", normalize=False)
    assert (again, said) == (first, "hit")
    assert abs(float(np.linalg.norm(np.frombuffer(again, np.float32))) - 1) > 0.01


def test_another_model_of_the_same_width_gets_nothing_of_the_first(box: CachedAppliance) -> None:
    old, _ = box.embed("dense", "which model")
    box.add("other", "bert-dense-tanh")
    new, said = box.embed("other", "which model")
    assert said == "miss"
    assert new != old
    box.delete("/instances/other")


def test_calls_run_beside_each_other(box: CachedAppliance) -> None:
    """Hits, misses and batches at once: each has its own answer."""
    expected = {f"beside {number}": box.embed("dense", f"beside {number}")[0] for number in range(20)}

    def ask(number: int) -> None:
        text = f"beside {number % 20}"
        if number % 3:
            assert box.embed("dense", text)[0] == expected[text]
        else:
            assert batch_of(box, "dense", [text, f"new {number}", text])[0][::2] == [expected[text]] * 2

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(200)))


def test_a_restart_of_everything_keeps_what_was_computed(box: CachedAppliance) -> None:
    vector, _ = box.embed("dense", "outlives everything")
    assert box.stop() == 0
    box.up()
    del box.kept
    box.wait_ready("dense")
    eventually(lambda: box.embed("dense", "outlives everything") == (vector, "hit"))


def test_nonsense_is_refused_with_words_and_changes_nothing(box: CachedAppliance) -> None:
    url = f"http://127.0.0.1:{box.http_port}/v1/embeddings"
    surrogate = requests.post(url, data=b'{"model": "dense", "input": "\\ud800"}', timeout=30)
    assert 400 <= surrogate.status_code < 500
    many = box.http("/v1/embeddings", {"model": "dense", "input": ["a"] * 100_001})
    assert 400 <= many.status_code < 500
    for headers in ({"x_tei_cache": "nonsense"}, {"x_tei_cache": "use, only"}):
        answer = box.http("/v1/embeddings", {"model": "dense", "input": "a"}, **headers)
        assert (answer.status_code, "x-tei-cache" in answer.text) == (400, True)
    assert box.delete("/cache?instance=nobody").status_code == 404
    assert box.delete("/cache?instanze=dense").status_code == 422


def test_duplicates_of_a_request_are_computed_once(box: CachedAppliance) -> None:
    before = box.get("/cache").json()["misses"]
    rows, said = batch_of(box, "dense", ["five times"] * 5)
    assert (len(set(rows)), said) == (1, "hits=0, misses=1")
    assert box.get("/cache").json()["misses"] == before + 1


def test_no_text_lies_in_the_data_folder(box: CachedAppliance) -> None:
    before = eventually(lambda: box.get("/cache").json()["entries"])  # none where the store was not read in time
    box.embed("dense", SECRET)
    eventually(lambda: (box.get("/cache").json()["entries"] or 0) > before)
    written = [path for path in (box.folder / "cache").rglob("*") if path.is_file()]
    assert written
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    assert {oct(path.stat().st_mode & 0o077) for path in written if ".db" in path.name} == {"0o0"}


def test_a_look_up_needs_no_search(box: CachedAppliance) -> None:
    """Exact keys, and nothing that grows with what is stored: a hit is far cheaper than a computation."""
    texts = [f"look up {number}" for number in range(50)]
    for text in texts:
        box.embed("dense", text)
    page = box.get("/metrics").text
    assert "tei_manager_cache_read_seconds_bucket" in page
    assert [box.embed("dense", text)[1] for text in texts] == ["hit"] * 50


def test_a_store_that_is_down_is_told_and_harms_no_call(tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        socket.socket() as nobody
    ):  # it does not listen, and as long as it has the port, the appliance does not take it
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        seeds = f'[cache]\nstore = "redis"\nurl = "redis://:secret-word@127.0.0.1:{port}/0"\n'
        with RunningAppliance(tmp_path_factory.mktemp("down"), seeds=seeds, cache=True) as running:
            running.create("dense", model_id=str(FAMILIES / "bert-cls"))
            running.wait_ready("dense")
            url = f"http://127.0.0.1:{running.http_port}/v1/embeddings"
            for number in range(20):
                answer = requests.post(url, json={"model": "dense", "input": f"text {number % 3}"}, timeout=30)
                assert answer.status_code == 200
            found = running.get("/cache").json()
            assert found["failure"]
            event = eventually(
                lambda: [each for each in running.get("/events").json() if each["event"] == "cache_failed"]
            )
            assert "secret-word" not in json.dumps([event, found])
