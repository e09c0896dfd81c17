"""The images of a request: their memory is booked as they come, they end at a limit, and have one deadline together."""

import pytest

from appliance.drivers.imagefetch import ImageFetcher
from appliance.gateway.image_inputs import MOST_BYTES, contents
from appliance.gateway.refusals import Reason, Refusal

IMAGE = bytes(16 * 2**20)


class Site(ImageFetcher):
    """Has the same image under every URL."""

    def __init__(self) -> None:
        super().__init__(["images.test"])
        self.deadlines: list[float | None] = []

    def fetch(self, url: str, until: float | None = None) -> bytes:
        self.deadlines.append(until)
        return IMAGE


def sources(count: int) -> dict[int, str]:
    return {at: f"https://images.test/{at}" for at in range(count)}


def test_memory_is_booked_image_by_image_without_the_pardon_of_a_lone_call() -> None:
    site = Site()
    booked: list[tuple[int, bool]] = []
    found = contents(sources(3), site, lambda size, bounded: booked.append((size, bounded)))
    assert list(found) == [0, 1, 2]
    assert booked == [(2 * len(IMAGE), False)] * 3
    assert len(set(site.deadlines)) == 1


def test_all_images_of_a_request_have_a_limit() -> None:
    site = Site()
    fitting = MOST_BYTES // len(IMAGE)
    with pytest.raises(Refusal, match="send fewer") as refused:
        contents(sources(1000), site, lambda size, bounded: None)
    assert refused.value.reason is Reason.LARGE
    assert len(site.deadlines) == fitting + 1
