"""From an instance and the digests of its files to the parts of its fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from appliance.core.cachekey import Fingerprint, packed
from appliance.core.instance import InstanceSpec

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
PROMPTS = "config_sentence_transformers.json"
POOLING = ("1_Pooling/config.json", "modules.json")
WEIGHTS = (".safetensors", ".bin", ".onnx", ".onnx_data", ".index.json")
PROMPT_FLAGS = ("--default-prompt", "--default-prompt-name")
CACHE_FLAGS = ("--huggingface-hub-cache",)  # where the files are, not what they are


def fingerprint(spec: InstanceSpec, files: Mapping[str, str], engine: str, device: str) -> Fingerprint:
    """files: digests of the model's files by name; engine: of what computes, with its version; device: cpu or gpu."""
    return Fingerprint(tuple(sorted({**parts_of_files(files), **parts_of_spec(spec, engine, device)}.items())))


def pinned_fingerprint(spec: InstanceSpec, engine: str, device: str) -> Fingerprint:
    """Of a model that TEI has downloaded by itself: a pinned commit of the hub is what it is for ever."""
    files = {"files": f"{spec.model_id}@{spec.revision}"}
    return Fingerprint(tuple(sorted({**files, **parts_of_spec(spec, engine, device)}.items())))


def parts_of_files(files: Mapping[str, str]) -> dict[str, str]:
    grouped: dict[str, dict[str, str]] = {}
    for name, digest in files.items():
        grouped.setdefault(part_of(name), {})[name] = digest
    return {part: digest_of(named) for part, named in grouped.items()}


def part_of(name: str) -> str:
    """Which part of the fingerprint a file of the model belongs to."""
    if name in TOKENIZER:
        return "tokenizer"
    if name == PROMPTS:
        return "prompts"
    if name in POOLING:
        return "pooling_files"
    folder = name.rpartition("/")[0]
    if folder and folder != "onnx":
        return "modules"
    return "weights" if name.endswith(WEIGHTS) else "config"


def parts_of_spec(spec: InstanceSpec, engine: str, device: str) -> dict[str, str]:
    """Every flag counts but those that say where files are: one that does not decide a vector costs a miss."""
    prompts = {flag: spec.flag(flag) or "" for flag in PROMPT_FLAGS}
    others = []
    skip = False
    for argument in spec.extra_args:
        flag = argument.partition("=")[0]
        if not (skip or flag in (*PROMPT_FLAGS, *CACHE_FLAGS)):
            others.append(argument)
        skip = not skip and flag in (*PROMPT_FLAGS, *CACHE_FLAGS) and "=" not in argument
    return {
        "pooling": spec.pooling or "default",
        "dtype": spec.dtype or "default",
        "engine": engine,
        "device": device,
        "default_prompt": digest_of(prompts) if any(prompts.values()) else "none",
        "flags": digest_of(dict(enumerate(others))) if others else "none",
        "max_batch_tokens": str(spec.max_batch_tokens),
    }


def digest_of(named: Mapping[str, str] | Mapping[int, str]) -> str:
    words = [word for name, value in sorted(named.items(), key=str) for word in (str(name), value)]
    return hashlib.blake2b(packed(words), digest_size=16).hexdigest()
