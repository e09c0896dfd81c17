"""What is kept of the peers: every process can read it, whatever they say and however they say it."""

import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import tomli_w

from appliance.core import listing
from appliance.core.addresses import Address
from appliance.core.listing import Listing
from appliance.core.settings import Settings
from appliance.multiplexer.peers_keeper import LARGEST_BYTES, PATH, Peer, PeersKeeper, joined
from appliance.multiplexer.remote_replicas import RemoteReplicas
from appliance.node.directory import Directory, read_listing
from appliance.wire.tei_appliance.v1.directory_pb2 import ListResponse
from testing.specs import configured

ONE, TWO = "10.0.0.1", "10.0.0.2"


def listed(*instances: dict[str, Any]) -> Listing:
    return listing.parse({"instances": [{"addresses": [], **each} for each in instances]})


def peer(host: str, *instances: dict[str, Any]) -> Peer:
    peer = Peer(Address(host, 9001), RemoteReplicas(configured()))
    peer.has = listed(*instances)
    return peer


def kept(*peers: Peer) -> Listing:
    """As every process reads it."""
    return listing.parse(tomllib.loads(tomli_w.dumps(listing.dump(joined(list(peers), "embedded")))))


def instance(name: str, *aliases: str, model: str = "org/m") -> dict[str, Any]:
    return {"name": name, "model_id": model, "aliases": list(aliases)}


def hosts(of: Listing) -> dict[str, list[str]]:
    return {each.name: [address.host for address in each.addresses] for each in of}


def test_of_two_instances_with_one_alias_that_of_the_first_peer_has_it() -> None:
    found = kept(peer(ONE, instance("b", "ada", "bert")), peer(TWO, instance("a", "ada", "claude")))
    assert [(each.name, each.spec.aliases) for each in found] == [("a", ("claude",)), ("b", ("ada", "bert"))]


def test_a_name_goes_before_the_alias_of_another_peer() -> None:
    found = kept(peer(ONE, instance("b", "a")), peer(TWO, instance("a")))
    assert [(each.name, each.spec.aliases) for each in found] == [("a", ()), ("b", ())]


def test_two_names_of_one_peer_are_one_replica() -> None:
    assert hosts(kept(peer(ONE, instance("a")), peer(ONE, instance("a")))) == {"a": [ONE]}


@pytest.mark.parametrize(
    ("one", "two", "both"), [("1", "1", True), ("1", "2", False), ("1", "", True), ("", "2", True)]
)
def test_files_that_are_known_to_differ_are_not_mixed(one: str, two: str, both: bool) -> None:
    """A path may name other files on each machine. A peer that has just started does not know its own yet."""
    has = [{**instance("a"), **({"fingerprint": {"files": each}} if each else {})} for each in (one, two)]
    assert hosts(kept(peer(ONE, has[0]), peer(TWO, has[1]))) == {"a": [ONE, TWO] if both else [ONE]}


def test_of_three_the_third_is_compared_with_what_is_known_by_then() -> None:
    known = [{**instance("a"), "fingerprint": {"files": each}} for each in ("1", "2")]
    third = "10.0.0.3"
    assert hosts(kept(peer(ONE, instance("a")), peer(TWO, known[0]), peer(third, known[1]))) == {"a": [ONE, TWO]}


def test_one_instance_on_two_peers_has_both_unless_its_vectors_differ() -> None:
    both = kept(peer(ONE, instance("a"), instance("b")), peer(TWO, instance("a"), instance("b", model="org/other")))
    assert hosts(both) == {"a": [ONE, TWO], "b": [ONE]}


@contextmanager
def answering(reply: bytes) -> Iterator[Peer]:
    """A peer that says this."""
    options = [("grpc.max_send_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(1), options=options)
    handlers = {"List": grpc.unary_unary_rpc_method_handler(lambda request, context: reply)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(PATH.split("/")[1], handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield Peer(Address("127.0.0.1", port), RemoteReplicas(configured()))
    finally:
        server.stop(0).wait()


def said(text: str) -> bytes:
    return ListResponse(listing=text).SerializeToString()


@pytest.mark.parametrize(
    "reply",
    [
        b"\xff\xff\xff",
        said("no TOML"),
        said("a=" + "[" * 5000),
        said("[[instances]]\n"),
        said("#" * (LARGEST_BYTES + 1)),
    ],
)
def test_an_answer_that_is_no_listing_leaves_a_peer_what_it_had(reply: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with answering(reply) as peer:
        peer.has = before = listed(instance("a"))
        peer.look()
        peer.look()
        assert peer.has is before
        assert caplog.text.count(f"The peer {peer.address} does not say what it has") == 1


def test_what_a_peer_says_is_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    with answering(said(tomli_w.dumps(listing.dump(listed(instance("a", "ada")))))) as peer:
        peer.look()
        first = peer.has
        assert first == listed(instance("a", "ada"))
        peer.look()
        assert peer.has is first  # not read again
    assert not caplog.records


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., Settings]:
    return lambda *peers: configured(data_dir=str(tmp_path), peers=list(peers))


def write(settings: Settings, text: str) -> None:
    Path(settings.layout.peers).parent.mkdir(parents=True, exist_ok=True)
    Path(settings.layout.peers).write_text(text)


KEPT = """
[[instances]]
name = "a"
model_id = "org/a"
addresses = ["10.0.0.1:9001", "10.0.0.2:9001"]
server_names = ["one.invalid", "two.invalid"]

[[instances]]
name = "b"
model_id = "org/b"
addresses = ["10.0.0.2:9001"]
server_names = ["two.invalid"]
"""


def test_what_is_a_peer_no_more_gets_no_call_and_no_key(settings: Callable[..., Settings]) -> None:
    """Also before those that are peers now have said anything."""
    changed = settings("one.invalid:9001", "three.invalid:9001")
    write(changed, KEPT)
    directory = Directory.of(changed)
    directory.refresh()
    replicas = [replica for route in directory.table.elsewhere for replica in route.replicas]
    assert [(each.instance, each.address) for each in replicas] == [("a", "10.0.0.1:9001")]
    assert all(each.is_peer for each in replicas)


def test_a_peer_whose_name_cannot_be_resolved_is_where_it_was(settings: Callable[..., Settings]) -> None:
    """The thread that watches all replicas must not come to ask for addresses."""
    now = settings("one.invalid:9001", "two.invalid:9001")
    write(now, KEPT)
    keeper = PeersKeeper(now, RemoteReplicas(now), "embedded")
    keeper.restore(read_listing(keeper.kept))
    assert hosts(joined(keeper.peers, "embedded")) == {"a": ["10.0.0.1", "10.0.0.2"], "b": ["10.0.0.2"]}
    fresh = Peer(Address("one.invalid", 9001), RemoteReplicas(now))
    fresh.look()
    assert fresh.has is None
    assert "has no address" in fresh.said
