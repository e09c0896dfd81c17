"""Images found by words, in a browser, over a model whose weights are set by hand so that it knows colours."""

from pathlib import Path

import pytest

from testing import colour_clip
from testing.running import RunningAppliance
from tests.examples.conftest import program

pytestmark = pytest.mark.processes


@pytest.mark.timeout(300)
def test_words_find_the_images_of_their_colour(tmp_path: Path) -> None:
    model = colour_clip.write(tmp_path / "clip")
    with RunningAppliance(tmp_path, seeds="") as running:
        running.create("clip", model_id=str(model))
        running.wait_ready("clip")
        told = program("image_search_browser", f"http://127.0.0.1:{running.http_port}")
    assert "press Index" in told["nothing indexed"]
    assert told["status"] == "18 images are in the index"
    for colour in colour_clip.COLOURS:
        assert [caption.split()[0] for caption in told[colour][:3]] == [colour] * 3, told[colour]
    assert told["images"] == 6
