"""What a model's folder holds, also while it is being deleted."""

import shutil
import threading
from pathlib import Path

from appliance.drivers import modelfiles
from tests.engine.serving import FAMILIES


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
