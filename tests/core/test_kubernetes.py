"""Instances on a cluster, as values: their names, what is told of them, and what is refused."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core.instance import NAME, PROGRAMS
from appliance.core.kubernetes import Cluster, Workload, object_name, workloads
from appliance.core.problems import Problem
from testing.specs import LAW, spec

CLUSTER = Cluster(namespace="models", image="own:1", tei_image="tei:1", tei_cpu_image="tei:cpu", storage="50Gi")
ANY_NAME = st.from_regex(NAME, fullmatch=True).filter(lambda name: name not in PROGRAMS)
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


def one(
    engine: str = "tei", stopped: bool = False, task: str = "embedding", gpu: bool = False, **fields: Any
) -> Workload:
    wanted = spec("a", **fields)
    (found,) = workloads([wanted], ["a"] if stopped else [], {"a": engine}, 300, {"a": task} if task else {}, gpu)
    return found


# -- names ------------------------------------------------------------------------------------------------------------


@LAW
@given(name=ANY_NAME)
def test_a_name_is_one_of_kubernetes_and_leaves_room_for_its_pods(name: str) -> None:
    made = object_name(name)
    assert LABEL.fullmatch(made)
    assert len(f"{made}-0123456789-abcde") <= 63


@LAW
@given(names=st.sets(ANY_NAME, min_size=2, max_size=20))
def test_no_two_instances_have_one_name(names: set[str]) -> None:
    every = {*names, *(name.lower() for name in names), *(object_name(name).removeprefix("tei-") for name in names)}
    assert len({object_name(name) for name in every}) == len(every)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("minilm", "tei-minilm"),
        ("bge-small-v1", "tei-bge-small-v1"),
        ("MiniLM", "tei-minilm-1df0e5d1c9"),
        ("a.b", "tei-a-b-"),
        ("a_b", "tei-a-b-"),
        ("a-", "tei-a-"),
        ("x" * 64, "tei-" + "x" * 31 + "-"),
    ],
)
def test_names_that_are_none_there_get_a_digest(name: str, expected: str) -> None:
    made = object_name(name)
    assert made.startswith(expected.rsplit("-", 1)[0]), made
    assert (made == f"tei-{name}") == (name in ("minilm", "bge-small-v1"))


def test_a_name_that_looks_like_one_with_a_digest_gets_another() -> None:
    taken = object_name("a.b")
    assert object_name(taken.removeprefix("tei-")) != taken


# -- what is told, and what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"gpu_ids": [2, 3]}, "the GPUs 2, 3 of this machine"),
        ({"gpu_id": "GPU-abc"}, "the GPUs GPU-abc of this machine"),
        ({"gpu_id": 0, "engine": "embedded"}, "computes on the CPU"),
        ({"engine": "tei"}, "TEI's image for CPUs"),
        ({"express": True}, "no express lane"),
        ({"prometheus_port": 0}, "it is not scaled"),
        ({"download": "never"}, "must be in the cache of the volume"),
        ({"engine": "embedded", "extra_args": ["--runtime", "torch"]}, "the extra torch"),
    ],
)
def test_what_is_not_as_it_is_here_is_told(fields: dict[str, Any], words: str) -> None:
    found = one(**fields)
    assert [note for note in found.notes if words in note]


def test_a_stopped_instance_and_an_unknown_task_are_told() -> None:
    assert "It is stopped" in one(stopped=True).notes[0]
    assert "is not known here" in one(task="").notes[-1]
    assert one(gpu=True).notes == ()


@pytest.mark.parametrize(
    ("engine", "fields", "words"),
    [
        ("tei", {"model_id": "/srv/models/own"}, 'Instance "a" serves the folder "/srv/models/own"'),
        ("tei", {"model_id": "/models/../etc"}, "which pods do not have"),
        ("tei", {"model_id": "./own"}, "which pods do not have"),
        ("tei", {"extra_args": ["--hf-token", "hf_secret"]}, "a token is no part of a manifest"),
        ("tei", {"extra_args": ["--hf-api-token=hf_secret"]}, "a token is no part of a manifest"),
        ("tei", {"extra_args": ["--huggingface-hub-cache", "/x"]}, "pods have their cache in /models"),
        ("tei", {"extra_args": ["--threads", "4"]}, "which TEI does not take"),
        ("embedded", {"extra_args": ["--thread", "4"]}, "the embedded engine refuses it"),
        ("embedded", {"dtype": "float16"}, "computes in float32"),
    ],
)
def test_what_means_something_on_this_machine_alone_is_refused(engine: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(Problem, match=words) as refused:
        one(engine, **fields)
    assert "hf_secret" not in refused.value.message


def test_a_folder_of_the_volume_is_served_and_not_fetched() -> None:
    found = one(model_id="/models/own")
    assert not found.downloads
    assert one(model_id="org/own").downloads
    assert not one(model_id="org/own", download="never").downloads


@pytest.mark.parametrize(
    ("engine", "fields", "every", "on_gpu"),
    [
        ("tei", {}, False, False),
        ("tei", {}, True, True),
        ("tei", {"gpu_id": 0}, False, True),
        ("tei", {"gpu_ids": "auto"}, False, True),
        ("embedded", {"gpu_ids": "auto"}, True, False),
    ],
)
def test_who_gets_a_gpu(engine: str, fields: dict[str, Any], every: bool, on_gpu: bool) -> None:
    assert one(engine, gpu=every, **fields).on_gpu is on_gpu


@pytest.mark.parametrize(
    ("task", "service"),
    [
        ("embedding", "tei.v1.Embed"),
        ("sparse", "tei.v1.Embed"),
        ("reranker", "tei.v1.Rerank"),
        ("classifier", "tei.v1.Predict"),
        ("", ""),
    ],
)
def test_the_service_that_follows_the_health_of_a_model(task: str, service: str) -> None:
    assert one(task=task).service == service


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"namespace": "Models"}, "--namespace"),
        ({"namespace": "a" * 64}, "--namespace"),
        ({"image": "a b"}, "--image"),
        ({"tei_image": ""}, "--tei-image"),
        ({"tei_cpu_image": 'a"\n'}, "--tei-cpu-image"),
        ({"storage": "50 GB"}, "--storage"),
        ({"memory": "0Gi"}, "--memory"),
        ({"storage_class": "Fast"}, "--storage-class"),
        ({"tls_secret": "a/b"}, "--tls-secret"),
        ({"keys_secret": "-a"}, "--keys-secret"),
        ({"hub_secret": "a_b"}, "--hub-secret"),
        ({"prometheus": "prometheus:9090"}, "--prometheus"),
        ({"prometheus": 'http://p/"}'}, "--prometheus"),
        ({"gateway": "a/b/c"}, "--gateway"),
        ({"gateway": "/b"}, "--gateway"),
        ({"callers": ("x y",)}, "--callers"),
        ({"monitoring": ""}, "--monitoring-namespace"),
        ({"from_zero": True}, "--max-replicas"),
    ],
)
def test_a_cluster_that_could_not_be_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(Problem, match=words):
        replace(CLUSTER, **fields)


def test_the_gateway_of_another_namespace() -> None:
    inside, outside = replace(CLUSTER, gateway="public"), replace(CLUSTER, gateway="edge/public")
    assert (inside.gateway_namespace, inside.gateway_name) == ("models", "public")
    assert (outside.gateway_namespace, outside.gateway_name) == ("edge", "public")
