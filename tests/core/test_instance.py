"""InstanceSpec: hostile names, numbers and flags are refused by the name of their field; what is taken comes back."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core.instance import InstanceSpec
from appliance.core.problems import Kind, Problem
from testing.specs import LAW, given_specs, instance, spec

NUMBERS = ("port", "prometheus_port", "gpu_id", "replicas", "max_batch_tokens", "max_concurrent_requests")
OWNED: tuple[str, ...] = ("--port", "-p", "--hostname", "--prometheus-port", "--model-id", "--revision", "--pooling")
OWNED += ("--dtype", "--max-batch-tokens", "--max-concurrent-requests", "--uds-path", "--api-key")


def refused(**fields: Any) -> str:
    """The message; always short, one line and printable, whatever was sent."""
    with pytest.raises(Problem) as caught:
        InstanceSpec.parse({"name": "a", "model_id": "m", **fields})
    assert (caught.value.kind, caught.value.code) == (Kind.INVALID, "VALIDATION_ERROR")
    assert len(caught.value.message) < 600
    assert caught.value.message.isprintable()
    return caught.value.message


BAD_NAMES = [
    *("", " ", "1a", "-a", "_a", "a b", " a", "a ", ".a", "a/b", "../a", "..", ".", "/etc/passwd", "a\\b", "~", "a:b"),
    *("a\n", "\na", "a\nb", "a\r", "a\0", "a\t", "\x1b[31m", "%(x)s", "a%s", "a;b", "a ;b", "a#b", "a'b", 'a"b', "a,b"),
    *("[a]", "a=b", "a*", "a?b=c", "a%2Fb", "$(id)", "`id`", "a" * 65, "a" * 10_000, "é", "💥"),
    # Cyrillic and full-width a, Kelvin sign, long s, dotless i, full-width 1, invisible characters, half a character
    *("\u0430bc", "\uff41bc", "\u212a", "\u017f", "\u0131", "a\uff11", "a\u200b", "a\u00ad", "\ufeffa", "\ud800"),
    *("control", "multiplexer", "gateway", "monitor", "job.1", "job.x"),
    *(None, 1, 1.5, True, ["a"], {"a": 1}),
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: ascii(name)[:20])
def test_a_name_that_could_mean_something_else_is_refused(name: Any) -> None:
    assert '"name"' in refused(name=name)


@pytest.mark.parametrize(
    "name",
    ["a", "Z", "a-", "a_0", "A" * 64, "controls", "Control", "x" + "-" * 63, "all", "con", "job"]
    + ["bge-large-en-v1.5", "a.b", "jobs.1", "a..b."],
)
def test_a_plain_name_is_taken(name: str) -> None:
    assert spec(name).name == name


BAD_MODELS = ["", " ", "-x", "--port", " m", "m ", "m\u00a0", "a\nb", "a\0", "m" * 600, 7, ["m"], None]


@pytest.mark.parametrize("model", BAD_MODELS)
def test_a_model_id_that_is_no_model_id_is_refused(model: Any) -> None:
    assert '"model_id"' in refused(model_id=model)


@pytest.mark.parametrize("model", ["BAAI/bge-small-en-v1.5", "/models/my model", "./a", "100% ;modèle # 1", "模型"])
def test_a_hub_id_or_any_folder_is_taken_as_it_is(model: str) -> None:
    assert spec(model_id=model).model_id == model


@pytest.mark.parametrize("key", ["name", "model_id"])
def test_what_is_required_is_required(key: str) -> None:
    body = {"name": "a", "model_id": "m"}
    del body[key]
    with pytest.raises(Problem, match=f'"{key}"'):
        InstanceSpec.parse(body)


@pytest.mark.parametrize("body", [None, [], "name", 7, True, [["name", "a"]]], ids=repr)
def test_a_body_that_is_no_object_is_refused(body: Any) -> None:
    with pytest.raises(Problem) as caught:
        InstanceSpec.parse(body)
    assert caught.value.kind == Kind.INVALID


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("modelid", "model_id"), ("gpu", "gpu_id"), ("gpus", "gpu_ids"), ("replica", "replicas"), ("Pooling", "pooling")]
    + [("max_batch_token", "max_batch_tokens"), ("extra-args", "extra_args"), ("prometheus-port", "prometheus_port")],
)
def test_an_unknown_field_is_named_and_the_nearest_one_suggested(wrong: str, right: str) -> None:
    assert f'"{wrong}"' in (message := refused(**{wrong: 1}))
    assert f'did you mean "{right}"' in message


@pytest.mark.parametrize("key", ["status", "pid", "created_at", "zzz", "", "a\nb", "x" * 10_000])
def test_a_field_like_no_other_is_refused_even_as_null(key: str) -> None:
    refused(**{key: None})


@pytest.mark.parametrize("key", [*NUMBERS, "startup_timeout_secs"])
@pytest.mark.parametrize("value", ["1", "8080", "", True, False, -1, 2**31, 2**70, 8080.0, 1e400, [1], {}], ids=repr)
def test_what_is_no_number_of_that_field_is_refused_by_its_name(key: str, value: Any) -> None:
    assert f'"{key}"' in refused(**{key: value})


@pytest.mark.parametrize("key", NUMBERS)
def test_an_astronomic_number_is_refused_like_any_other(key: str) -> None:
    """JSON has no largest number: 401 digits reach the check as a Python int."""
    assert f'"{key}"' in refused(**json.loads(f'{{"{key}": 1{"0" * 400}}}'))


@pytest.mark.parametrize("key", ["replicas", "max_batch_tokens", "max_concurrent_requests", "startup_timeout_secs"])
def test_none_of_something_needed_is_refused(key: str) -> None:
    assert f'"{key}"' in refused(**{key: 0})


@pytest.mark.parametrize("key", ["port", "prometheus_port"])
def test_a_port_is_a_port(key: str) -> None:
    for value in (1, 1023, 65536):
        assert f'"{key}"' in refused(**{key: value})
    allowed: dict[str, Any] = {key: 65535}
    assert getattr(spec(**allowed), key) == 65535


def test_a_port_of_zero_is_automatic_and_a_metrics_port_of_zero_is_off() -> None:
    """As other managers have it."""
    chosen = spec(port=0, prometheus_port=0, replicas=3)
    assert (chosen.port, chosen.prometheus_port, chosen.asked_prometheus_port) == (None, 0, None)
    assert chosen.metrics_off
    assert not spec(prometheus_port=9100).metrics_off
    assert not spec().metrics_off


@pytest.mark.parametrize("key", ["port", "prometheus_port"])
def test_the_ports_of_all_replicas_are_ports(key: str) -> None:
    assert f'"{key}"' in refused(**{key: 65535, "replicas": 2})
    allowed: dict[str, Any] = {key: 65534, "replicas": 2}
    assert getattr(spec(**allowed), key) == 65534


@pytest.mark.parametrize(("distance", "replicas"), [(0, 1), (1, 2), (-1, 2), (3, 4), (-3, 4)])
def test_the_two_port_rows_of_an_instance_never_overlap(distance: int, replicas: int) -> None:
    refused(port=20000, prometheus_port=20000 + distance, replicas=replicas)
    assert spec(port=20000, prometheus_port=20000 + replicas, replicas=replicas).replicas == replicas


@pytest.mark.parametrize(("key", "value"), [("pooling", "max"), ("pooling", "CLS"), ("pooling", "last_token")])
def test_a_pooling_that_tei_does_not_know_is_refused(key: str, value: str) -> None:
    assert "last-token" in refused(**{key: value})


@pytest.mark.parametrize(("key", "value"), [("dtype", "int4"), ("dtype", 16), ("engine", "vllm"), ("engine", ["tei"])])
def test_a_choice_that_does_not_exist_is_refused(key: str, value: Any) -> None:
    assert f'"{key}"' in refused(**{key: value})


@pytest.mark.parametrize("flag", OWNED)
def test_a_flag_that_the_appliance_owns_is_refused_in_both_spellings(flag: str) -> None:
    assert flag in refused(extra_args=[flag, "1"])
    assert flag in refused(extra_args=["--auto-truncate", f"{flag}=1"])


def test_the_short_port_flag_with_its_value_attached_is_refused() -> None:
    refused(extra_args=["-p8080"])


BAD_ARGUMENTS = ["--x", {"--x": 1}, [1], [None], [["--x"]], ["a\nb"], ["a\0"], ["\ud800"], ["x"] * 1000]


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS)
def test_extra_args_is_a_list_of_lines(arguments: Any) -> None:
    assert '"extra_args"' in refused(extra_args=arguments)


def test_other_flags_pass_as_they_are() -> None:
    arguments = ["--auto-truncate=false", "--served-model-name", "%(x)s ; #", "", "--portal", "a=b "]
    assert spec(extra_args=arguments).extra_args == tuple(arguments)


def test_one_gpu_and_several_exclude_each_other() -> None:
    assert "gpu_ids" in refused(gpu_id=0, gpu_ids=[0, 1])


@pytest.mark.parametrize("gpus", [["0"], [True], [-1], [1.0], "0,1", 0, {"0": 1}, [None], [2**70]], ids=repr)
def test_gpu_ids_is_a_list_of_numbers(gpus: Any) -> None:
    assert '"gpu_ids"' in refused(gpu_ids=gpus)


@LAW
@given(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.integers(1, 64))
def test_replica_i_runs_on_gpu_i_modulo_n(gpus: list[int], replicas: int) -> None:
    several = instance(spec(gpu_ids=gpus, replicas=replicas))
    assert [several.gpu_of(i) for i in range(replicas)] == [gpus[i % len(gpus)] for i in range(replicas)]
    assert {instance(spec(gpu_id=gpus[0], replicas=replicas)).gpu_of(i) for i in range(replicas)} == {gpus[0]}
    assert instance(spec(replicas=replicas)).gpu_of(replicas - 1) is None
    assert instance(spec(gpu_ids="auto", replicas=2), placed=(3, 1)).gpu_of(1) == 1


@LAW
@given(given_specs())
def test_a_spec_comes_back_from_its_own_mapping(body: dict[str, Any]) -> None:
    parsed = InstanceSpec.parse(body)
    assert InstanceSpec.parse(parsed.mapping()) == parsed
    assert InstanceSpec.parse(json.loads(json.dumps(parsed.mapping()))) == parsed
    assert {key: parsed.mapping()[key] for key in body} == body


def test_null_is_the_same_as_absent() -> None:
    assert InstanceSpec.parse({"name": "a", "model_id": "m", "port": None, "gpu_ids": None, "replicas": None}) == (
        InstanceSpec.parse({"name": "a", "model_id": "m"})
    )


def test_the_defaults_are_those_of_the_documents() -> None:
    plain = spec()
    assert (plain.replicas, plain.max_batch_tokens, plain.max_concurrent_requests) == (1, 16384, 512)


FIELDS = st.sampled_from([*NUMBERS, "name", "extra_args", "gpu_ids", "dtype", "?"])
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text() | st.integers())


@LAW
@given(st.dictionaries(FIELDS, VALUES))
def test_any_body_is_taken_or_refused(body: dict[str, Any]) -> None:
    kind = Kind.INVALID
    try:
        InstanceSpec.parse({"model_id": "m", **body})
    except Problem as problem:
        kind = problem.kind
    assert kind == Kind.INVALID
