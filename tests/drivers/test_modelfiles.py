"""What a model's folder holds, also while it is being deleted."""

import json
import os
import resource
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.drivers import modelfiles
from testing.engines import FAMILIES


def test_the_files_that_serving_needs_two_levels_deep(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FAMILIES / "bert-cls", folder)
    (folder / "gone.safetensors").symlink_to(folder / "nowhere")
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "config.json").write_text("{}")
    files = modelfiles.serving_files(folder)
    names = [file.name for file in files]
    assert names == sorted(names)
    assert {"config.json", "model.safetensors", "1_Pooling/config.json"} <= set(names)
    assert not {"gone.safetensors", "deep/er/config.json", "deep"} & set(names)
    assert all(file.size == (folder / file.name).stat().st_size for file in files)
    assert modelfiles.missing(folder) == []


def to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def over_a_gigabyte(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**30 + 1)


ODD: dict[str, Callable[[Path], object]] = {
    "no JSON": lambda path: path.write_text("{"),
    "nothing": lambda path: path.touch(),
    "no object": lambda path: path.write_text("7"),
    "null": lambda path: path.write_text("null"),
    "not UTF-8": lambda path: path.write_bytes(b'{"model_type": "\xff"}'),
    "UTF-16": lambda path: path.write_bytes('{"model_type": "bert"}'.encode("utf-16")),
    "deep": lambda path: path.write_text("[" * 100_000),
    "a number without end": lambda path: path.write_text(f'{{"hidden_size": {"9" * 100_000}}}'),
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
    "a link to itself": to_itself,
    "a link to zeros": to_zeros,
    "over a gigabyte": over_a_gigabyte,
}


@pytest.mark.parametrize("name", ["config.json", "modules.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_what_is_wrong_with_a_file_is_told_and_hides_nothing(
    tmp_path: Path, name: str, odd: Callable[[Path], object]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FAMILIES / "bert-cls", folder)
    assert modelfiles.wrong(folder) == ""
    (folder / name).unlink(missing_ok=True)
    odd(folder / name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert modelfiles.wrong(folder).startswith(f"{name} ")
    assert isinstance(modelfiles.missing(folder), list)
    assert "model.safetensors" in [file.name for file in modelfiles.serving_files(folder)]
    about = modelfiles.metadata(folder)
    assert (about is None) == (name == "config.json")
    json.dumps(about)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


VALUES: tuple[Any, ...] = (7, "x", [1], ["x"], {"a": 1}, None, True, 10**4000, [[]])


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value)[:20])
def test_values_of_any_type_are_no_surprise(tmp_path: Path, value: Any) -> None:
    shutil.copytree(FAMILIES / "bert-cls", folder := tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for key in ("model_type", "architectures", "id2label", "hidden_size", "num_hidden_layers"):
        changed = {**config, "architectures": ["BertForSequenceClassification"], key: value}
        (folder / "config.json").write_text(json.dumps(changed))
        json.dumps([modelfiles.metadata(folder), modelfiles.missing(folder), modelfiles.wrong(folder)])
    for name, about in (("modules.json", [value]), ("modules.json", [{"path": value, "type": value}])):
        (folder / name).write_text(json.dumps(about))
        json.dumps([modelfiles.metadata(folder), modelfiles.missing(folder), modelfiles.wrong(folder)])
    for index in ({"weight_map": value}, {"weight_map": {"a": value}}):
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        json.dumps([modelfiles.missing(folder), modelfiles.wrong(folder)])
    for header in (value, {"a": value}, {"a": {"shape": value}}, {"a": {"shape": [value, 10**6]}}):
        text = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
        json.dumps(modelfiles.metadata(folder))


def test_a_folder_that_is_deleted_meanwhile_is_described_all_the_same(tmp_path: Path) -> None:
    folder, ended = tmp_path / "model", threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            shutil.copytree(FAMILIES / "bert-cls", folder)
            shutil.rmtree(folder)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(3000):
            assert isinstance(modelfiles.missing(folder), list)
            modelfiles.metadata(folder)
    finally:
        ended.set()
        thread.join()
