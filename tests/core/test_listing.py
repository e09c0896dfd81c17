"""Listings: what a person writes is checked field by field, and what is resolved is read back as it was."""

import tomllib
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from appliance.core import listing
from appliance.core.addresses import Address
from appliance.core.listing import Numbers
from appliance.core.problems import Kind, Problem
from appliance.core.routing import Target, candidates
from testing.specs import LAW, NAMES, TEXT

ONE = {"name": "a", "model_id": "org/a", "addresses": ["10.0.0.5:8080", "gpu2.example:8081"]}


def listed(**fields: Any) -> dict[str, Any]:
    return {"instances": [{**ONE, **fields}]}


def refusal(content: Any) -> str:
    with pytest.raises(Problem) as caught:
        listing.parse(content)
    assert caught.value.kind is Kind.INVALID
    return caught.value.message


def test_an_instance_has_its_addresses_and_what_decides_its_vectors() -> None:
    (one,) = listing.parse(listed(pooling="cls", aliases=["short"], max_concurrent_requests=7, task="embedding"))
    assert one.addresses == (Address("10.0.0.5", 8080), Address("gpu2.example", 8081))
    assert (one.spec.pooling, one.spec.aliases, one.task) == ("cls", ("short",), "embedding")
    table = listing.table_of([one], "tei", Numbers())
    first, second = candidates(table, Target(model_id="short"))
    assert (first.address, first.server_name, first.capacity) == ("10.0.0.5:8080", "10.0.0.5", 7)
    assert (second.address, second.server_name) == ("gpu2.example:8081", "gpu2.example")
    assert not first.is_local
    assert not second.is_local


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "must be a table"),
        ({}, '"instances" is required'),
        ({"instance": []}, "Unknown key"),
        ({"instances": [7]}, "must be a table"),
        ({"instances": [{}]}, 'without a name): Field "name" is required'),
        (listed(addresses="10.0.0.5:8080"), "must be a list"),
        (listed(addresses=["10.0.0.5"]), '"host:port"'),
        (listed(addresses=["10.0.0.5:0"]), '"host:port"'),
        (listed(addresses=["10.0.0.5:65536"]), '"host:port"'),
        (listed(addresses=["::1:80"]), '"host:port"'),
        (listed(addresses=["[fe80::1%eth0]:80"]), '"host:port"'),
        (listed(addresses=["a b:80"]), '"host:port"'),
        (listed(addresses=["http://a:80"]), '"host:port"'),
        (listed(addresses=["a:80", "a:80"]), "twice"),
        (listed(server_names=["a"]), "1 for 2 addresses"),
        (listed(gpu_id=0), "Unknown field"),
        (listed(replicas=2), "Unknown field"),
        (listed(pooling="all"), "must be one of"),
        (listed(fingerprint="abc"), "must be a table"),
        ({"instances": [ONE, ONE]}, 'instances[1] ("a"): is there twice'),
        ({"instances": [ONE, {**ONE, "name": "b", "aliases": ["a"]}]}, 'instances[1] ("b"): "a" already means'),
    ],
)
def test_what_is_wrong_is_named(content: Any, words: str) -> None:
    assert words in refusal(content)


def test_no_instances_are_a_listing_too() -> None:
    assert listing.parse({"instances": []}) == ()


ADDRESSES = st.lists(st.sampled_from(["a:1", "b.example:65535", "[::1]:80", "10.0.0.1:80"]), unique=True, max_size=4)


@LAW
@given(NAMES, TEXT, ADDRESSES, st.sampled_from([None, *listing.TASKS]), st.booleans())
def test_what_is_written_is_read_back(
    name: str, model: str, addresses: list[str], task: str | None, named: bool
) -> None:
    fields: dict[str, Any] = {"name": name, "model_id": ("m" + model)[:500] + "m", "addresses": addresses}
    fields |= {"task": task} if task else {}
    fields |= {"server_names": ["x.example"] * len(addresses)} if named and addresses else {}
    before = listing.parse({"instances": [fields]})
    assert listing.parse(tomllib.loads(tomli_w.dumps(listing.dump(before)))) == before


@LAW
@given(st.lists(st.sets(st.integers(1, 6), max_size=6), max_size=8))
def test_an_address_keeps_its_number_as_long_as_it_is_there(rounds: list[set[int]]) -> None:
    numbers = Numbers()
    before: dict[Address, int] = {}
    for ports in rounds:
        (one,) = listing.parse(listed(addresses=[f"h:{port}" for port in sorted(ports)]))
        now = numbers.of(one)
        assert sorted(now) == sorted(one.addresses)
        assert len(set(now.values())) == len(now)
        assert {key: now[key] for key in before.keys() & now.keys()} == {
            key: before[key] for key in before.keys() & now.keys()
        }
        before = dict(now)


def test_an_instance_without_addresses_is_not_ready_and_is_no_mistake() -> None:
    table = listing.table_of(listing.parse(listed(addresses=[])), "tei", Numbers())
    with pytest.raises(Problem) as caught:
        candidates(table, Target(instance_name="a"))
    assert caught.value.code == "BACKEND_UNAVAILABLE"


def test_a_peer_of_another_release_is_understood_as_far_as_possible() -> None:
    newer = {"name": "a", "model_id": "org/a", "addresses": [], "colour": "red", "pooling": "cls"}
    strange = {"name": "b", "model_id": "org/b", "addresses": [], "pooling": "by magic"}
    (one,) = listing.parse_peers({"instances": [strange, newer], "release": 9})
    assert (one.name, one.spec.pooling) == ("a", "cls")
    assert listing.parse_peers({"instances": []}) == ()


@pytest.mark.parametrize("content", [{}, {"instances": 7}, {"instances": [{}]}, {"instances": [7]}, []])
def test_what_is_no_listing_of_a_peer_is_refused(content: Any) -> None:
    with pytest.raises(Problem):
        listing.parse_peers(content)


def test_another_appliance_is_not_sent_on_to_a_third() -> None:
    table = listing.table_of(listing.parse(listed()), "tei", Numbers())
    assert candidates(table, Target(instance_name="a"))
    with pytest.raises(Problem) as caught:
        candidates(table, Target(instance_name="a", here=True))
    assert caught.value.kind is Kind.NOT_FOUND
