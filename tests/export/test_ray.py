"""The configuration of Ray Serve."""

from typing import Any

import pytest

from appliance.core import listing
from appliance.core.cluster import DIRECTORY
from appliance.core.instance import InstanceSpec
from appliance.core.settings import Settings, parse
from appliance.core.state import Instance
from appliance.export import ray


def settings(**values: Any) -> Settings:
    return parse({"ray_role": "head", **values}, {}, {}, "/data")


def instance(name: str = "a", wanted: str = "running", launch: int = 1, **fields: Any) -> Instance:
    spec = InstanceSpec.parse({"name": name, "model_id": "org/model", **fields})
    return Instance(spec, (), (), created_at="now", wanted=wanted, launch=launch)


def application(*instances: Instance, name: str = "tei-a") -> dict[str, Any]:
    found = ray.configuration(instances, settings())["applications"]
    return next(each for each in found if each["name"] == name)


def deployment(**fields: Any) -> dict[str, Any]:
    (found,) = application(instance(**fields))["deployments"]
    return dict(found)


def test_each_instance_that_shall_run_is_an_application_without_a_route() -> None:
    found = ray.configuration([instance("a"), instance("b", wanted="stopped"), instance("c")], settings())
    assert [(each["name"], each["route_prefix"]) for each in found["applications"]] == [
        (DIRECTORY, "/"),
        ("tei-a", None),
        ("tei-c", None),
    ]
    assert found["http_options"]["port"] == settings().ray_directory_port
    assert found["proxy_location"] == "HeadOnly"


def test_the_directory_is_told_what_a_listing_has() -> None:
    told = application(instance(aliases=["other"], start="on_demand"), name=DIRECTORY)["deployments"][0]["user_config"]
    assert told["on_demand"] == ["a"]
    (listed,) = listing.parse({"instances": told["instances"]})
    assert (listed.name, listed.spec.aliases, listed.spec.engine) == ("a", ("other",), "embedded")


def test_a_replica_is_told_how_to_start_and_nothing_that_may_change_while_it_runs() -> None:
    before = application(instance(pooling="cls"))["args"]
    assert before == {
        "instance": {
            "name": "a",
            "model_id": "org/model",
            "max_batch_tokens": 16384,
            "max_concurrent_requests": 512,
            "pooling": "cls",
            "request_logs": False,
            "download": "auto",
        },
        "engine": "embedded",
        "startup_secs": 300,
        "launch": 1,
    }
    assert application(instance(pooling="cls", aliases=["x"], replicas=3, default=True))["args"] == before
    assert application(instance(pooling="cls", launch=2))["args"] != before
    assert InstanceSpec.parse(before["instance"]).pooling == "cls"


def test_gpus_are_counted_and_an_update_does_not_wait_for_one_that_is_taken() -> None:
    on_gpu, on_cpu = deployment(gpu_ids="auto"), deployment()
    assert on_gpu["ray_actor_options"]["num_gpus"] == 1.0
    assert on_gpu["max_surge_percent"] == 0.0
    assert "num_gpus" not in on_cpu["ray_actor_options"]
    assert on_cpu["max_surge_percent"] == 100.0


def test_labels_choose_the_machines() -> None:
    assert deployment(node_labels=["zone=a", "tier=x"])["ray_actor_options"]["label_selector"] == {
        "zone": "a",
        "tier": "x",
    }


@pytest.mark.parametrize(
    ("fields", "least", "most"),
    [
        ({"max_replicas": 4}, 1, 4),
        ({"replicas": 2, "max_replicas": 4}, 2, 4),
        ({"start": "on_demand", "idle_unload_secs": 60}, 0, 1),
        ({"start": "on_demand", "replicas": 2, "max_replicas": 3}, 0, 3),
    ],
)
def test_replicas_grow_and_shrink_where_that_is_asked_for(fields: dict[str, Any], least: int, most: int) -> None:
    found = deployment(**fields)
    assert "num_replicas" not in found
    scaling = found["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (least, most)
    assert scaling["policy"]["policy_kwargs"]["idle_secs"] == fields.get("idle_unload_secs", 0)


def test_else_their_number_is_fixed() -> None:
    assert deployment(replicas=3)["num_replicas"] == 3


def test_the_same_instances_give_the_same_configuration() -> None:
    some = [instance("b", replicas=2), instance("a", max_replicas=2)]
    assert ray.configuration(some, settings()) == ray.configuration(list(some), settings())
