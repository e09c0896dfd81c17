"""Ray Serve's REST and the directory, as clients see them."""

import pytest

from appliance.core.addresses import Address
from appliance.core.problems import Kind, Problem
from appliance.drivers.serve import ServeApi, ServeDirectory
from testing.fake_serve import FakeServe
from testing.running import free_ports


def test_the_directory_wakes_an_instance_that_there_is() -> None:
    with FakeServe() as serve:
        directory = ServeDirectory(Address("127.0.0.1", serve.port))
        assert directory.wake("a b&c", 5)
        assert not directory.wake("unknown", 5)
        assert serve.woken == ["a+b%26c", "unknown"]
        assert directory.replicas() == {"instances": [], "replicas": {}, "incomplete": []}


def test_nobody_who_answers_is_unavailable() -> None:
    (port,) = free_ports(1)
    for ask in (
        ServeApi(Address("127.0.0.1", port)).applications,
        ServeDirectory(Address("127.0.0.1", port)).replicas,
    ):
        with pytest.raises(Problem, match=f"127.0.0.1:{port}") as refused:
            ask()
        assert (refused.value.kind, refused.value.code) == (Kind.UNAVAILABLE, "CLUSTER_UNAVAILABLE")


def test_a_page_that_is_no_json_is_unavailable() -> None:
    with FakeServe() as serve:
        serve.replicas = lambda: "<html>"  # type: ignore[method-assign, assignment, return-value]
        with pytest.raises(Problem) as refused:
            ServeDirectory(Address("127.0.0.1", serve.port)).replicas()
        assert refused.value.kind is Kind.UNAVAILABLE


def test_a_token_that_cannot_be_read_is_named() -> None:
    with pytest.raises(Problem, match="ray_token_file /none"):
        ServeApi(Address("127.0.0.1", 1), "/none").applications()
