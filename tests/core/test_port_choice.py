"""The ports of an instance whose spec becomes another one."""

import random
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from appliance.core import port_choice
from appliance.core.instance import InstanceSpec
from appliance.core.port_choice import Ports
from appliance.core.problems import Problem
from testing.specs import configured, spec

SETTINGS = configured(instance_port_start=8080, instance_port_end=8092, prometheus_port_start=8700)
CHOSEN = Ports((8080, 8081), (8700, 8701))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, CHOSEN),
        ({"replicas": 3}, Ports((8080, 8081, 8082), (8700, 8701, 8702))),
        ({"replicas": 1}, Ports((8080,), (8700,))),
        ({"port": 8090}, Ports((8090, 8091), (8700, 8701))),
        ({"port": 8700}, Ports((8700, 8701), (8702, 8703))),
        ({"port": 8701}, Ports((8701, 8702), (8700, 8703))),
        ({"port": 8699, "replicas": 3}, Ports((8699, 8700, 8701), (8702, 8703, 8704))),
        ({"prometheus_port": 8081}, Ports((8080, 8083), (8081, 8082))),
        ({"prometheus_port": 8080}, Ports((8082, 8083), (8080, 8081))),
    ],
)
def test_ports_that_were_chosen_stay_unless_they_are_asked_for(asked: dict[str, int], expected: Ports) -> None:
    fields: dict[str, Any] = {"replicas": 2, **asked}
    new = spec(**fields)
    assert port_choice.choose_ports_again(CHOSEN, spec(replicas=2), new, {}, SETTINGS, {*range(8080, 8082)}) == expected


def test_no_port_is_held_twice_whatever_becomes_of_an_instance() -> None:
    chance = random.Random(7)
    few = [None, *range(8080, 8084), *range(8698, 8704)]
    refusals, changed = Counter[str](), 0

    def any_spec() -> InstanceSpec:
        while True:
            fields = {
                "replicas": chance.randint(1, 3),
                "port": chance.choice(few),
                "prometheus_port": chance.choice(few),
            }
            with suppress(Problem):  # its own ports overlap
                return spec(**fields)

    for _ in range(3000):
        before, after = any_spec(), any_spec()
        others = {chance.choice(few[1:]): "b"}
        try:
            now = port_choice.choose_ports({}, before, SETTINGS, ())
            ports = port_choice.choose_ports_again(now, before, after, others, SETTINGS, set())
        except Problem as problem:
            refusals[problem.code] += 1
            continue
        held = [*ports.ports, *ports.prometheus_ports]
        assert len(set(held)) == len(held) == 2 * after.replicas
        assert not set(held) & others.keys() - {*now.ports, *now.prometheus_ports}
        assert after.port in (None, ports.ports[0])
        assert after.asked_prometheus_port in (None, ports.prometheus_ports[0])
        changed += 1
    assert set(refusals) == {"PORT_CONFLICT"}
    assert changed > 1000
