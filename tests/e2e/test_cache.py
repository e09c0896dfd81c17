"""The cache in a whole appliance: what comes from it is what was computed first, and it cannot keep a lie."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest
import requests

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.arrows import dense_request, vectors
from testing.cached import FAMILIES, CachedAppliance, batch_of, entries_of, kill_multiplexers, openai, stream_of
from testing.running import RunningAppliance, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(600)]
BYPASS, REFRESH, ONLY = ((("x-tei-cache", word),) for word in ("bypass", "refresh", "only"))


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CachedAppliance]:
    running = CachedAppliance(tmp_path_factory.mktemp("cached"))
    with running:
        running.add("dense")
        yield running


# -- what was computed once is answered on every way ------------------------------------------------------------------


def test_each_way_gives_what_another_one_computed(box: CachedAppliance) -> None:
    texts = [f"each way {number}" for number in range(5)]
    first = [box.embed("dense", text) for text in texts]
    assert [said for _, said in first] == ["miss"] * 5
    rows = [vector for vector, _ in first]
    assert [box.embed("dense", text) for text in texts] == [(row, "hit") for row in rows]
    assert stream_of(box, "dense", texts) == (rows, "hits=5, misses=0")
    assert batch_of(box, "dense", [*texts]) == (rows, "hits=5, misses=0")
    assert openai(box, "dense", texts) == (rows, "hits=5, misses=0")
    assert openai(box, "dense", texts[0]) == ([rows[0]], "hit")
    tei_rows = box.http("/embed", {"inputs": texts, "normalize": True, "truncate": True}, x_tei_instance="dense")
    assert [np.array(row, np.float32).tobytes() for row in tei_rows.json()] == rows
    assert tei_rows.headers["x-tei-cache"] == "hits=5, misses=0"


def test_a_batch_computes_only_what_is_missing_and_keeps_nulls_and_order(box: CachedAppliance) -> None:
    kept, _ = box.embed("dense", "batch kept")
    texts = ["batch new", None, "batch kept", "batch new", "batch other", None]
    rows, said = batch_of(box, "dense", texts)
    assert said == "hits=1, misses=2"
    assert (rows[1], rows[5]) == (None, None)
    assert rows[2] == kept
    assert rows[0] == rows[3] != rows[4]
    assert batch_of(box, "dense", texts) == (rows, "hits=3, misses=0")


def test_a_stream_answers_what_it_has_while_it_waits_for_more(box: CachedAppliance) -> None:
    """One text at a time, each after the answer to the one before: some of them are in the cache."""
    texts = [f"ping {number % 7} {'kept' if number % 2 else 'new'}" for number in range(40)]
    expected = {text: box.embed("dense", text)[0] for text in texts if "kept" in text}
    sent = SimpleQueue[Any]()
    call = box.channel_stub().EmbedStream(iter(sent.get, None), timeout=30)
    found = []
    for text in texts:
        inner = tei.EmbedRequest(inputs=text, truncate=True, normalize=True)
        sent.put(mux.EmbedRequest(target=mux.Target(instance_name="dense"), request=inner))
        found.append(np.array(next(call).embeddings, np.float32).tobytes())
    sent.put(None)
    assert list(call) == []
    assert dict(call.trailing_metadata())["x-tei-cache"] == "hits=33, misses=7"
    for text, vector in zip(texts, found, strict=True):
        assert vector == expected.setdefault(text, vector)


def test_the_cost_of_the_first_computation_is_told_again(box: CachedAppliance) -> None:
    body = {"model": "dense", "input": "six words that cost some tokens"}
    first, second = (box.http("/v1/embeddings", body).json()["usage"] for _ in range(2))
    assert first == second
    assert first["total_tokens"] > 3


@pytest.mark.parametrize(
    "options",
    [{"normalize": False}, {"truncation_direction": 1}, {"dimensions": 8}, {"truncate": False}],
    ids=lambda each: next(iter(each)),
)
def test_another_option_is_another_entry(box: CachedAppliance, options: dict[str, Any]) -> None:
    text = f"option {options}"
    plain, _ = box.embed("dense", text)
    other, said = box.embed("dense", text, **options)
    assert said == "miss"
    assert box.embed("dense", text, **options) == (other, "hit")
    assert box.embed("dense", text) == (plain, "hit")
    assert (other == plain) == ("normalize" not in options and "dimensions" not in options)


def test_64_callers_of_one_text_cost_one_computation(box: CachedAppliance) -> None:
    before = box.get("/cache").json()
    start = threading.Barrier(64)

    def ask(_: int) -> bytes:
        start.wait()
        return box.embed("dense", "asked by all")[0]

    with ThreadPoolExecutor(64) as pool:
        assert len(set(pool.map(ask, range(64)))) == 1
    after = box.get("/cache").json()
    grown = {name: after[name] - before[name] for name in ("misses", "hits", "joined")}
    assert grown["misses"] == 1
    assert grown["hits"] + grown["joined"] == 63


def test_sparse_vectors_are_kept_bit_for_bit(box: CachedAppliance) -> None:
    box.add("sparse", "bert-splade", pooling="splade")
    target = mux.Target(instance_name="sparse")
    request = mux.EmbedSparseRequest(target=target, request=tei.EmbedSparseRequest(inputs="a few words", truncate=True))
    (first, one), (second, two) = (box.channel_stub().EmbedSparse.with_call(request, timeout=30) for _ in range(2))
    assert [dict(each.initial_metadata())["x-tei-cache"] for each in (one, two)] == ["miss", "hit"]
    assert first.sparse_embeddings == second.sparse_embeddings
    assert len(first.sparse_embeddings) > 3
    rows = box.http("/embed_sparse", {"inputs": ["a few words"]}, x_tei_instance="sparse")
    assert rows.headers["x-tei-cache"] == "hit"
    assert [entry["index"] for entry in rows.json()[0]] == [entry.index for entry in first.sparse_embeddings]
    box.delete("/instances/sparse")


# -- what a caller says -----------------------------------------------------------------------------------------------


def test_a_caller_may_pass_by_it_renew_it_or_want_nothing_else(box: CachedAppliance) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        box.embed("dense", "said", ONLY)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert dict(caught.value.trailing_metadata())["x-tei-code"] == "NOT_CACHED"
    assert box.embed("dense", "said", BYPASS)[1] == "bypass"
    with pytest.raises(grpc.RpcError):
        box.embed("dense", "said", ONLY)
    vector, said = box.embed("dense", "said", REFRESH)
    assert said == "miss"
    assert box.embed("dense", "said", ONLY) == (vector, "hit")
    before = box.get("/cache").json()["misses"]
    assert box.embed("dense", "said", REFRESH)[1] == "miss"
    assert box.get("/cache").json()["misses"] == before + 1
    with pytest.raises(grpc.RpcError, match="must be bypass, refresh or only"):
        box.embed("dense", "said", (("x-tei-cache", "never"),))
    both = (*ONLY, ("x-arrow-on-error", "null"))
    rows = box.stub().EmbedArrow(dense_request("dense", ["said", "never said"]), metadata=both, timeout=30)
    assert [row is None for row in vectors(rows)] == [False, True]
    odd = box.http("/v1/embeddings", {"model": "dense", "input": "said"}, x_tei_cache="\xe9")
    assert (odd.status_code, "must be bypass, refresh or only" in odd.text) == (400, True)
    refused = box.http("/v1/embeddings", {"model": "dense", "input": "not said"}, x_tei_cache="only")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_cached")


def test_only_names_how_many_texts_of_a_batch_are_missing(box: CachedAppliance) -> None:
    box.embed("dense", "only one")
    request = dense_request("dense", ["only one", "only two", "only three"])
    with pytest.raises(grpc.RpcError, match="2 of the texts are not in the cache"):
        box.channel_stub().EmbedArrow(request, timeout=30, metadata=ONLY)


def test_vectors_that_do_not_fit_an_index_are_refused(box: CachedAppliance) -> None:
    own = box.fingerprint("dense")
    assert box.embed("dense", "fits", (("x-tei-expect-fingerprint", own),))
    with pytest.raises(grpc.RpcError) as caught:
        box.embed("dense", "fits", (("x-tei-expect-fingerprint", "0" * 32),))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    answer = box.http("/v1/embeddings", {"model": "dense", "input": "fits"}, x_tei_expect_fingerprint="0" * 32)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "fingerprint_differs")
    fitting = box.http("/v1/embeddings", {"model": "dense", "input": "fits"}, x_tei_expect_fingerprint=str(own))
    assert fitting.headers["x-tei-fingerprint"] == own


# -- it needs no replica, and it cannot keep a lie --------------------------------------------------------------------


def test_what_it_has_is_answered_while_the_replica_is_dead(box: CachedAppliance) -> None:
    box.add("mortal", replicas=1)
    kept, _ = box.embed("mortal", "outlives")
    for process in box.processes_of("mortal"):
        process.kill()
    assert box.embed("mortal", "outlives") == (kept, "hit")
    eventually(lambda: box.embed("mortal", "computed by the next process"))
    box.post("/instances/mortal/stop")

    def refusal() -> str:
        try:
            box.embed("mortal", "outlives")
        except grpc.RpcError as error:
            return str(error.details())
        return ""

    eventually(lambda: "is stopped" in refusal())  # an operator's word counts more
    box.delete("/instances/mortal")


def test_instances_that_compute_the_same_share_it_and_others_do_not(box: CachedAppliance) -> None:
    vector, _ = box.embed("dense", "shared")
    box.add("twin")
    box.add("other", pooling="mean")
    assert box.embed("twin", "shared") == (vector, "hit")
    assert box.embed("other", "shared")[1] == "miss"
    same = box.get("/compatibility", a="dense", b="twin").json()
    assert (same["compatible"], same["differing"]) == (True, [])
    differs = box.get("/compatibility", a="dense", b="other").json()
    assert (differs["compatible"], differs["differing"]) == (False, ["pooling"])
    for name in ("twin", "other"):
        box.delete(f"/instances/{name}")


def test_files_that_change_under_a_process_end_its_fingerprint_until_it_is_restarted(box: CachedAppliance) -> None:
    folder = box.add("changing")
    before = box.fingerprint("changing")
    old, _ = box.embed("changing", "changes")
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    eventually(lambda: box.embed("changing", "changes")[1] == "bypass")
    eventually(
        lambda: "have changed since its processes began" in (box.instance("changing")["why_no_fingerprint"] or "")
    )
    assert box.fingerprint("changing") is None
    assert box.get("/compatibility", a="dense", b="changing").status_code == 409
    assert box.delete("/cache?instance=changing").status_code == 409
    with pytest.raises(grpc.RpcError, match="has none now"):
        box.embed("changing", "changes", (("x-tei-expect-fingerprint", before),))
    box.post("/instances/changing/restart")
    box.wait_ready("changing")
    box.wait_kept("changing")
    assert box.fingerprint("changing") != before
    assert box.embed("changing", "changes") == (old, "miss")  # the line at its end changes no number
    box.delete("/instances/changing")


def test_a_replica_that_strays_takes_its_entries_along(box: CachedAppliance) -> None:
    folder = box.add("straying")
    eventually(lambda: box.embed("straying", "before")[1] == "hit")
    golden = box.folder / "cache" / "golden.json"
    eventually(lambda: json.loads(golden.read_text()).get("straying-0", [""])[0])
    assert box.embed("straying", "since the comparison")[1] == "miss"
    purged = len(box.events("cache_purged"))
    weights = folder / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    header = 8 + int.from_bytes(raw[:8], "little")
    numbers = np.frombuffer(raw, "<f4", offset=header).copy()
    weights.write_bytes(bytes(raw[:header]) + np.roll(numbers, 7).tobytes())
    for process in box.processes_of("straying"):
        process.kill()

    def since() -> list[dict[str, Any]]:
        return box.events("cache_purged")[purged:]

    def told() -> list[str]:
        return [each["message"] for each in since() if each.get("instance") == "straying"]

    # What the monitor deletes once more each minute may be recorded first; that names no instance.
    eventually(lambda: any("strayed from its golden answers" in message for message in told()), 90)
    eventually(lambda: sum(each["entries"] for each in since()) > 0, 90)
    # The same model: its entries were those of the other one, too.
    assert box.embed("dense", "since the comparison")[1] == "miss"
    box.delete("/instances/straying")


def test_a_stream_keeps_nothing_of_another_instance_that_answers_for_the_model_now(box: CachedAppliance) -> None:
    folder = box.add("first")
    box.create("second", model_id=str(folder), pooling="mean")
    box.wait_ready("second")
    eventually(lambda: box.fingerprint("second"))
    box.embed("first", "known")
    right, wrong = (box.embed(name, "computed late", BYPASS)[0] for name in ("first", "second"))
    assert right != wrong
    box.post("/instances/second/stop")
    target = mux.Target(model_id=str(folder))

    def message(text: str) -> mux.EmbedRequest:
        return mux.EmbedRequest(target=target, request=tei.EmbedRequest(inputs=text, truncate=True, normalize=True))

    eventually(lambda: box.channel_stub().Embed(message("known"), timeout=30))
    sent = SimpleQueue[Any]()
    call = box.channel_stub().EmbedStream(iter(sent.get, None), timeout=90)
    sent.put(message("known"))
    next(call)
    box.post("/instances/first/stop")
    box.post("/instances/second/start")
    box.wait_ready("second")
    sent.put(message("computed late"))
    assert np.array(next(call).embeddings, np.float32).tobytes() == wrong
    sent.put(None)
    assert list(call) == []
    box.post("/instances/first/start")
    box.wait_ready("first")
    assert box.embed("first", "computed late") == (right, "miss")
    for name in ("first", "second"):
        box.delete(f"/instances/{name}")


def test_a_folder_that_is_put_in_the_place_of_another_is_not_what_the_processes_have_loaded(
    box: CachedAppliance,
) -> None:
    """Its files are older than the processes: their own times say nothing."""
    other = box.model("prepared")
    config = other / "config.json"
    config.write_text(config.read_text() + "\n")
    link = box.models / "in use"
    link.symlink_to(box.model("prepared before"))
    time.sleep(0.2)
    box.create("linked", model_id=str(link))
    box.wait_ready("linked")
    box.wait_kept("linked")
    assert box.embed("linked", "by the old files")[1] in ("miss", "hit")
    new = box.models / "new"
    new.symlink_to(other)
    new.replace(link)
    eventually(lambda: box.embed("linked", "by the old files")[1] == "bypass")
    eventually(lambda: "have changed since its processes began" in (box.instance("linked")["why_no_fingerprint"] or ""))
    assert box.embed("linked", "by the old files")[1] == "bypass"
    box.delete("/instances/linked")


def test_a_stream_that_was_answered_ends_well_though_its_replica_has_died_since(box: CachedAppliance) -> None:
    box.add("dying")
    inner = tei.EmbedRequest(inputs="answered before", truncate=True, normalize=True)
    sent = SimpleQueue[Any]()
    call = box.channel_stub().EmbedStream(iter(sent.get, None), timeout=30)
    sent.put(mux.EmbedRequest(target=mux.Target(instance_name="dying"), request=inner))
    assert next(call)
    for process in box.processes_of("dying"):
        process.kill()
    time.sleep(0.3)
    sent.put(None)
    assert list(call) == []
    assert dict(call.trailing_metadata())["x-tei-cache"] == "hits=0, misses=1"
    box.delete("/instances/dying")


def test_calls_go_on_while_a_change_of_files_cannot_be_noted(box: CachedAppliance) -> None:
    folder = box.add("unnoted")
    box.embed("unnoted", "any text")
    lock = box.folder / "cache" / "purges.json.lock"
    lock.unlink(missing_ok=True)
    lock.mkdir()
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    eventually(lambda: box.embed("unnoted", "any text")[1] == "bypass")
    lock.rmdir()
    box.delete("/instances/unnoted")


def test_an_instance_that_is_stuck_does_not_hold_up_one_that_computes_the_same(box: CachedAppliance) -> None:
    box.add("stuck")
    before = box.get("/cache").json()["misses"]
    for process in box.processes_of("stuck"):
        process.suspend()
    inner = tei.EmbedRequest(inputs="asked of both", truncate=True, normalize=True)
    request = mux.EmbedRequest(target=mux.Target(instance_name="stuck"), request=inner)
    waiting = box.channel_stub().Embed.future(request, timeout=30)
    eventually(lambda: box.get("/cache").json()["misses"] > before)  # it is at the replica
    assert box.embed("dense", "asked of both")[1] == "miss"
    # A replica that missed a probe is given no calls, and those that wait for it end; this one got nothing of it.
    assert not waiting.done() or waiting.code() is not grpc.StatusCode.OK
    waiting.cancel()
    box.delete("/instances/stuck")


def test_an_instance_may_do_without(box: CachedAppliance) -> None:
    box.add("without", cache=False)
    assert [box.embed("without", "again")[1] for _ in range(2)] == ["bypass", "bypass"]
    cached = {each["name"]: each for each in box.get("/cache").json()["instances"]}
    assert (cached["without"]["cached"], cached["dense"]["cached"]) == (False, True)
    assert "cache = false" in cached["without"]["why"]
    box.delete("/instances/without")


# -- the store breaks -------------------------------------------------------------------------------------------------


def test_a_damaged_file_is_a_miss_an_event_and_begun_anew(box: CachedAppliance) -> None:
    vector, _ = box.embed("dense", "damaged")
    eventually(lambda: entries_of(box))
    time.sleep(0.3)  # until it is written: afterwards the entry is in the file alone
    kill_multiplexers(box)
    for path in entries_of(box):
        for file in (path, path.with_name(f"{path.name}-wal")):
            with suppress(FileNotFoundError), file.open("r+b") as opened:  # a log goes with its last connection
                opened.write(b"\xff" * file.stat().st_size)
    assert box.embed("dense", "damaged")[0] == vector
    eventually(lambda: box.embed("dense", f"damaged {time.monotonic()}") and box.events("cache_damaged"))
    new, _ = box.embed("dense", "after the damage")
    eventually(lambda: box.embed("dense", "after the damage") == (new, "hit"))


def test_killed_multiplexers_lose_no_vector_and_shift_none(box: CachedAppliance) -> None:
    texts = [f"killed {number}" for number in range(40)]
    expected = dict(zip(texts, batch_of(box, "dense", list(texts), normalize=True)[0], strict=True))
    for turn in range(4):
        rows = batch_of(box, "dense", [f"filling {turn} {number}" for number in range(200)])[0]
        assert len(rows) == 200
        kill_multiplexers(box)
        for text in texts:
            vector, said = box.embed("dense", text)
            if said == "miss":  # it was not written yet: computed again, alone and not among others
                old, new = (np.frombuffer(each or b"", np.float32) for each in (expected[text], vector))
                np.testing.assert_allclose(new, old, atol=1e-4)
                expected[text] = vector
            assert vector == expected[text]


def test_the_command_line_shows_fills_and_clears_it(box: CachedAppliance, tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("".join(f"warm {number}\n" for number in range(300)))
    assert "0 were there, 300 were computed now" in box.cli("cache", "warm", str(lines), "-i", "dense").stdout
    assert "300 were there, 0 were computed now" in box.cli("cache", "warm", str(lines), "-i", "dense").stdout
    assert box.embed("dense", "warm 299")[1] == "hit"
    shown = box.cli("cache", "status").stdout
    assert "store    sqlite: " in shown
    assert str(box.fingerprint("dense")) in shown
    assert "cached embeddings are forgotten" in box.cli("cache", "clear", "-i", "dense").stdout
    assert box.embed("dense", "warm 299")[1] == "miss"
    assert box.get("/cache").json()["saved_secs"] > 0
    assert 'Instance "nobody" not found' in box.cli("cache", "warm", str(lines), "-i", "nobody").stderr


def test_what_was_counted_is_in_the_metrics(box: CachedAppliance) -> None:
    page = box.get("/metrics").text
    counted = re.findall(r'^tei_manager_cache_lookups_total\{instance="dense",outcome="(\w+)"\} (\d+)', page, re.M)
    assert {outcome for outcome, count in counted if int(count) > 0} == {"hit", "miss", "bypass"}


def test_each_key_may_have_entries_of_its_own(tmp_path: Path) -> None:
    keys = {name: f"key-of-{name}-000000000000" for name in ("one", "two")}
    tables = "".join(
        f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\nrole = "admin"\n'
        for name, key in keys.items()
    )
    seeds = f'[cache]\nscope = "key"\n{tables}[[instances]]\nname = "dense"\nmodel_id = "{FAMILIES / "bert-cls"}"\n'
    # One process: an entry that is not written yet is known to the one that computed it.
    settings = "open_health = true\nmultiplexer_workers = 1"
    with RunningAppliance(tmp_path, seeds=seeds, settings=settings, cache=True) as scoped:
        url = f"http://127.0.0.1:{scoped.http_port}/v1/embeddings"

        def ask(name: str) -> str:
            headers = {"Authorization": f"Bearer {keys[name]}"}
            reply = requests.post(url, json={"model": "dense", "input": "whose"}, headers=headers, timeout=30)
            return str(reply.headers.get("x-tei-cache"))

        eventually(lambda: ask("one") == "hit")
        assert ask("two") == "miss"
        assert ask("two") == "hit"
        inner = tei.EmbedRequest(inputs="whose", truncate=True, normalize=True)
        request = mux.EmbedRequest(target=mux.Target(instance_name="dense"), request=inner)
        # A caller cannot say whose entries he may have.
        forged = (("authorization", f"Bearer {keys['one']}"), ("x-tei-scope", "two"), ("x-tei-cache", "only"))
        _, call = scoped.stub().Embed.with_call(request, timeout=30, metadata=forged)
        assert dict(call.initial_metadata())["x-tei-cache"] == "hit"


def test_a_stream_outlives_a_replica_that_dies_while_it_is_idle(box: CachedAppliance) -> None:
    box.add("idle")
    sent = SimpleQueue[Any]()
    call = box.channel_stub().EmbedStream(iter(sent.get, None), timeout=60)
    target = mux.Target(instance_name="idle")

    def ask(text: str) -> Any:
        inner = tei.EmbedRequest(inputs=text, truncate=True, normalize=True)
        sent.put(mux.EmbedRequest(target=target, request=inner))
        return next(call).embeddings

    first = ask("before it dies")
    assert ask("before it dies") == first
    time.sleep(1.5)
    for process in box.processes_of("idle"):
        process.kill()
    assert ask("before it dies") == first
    eventually(lambda: box.embed("idle", f"{time.monotonic()}")[1] == "miss")
    assert ask("after it died")
    sent.put(None)
    assert list(call) == []
    assert dict(call.trailing_metadata())["x-tei-cache"] == "hits=2, misses=2"
    box.delete("/instances/idle")


def test_nothing_is_computed_where_only_the_cache_may_answer(box: CachedAppliance) -> None:
    for path, body in (("/tokenize", {"inputs": "a"}), ("/embed_all", {"inputs": "a"})):
        answer = box.http(path, body, x_tei_instance="dense", x_tei_cache="only")
        assert answer.status_code == 404, answer.text
        assert "are cached" in answer.text
    with pytest.raises(grpc.RpcError, match="not found") as caught:
        box.embed("nobody", "a", ONLY)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError, match="expects vectors"):
        box.embed("dense", "a", (("x-tei-expect-fingerprint", ""),))
    request = dense_request("dense", ["never asked", None, "nor this"])
    with pytest.raises(grpc.RpcError, match="not in the cache") as caught:  # not even to learn how wide a vector is
        box.stub().EmbedArrow(request, timeout=30, metadata=(*ONLY, ("x-arrow-on-error", "null")))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
