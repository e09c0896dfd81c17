"""From names to addresses: who cannot be asked about stays, and who is missing stays for a while."""

import pytest

from appliance.core import listing
from appliance.core.listing import Listing
from appliance.core.resolution import GRACE_SECS, Resolution, names_of


def listed(*addresses: str) -> Listing:
    return listing.parse({"instances": [{"name": "a", "model_id": "org/a", "addresses": list(addresses)}]})


def shown(resolved: Listing) -> list[str]:
    return [str(each) for each in resolved[0].addresses]


def test_a_name_stands_for_all_its_addresses() -> None:
    found = Resolution(every=True).resolve(listed("pods:80", "10.0.0.9:81"), {"pods": ["10.0.0.2", "10.0.0.1"]}, 0.0)
    assert shown(found) == ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.9:81"]
    assert found[0].server_names == ("pods", "pods", "10.0.0.9")


def test_a_name_of_one_replica_keeps_its_address() -> None:
    one = Resolution(every=False)
    assert shown(one.resolve(listed("gpu:80"), {"gpu": ["10.0.0.2", "10.0.0.3"]}, 0.0)) == ["10.0.0.2:80"]
    assert shown(one.resolve(listed("gpu:80"), {"gpu": ["10.0.0.1", "10.0.0.2"]}, 1.0)) == ["10.0.0.2:80"]
    assert shown(one.resolve(listed("gpu:80"), {"gpu": ["10.0.0.1"]}, 2.0)) == ["10.0.0.1:80"]


@pytest.mark.parametrize("every", [True, False])
def test_while_nobody_can_say_all_stay(every: bool) -> None:
    resolution = Resolution(every)
    before = shown(resolution.resolve(listed("pods:80"), {"pods": ["10.0.0.1"]}, 0.0))
    assert shown(resolution.resolve(listed("pods:80"), {"pods": None}, 1000.0)) == before
    # and afterwards the time begins anew
    assert shown(resolution.resolve(listed("pods:80"), {"pods": []}, 1001.0)) == before


def test_who_is_missing_stays_for_a_while_and_comes_back_at_once() -> None:
    resolution = Resolution(every=True)
    both, one = {"pods": ["10.0.0.1", "10.0.0.2"]}, {"pods": ["10.0.0.2"]}
    resolution.resolve(listed("pods:80"), both, 0.0)
    assert len(shown(resolution.resolve(listed("pods:80"), one, GRACE_SECS - 1))) == 2
    assert shown(resolution.resolve(listed("pods:80"), one, GRACE_SECS + 1)) == ["10.0.0.2:80"]
    assert len(shown(resolution.resolve(listed("pods:80"), both, GRACE_SECS + 2))) == 2


def test_a_name_that_leaves_the_listing_takes_its_addresses_along() -> None:
    resolution = Resolution(every=True)
    resolution.resolve(listed("pods:80", "other:80"), {"pods": ["10.0.0.1"], "other": ["10.0.0.2"]}, 0.0)
    assert shown(resolution.resolve(listed("other:80"), {"other": ["10.0.0.2"]}, 1.0)) == ["10.0.0.2:80"]
    assert resolution.known == {"other": ("10.0.0.2",)}
    assert set(resolution.seen) == {("other", "10.0.0.2")}


def test_another_process_goes_on_with_what_was_kept() -> None:
    kept = Resolution(every=True).resolve(listed("pods:80", "10.0.0.9:81"), {"pods": ["10.0.0.1"]}, 0.0)
    fresh = Resolution(every=True)
    fresh.restore(kept, 100.0)
    assert fresh.resolve(listed("pods:80", "10.0.0.9:81"), {"pods": None}, 101.0) == kept


def test_addresses_are_not_asked_about() -> None:
    assert names_of(listed("10.0.0.1:80", "[::1]:80", "pods:80")) == {"pods"}
