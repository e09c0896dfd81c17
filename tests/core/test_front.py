"""What may stand before several appliances: anything else is refused before it is in a file of another program."""

from dataclasses import replace
from typing import Any

import pytest

from appliance.core.front import Box, Front, pair_of
from appliance.core.problems import Problem
from testing.specs import configured

SETTINGS = configured()
FRONT = Front((Box("10.0.0.1", 9001, 9002),), "0.0.0.0", 9001, 9002, 1 << 20, 30)


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("10.0.0.1", Box("10.0.0.1", 9001, 9002)),
        ("box-b.example.com:9101", Box("box-b.example.com", 9101, 9002)),
        ("localhost:1:65535", Box("localhost", 1, 65535)),
        ("[::1]:9101:9102", Box("::1", 9101, 9102)),
        ("[FE80::0:1]", Box("fe80::1", 9001, 9002)),
    ],
)
def test_an_appliance_is_a_host_and_its_ports(text: str, box: Box) -> None:
    assert Box.parse(text, SETTINGS) == box


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no name of a host"),
        ("a b", "no name of a host"),
        ("a;b", "no name of a host"),
        ("a:1:2:3", "no HOST"),
        ("a:x", "no HOST"),
        ("::1", "no HOST"),
        ("a:0", "0 is no port"),
        ("a:70000", "70000 is no port"),
        ("a}\nserver {", "no name of a host"),
        ("-a", "no name of a host"),
        ("[fe80::1%x; server 6.6.6.6:1; #]:1", "no IP address"),
        ("[fe80::1%eth0]", "no IP address"),
    ],
)
def test_what_is_no_appliance_is_refused(text: str, words: str) -> None:
    with pytest.raises(Problem, match=words):
        Box.parse(text, SETTINGS)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"boxes": ()}, "Name the appliances"),
        ({"boxes": FRONT.boxes * 2}, "named twice"),
        ({"client_ca_file": "/a"}, "set --cert and --key"),
        ({"boxes_ca_file": "/a"}, "belong together"),
        ({"boxes_name": "a"}, "belong together"),
        ({"client": ("/a", "/b")}, "set --boxes-ca and --boxes-name"),
        ({"own": ("/a b", "/b")}, "must be an absolute path"),
        ({"own": ("/a;", "/b")}, "must be an absolute path"),
        ({"listen": "0.0.0.0;"}, "no IP address"),
        ({"listen": "localhost"}, "must be an IP address"),
        ({"boxes_ca_file": "/a", "boxes_name": "a b"}, "no name of a host"),
        ({"grpc_port": 9002}, "two ports"),
        ({"http_port": 70000}, "70000 is no port"),
    ],
)
def test_a_front_that_could_not_work_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(Problem, match=words):
        replace(FRONT, **fields)


def test_half_a_pair_is_refused() -> None:
    assert pair_of("/a", "/b", "flags") == ("/a", "/b")
    assert pair_of("", "", "flags") is None
    for half in (("/a", ""), ("", "/b")):
        with pytest.raises(Problem, match="flags belong together"):
            pair_of(*half, "flags")
