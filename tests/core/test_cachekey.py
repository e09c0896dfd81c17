"""Keys and entries of the cache: one other bit anywhere is another key, and what is not whole is no entry."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core.cachekey import CachedEmbedding, Damaged, Fingerprint, Purge, is_purged, keys_for, unpacked
from appliance.core.fingerprint import fingerprint, part_of, pinned_fingerprint
from appliance.core.instance import InstanceSpec
from testing.specs import LAW

SPEC = InstanceSpec("a", "org/a")
FILES = {
    "config.json": "1",
    "tokenizer.json": "2",
    "model.safetensors": "3",
    "modules.json": "4",
    "1_Pooling/config.json": "5",
    "2_Dense/model.safetensors": "6",
    "config_sentence_transformers.json": "7",
}
WORDS = st.text(max_size=12)
KEY_PARTS = st.tuples(WORDS, WORDS, WORDS, st.binary(max_size=12), st.binary(max_size=12))


def key(parts: tuple[str, str, str, bytes, bytes]) -> bytes:
    *begun, text = parts
    return keys_for(*begun)(text)  # type: ignore[arg-type]


@LAW
@given(KEY_PARTS, KEY_PARTS)
def test_different_parts_have_different_keys_however_they_are_cut(one: Any, other: Any) -> None:
    assert (key(one) == key(other)) == (one == other)


@LAW
@given(KEY_PARTS, st.data())
def test_a_part_that_moves_into_its_neighbour_is_another_key(parts: Any, data: st.DataObject) -> None:
    joined = parts[3] + parts[4]
    at = data.draw(st.integers(0, len(joined)))
    moved = (*parts[:3], joined[:at], joined[at:])
    assert (key(moved) == key(parts)) == (moved == parts)


@LAW
@given(st.binary(max_size=64), st.integers(0, 511), st.binary(max_size=64))
def test_every_bit_of_the_text_counts(text: bytes, bit: int, options: bytes) -> None:
    key_of = keys_for("f", "", "Embed", options)
    at = bit % (8 * len(text) or 1)
    flipped = bytearray(text or b"\0")
    flipped[at // 8] ^= 1 << at % 8
    assert key_of(bytes(flipped)) != key_of(text)


@LAW
@given(st.binary(min_size=20, max_size=20), st.integers(0, 2**62), st.integers(0, 2**31), st.binary(max_size=400))
def test_an_entry_comes_back_bit_for_bit(of: bytes, at_ms: int, count: int, vector: bytes) -> None:
    entry = CachedEmbedding(of, at_ms, count, count // 2, vector)
    assert unpacked(of, entry.packed()) == entry


@LAW
@given(st.binary(min_size=1, max_size=200), st.integers(0, 10**6))
def test_one_flipped_bit_is_damage(vector: bytes, bit: int) -> None:
    raw = bytearray(CachedEmbedding(b"k" * 20, 5, 1, 1, vector).packed())
    at = bit % (8 * len(raw))
    raw[at // 8] ^= 1 << at % 8
    if 1 <= at // 8 < 4:  # the three bytes of padding mean nothing
        assert unpacked(b"k" * 20, bytes(raw)).vector == vector
    else:
        with pytest.raises(Damaged):
            unpacked(b"k" * 20, bytes(raw))


@LAW
@given(st.binary(min_size=4, max_size=100), st.integers(1, 140))
def test_a_value_that_is_cut_is_damage(vector: bytes, less: int) -> None:
    raw = CachedEmbedding(b"k" * 20, 5, 1, 1, vector).packed()
    with pytest.raises(Damaged):
        unpacked(b"k" * 20, raw[: max(0, len(raw) - less)])


def test_the_entry_of_another_key_is_none() -> None:
    raw = CachedEmbedding(b"a" * 20, 5, 1, 1, b"1234").packed()
    with pytest.raises(Damaged, match="another key"):
        unpacked(b"b" * 20, raw)


@pytest.mark.parametrize(
    ("at_ms", "purged"), [(9, False), (10, True), (15, True), (20, True), (21, False)], ids=lambda each: str(each)
)
def test_a_purge_is_of_a_time(at_ms: int, purged: bool) -> None:
    assert is_purged("f", at_ms, [Purge("f", 10, 20)], 30) == purged
    assert is_purged("g", at_ms, [Purge("", 10, 20)], 30) == purged
    assert not is_purged("g", at_ms, [Purge("f", 10, 20)], 30)


def test_what_was_computed_before_the_clock_was_set_back_is_purged() -> None:
    assert is_purged("f", 3600, [Purge("f", 10, 20)], 30)
    assert not is_purged("g", 3600, [Purge("f", 10, 20)], 30)


CHANGES = [
    *({"files": {**FILES, name: "other"}} for name in FILES),
    {"files": {name: digest for name, digest in FILES.items() if name != "2_Dense/model.safetensors"}},
    {"files": {**FILES, "vocab.txt": "8"}},
    {"spec": replace(SPEC, pooling="cls")},
    {"spec": replace(SPEC, dtype="float16")},
    {"spec": replace(SPEC, max_batch_tokens=512)},
    {"spec": replace(SPEC, extra_args=("--auto-truncate", "false"))},
    {"spec": replace(SPEC, extra_args=("--default-prompt", "query: "))},
    {"spec": replace(SPEC, extra_args=("--default-prompt-name", "query"))},
    {"engine": "tei 2"},
    {"device": "gpu"},
]


def made(spec: InstanceSpec = SPEC, files: Any = FILES, engine: str = "tei 1", device: str = "cpu") -> Fingerprint:
    return fingerprint(spec, files, engine, device)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_whatever_decides_a_vector_is_in_the_fingerprint(change: Any) -> None:
    other = made(**change)
    assert other.digest != made().digest
    assert len(other.differing(made())) == 1


@pytest.mark.parametrize(
    "same",
    [
        replace(SPEC, name="b", model_id="/a/folder", replicas=3, aliases=("x",), express=True),
        replace(SPEC, extra_args=("--huggingface-hub-cache", "/elsewhere")),
        replace(SPEC, extra_args=("--huggingface-hub-cache=/elsewhere",)),
    ],
    ids=["names", "place", "place, one word"],
)
def test_what_does_not_decide_a_vector_is_not(same: InstanceSpec) -> None:
    assert made(same) == made()


def test_a_flag_behind_the_place_of_the_files_counts() -> None:
    there = replace(SPEC, extra_args=("--huggingface-hub-cache", "/elsewhere", "--auto-truncate", "false"))
    assert made(there) == made(replace(SPEC, extra_args=("--auto-truncate", "false")))
    assert made(there) != made()


def test_a_pinned_commit_stands_for_its_files() -> None:
    one, other = (pinned_fingerprint(replace(SPEC, revision=each * 40), "tei 1", "gpu") for each in "ab")
    assert one.differing(other) == ["files"]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("onnx/model.onnx", "weights"),
        ("model.safetensors.index.json", "weights"),
        ("sentence_bert_config.json", "config"),
        ("special_tokens_map.json", "tokenizer"),
        ("2_Dense/config.json", "modules"),
    ],
)
def test_each_file_belongs_to_a_part(name: str, part: str) -> None:
    assert part_of(name) == part
