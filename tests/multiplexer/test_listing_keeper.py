"""What is kept of a listing: the last one that was good, whatever becomes of the operator's file and of the names."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.core.listing import Listing
from appliance.core.problems import Problem
from appliance.core.settings import Settings
from appliance.multiplexer.listing_keeper import ListingKeeper, addresses_of
from appliance.node.directory import Directory, read_listing
from testing.specs import configured

ONE = '[[instances]]\nname = "a"\nmodel_id = "org/a"\naddresses = ["10.0.0.1:80"]\n'
TWO = ONE + '[[instances]]\nname = "b"\nmodel_id = "org/b"\naddresses = ["localhost:81"]\n'


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return configured(data_dir=str(tmp_path), directory=f"dns:{tmp_path}/directory.toml")


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], None]:
    def write(text: str) -> None:
        (tmp_path / "directory.toml").write_text(text)

    return write


def kept(settings: Settings) -> Listing:
    return read_listing(Path(settings.layout.listing))


def names(settings: Settings) -> list[str]:
    return [each.name for each in kept(settings)]


def looked(keeper: ListingKeeper, times: int = 2) -> None:
    for _ in range(times):
        keeper.look()


def test_the_first_look_needs_no_second_one(settings: Settings, write: Callable[[str], None]) -> None:
    write(TWO)
    ListingKeeper(settings).look()
    assert names(settings) == ["a", "b"]
    (of_name,) = kept(settings)[1].addresses
    assert of_name.host in ("127.0.0.1", "::1")
    assert kept(settings)[1].server_names == ("localhost",)


def test_a_file_that_is_being_written_waits_until_it_stays_the_same(
    settings: Settings, write: Callable[[str], None]
) -> None:
    write(ONE)
    keeper = ListingKeeper(settings)
    keeper.look()
    write("instances = []\n")  # as if the rest were still to come
    keeper.look()
    write(TWO)
    keeper.look()
    assert names(settings) == ["a"]
    keeper.look()
    assert names(settings) == ["a", "b"]


@pytest.mark.parametrize("text", ["", "[[instances]]\n", "instances = 7\n", "\0", ONE + ONE])
def test_a_file_that_is_wrong_keeps_what_was_right(
    settings: Settings, write: Callable[[str], None], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(ONE)
    keeper = ListingKeeper(settings)
    looked(keeper)
    write(text)
    looked(keeper, 4)
    assert names(settings) == ["a"]
    assert caplog.text.count("Keeping the previous listing") == 1
    write(TWO)
    looked(keeper, 2)
    assert names(settings) == ["a", "b"]


def test_a_file_that_is_gone_keeps_what_there_was_also_for_a_new_process(
    settings: Settings, write: Callable[[str], None], tmp_path: Path
) -> None:
    write(TWO)
    ListingKeeper(settings).look()
    (tmp_path / "directory.toml").unlink()
    fresh = ListingKeeper(settings)
    fresh.restore()
    fresh.look()
    directory = Directory.of(settings)
    directory.refresh()
    directory.require()
    assert list(directory.state.instances) == ["a", "b"]


def test_a_listing_that_never_was_right_is_not_one_of_nothing(settings: Settings, write: Callable[[str], None]) -> None:
    """Callers would take it for the end of all instances."""
    write("no listing")
    ListingKeeper(settings).look()
    directory = Directory.of(settings)
    directory.refresh()
    with pytest.raises(Problem, match="its log says what it lacks"):
        directory.require()
    write(ONE)
    ListingKeeper(settings).look()
    directory.refresh()
    directory.require()
    assert list(directory.state.instances) == ["a"]


def test_nothing_is_written_while_nothing_changes(settings: Settings, write: Callable[[str], None]) -> None:
    write(TWO)
    keeper = ListingKeeper(settings)
    keeper.look()
    before = Path(settings.layout.listing).stat()
    looked(keeper, 3)
    assert Path(settings.layout.listing).stat().st_ino == before.st_ino


def test_an_instance_that_is_listed_no_more_is_gone(settings: Settings, write: Callable[[str], None]) -> None:
    write(TWO)
    keeper = ListingKeeper(settings)
    keeper.look()
    write("instances = []\n")
    looked(keeper)
    assert names(settings) == []


def test_a_name_that_nobody_has_has_no_address() -> None:
    assert not addresses_of("no-such-name.invalid")
    assert addresses_of("127.0.0.1") == ["127.0.0.1"]
    assert addresses_of("a" * 300) is None


def test_a_name_with_addresses_of_both_kinds_is_reached_over_ipv4() -> None:
    found = {family for family, *_ in socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM)}
    expected = "127.0.0.1" if socket.AF_INET in found else "::1"
    assert addresses_of("localhost") == [expected]
