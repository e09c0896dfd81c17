"""The objects for Kubernetes: schemas, what refers to what, the same programs as supervisord's, and hostile values."""

import copy
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import yaml
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from appliance.core import listing, program, settings
from appliance.core.instance import InstanceSpec
from appliance.core.kubernetes import Cluster, Workload, workloads
from appliance.core.problems import Problem
from appliance.core.settings import Settings
from appliance.export import kubernetes, kubernetes_front, kubernetes_text
from appliance.export.kubernetes import Rendered
from testing.manifests import VERSIONS, Object, as_started, complaints, containers
from testing.specs import HOSTILE, LAW, TEXT, configured, instance, spec

CLUSTER = Cluster(
    namespace="models", image="reg/own:1", tei_image="tei:1.9", tei_cpu_image="tei:cpu-1.9", storage="50Gi"
)
NEWEST = VERSIONS[-1:]
SECRETS = ("front-tls", "front-keys", "hub")
TLS = {
    "cert_file": "/etc/own/server.pem",
    "key_file": "/etc/own/server.key",
    "client_ca_file": "/etc/own/ca.pem",
    "require_client_cert": True,
    "allowed_subjects": ["search"],
}
MINILM = spec("minilm", model_id="sentence-transformers/all-MiniLM-L6-v2", engine="embedded", replicas=2)
BGE = spec("bge", model_id="BAAI/bge-large-en-v1.5", revision="main", engine="tei", gpu_ids=[0, 1], replicas=2)
RANKER = spec("Ranker.v2_X", model_id="org/ranker", engine="tei", express=True, aliases=["rank"])
STATES: dict[str, tuple[list[InstanceSpec], dict[str, Any], Settings]] = {
    "empty": ([], {}, configured()),
    "one": ([RANKER], {}, configured()),
    "both engines": ([MINILM, BGE, RANKER], {"hub_secret": "hub", "storage_class": "fast"}, configured()),
    "one node": ([MINILM], {"access_mode": "ReadWriteOnce", "front_replicas": 1}, configured()),
    "secured": (
        [MINILM, BGE],
        {"tls_secret": "front-tls", "keys_secret": "front-keys", "gateway": "edge/public", "callers": ("search",)},
        configured(tls=TLS, grpc_port=9101, http_port=9102),
    ),
    "scaled": ([MINILM, BGE, RANKER], {"max_replicas": 8}, configured()),
    "from zero": ([MINILM, BGE], {"max_replicas": 8, "from_zero": True, "gateway": "public"}, configured()),
    "never restarted": ([BGE], {}, configured(max_failures_before_restart=0)),
    "long names": ([spec("x" * 64), spec("X" * 64), spec("a-" + "1" * 10)], {"max_replicas": 2}, configured()),
}


def worked(specs: list[InstanceSpec], **more: Any) -> list[Workload]:
    return workloads(
        specs=specs,
        stopped=more.get("stopped", ()),
        engines={each.name: each.engine or "tei" for each in specs},
        startup_secs=300,
        tasks={each.name: "embedding" for each in specs},
        every_gpu=False,
    )


def rendered(
    specs: list[InstanceSpec], config: Settings | None = None, stopped: tuple[str, ...] = (), **chosen: Any
) -> list[Rendered]:
    config = config or configured()
    cluster, found = replace(CLUSTER, **chosen), worked(specs, stopped=stopped)
    texts = kubernetes_front.configuration(config, cluster), kubernetes_front.directory(found, cluster)
    return kubernetes.objects(found, config, cluster, *map(tomli_w.dumps, texts))


def read(found: list[Rendered]) -> list[Object]:
    """As a cluster would read the text."""
    return [each for each in yaml.load_all(kubernetes_text.stream(found), yaml.CSafeLoader) if each]


def state(name: str) -> list[Object]:
    specs, chosen, config = STATES[name]
    return read(rendered(specs, config, **chosen))


def the(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


# -- what a cluster would say -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STATES)
def test_a_cluster_would_take_all_of_it(name: str) -> None:
    assert complaints(state(name), SECRETS) == []


PLANTED: dict[str, Callable[[Object], Any]] = {
    "a field that there is not": lambda each: each["spec"].update(replica=2),
    "a number as text": lambda each: each["spec"].update(revisionHistoryLimit="3"),
    "a name": lambda each: each["metadata"].update(name="Tei_Minilm"),
    "a label": lambda each: each["metadata"]["labels"].update(own="a b"),
    "a selector": lambda each: each["spec"]["selector"]["matchLabels"].update({"app.kubernetes.io/instance": "x"}),
    "a quantity": lambda each: container(each)["resources"]["requests"].update(memory="4 GB"),
    "a volume that there is not": lambda each: container(each)["volumeMounts"].append({"name": "x", "mountPath": "/x"}),
    "a claim": lambda each: volume(each, "models")["persistentVolumeClaim"].update(claimName="x"),
    "a port": lambda each: container(each)["ports"].pop(),
    "two owners": lambda each: each["spec"].update(replicas=1),
    "a root": lambda each: each["spec"]["template"]["spec"]["securityContext"].update(runAsNonRoot=False),
    "a privilege": lambda each: container(each)["securityContext"].update(allowPrivilegeEscalation=True),
}
PLANTED_SCALING: dict[str, Callable[[Object], Any]] = {
    "no query": lambda each: each["spec"]["triggers"][0]["metadata"].pop("query"),
    "a number": lambda each: each["spec"]["triggers"][0]["metadata"].update(threshold=64),
    "a target": lambda each: each["spec"]["scaleTargetRef"].update(name="x"),
    "upside down": lambda each: each["spec"].update(maxReplicaCount=1),
}


def container(deployment: Object) -> Object:
    found: Object = deployment["spec"]["template"]["spec"]["containers"][0]
    return found


def volume(deployment: Object, name: str) -> Object:
    (found,) = [each for each in deployment["spec"]["template"]["spec"]["volumes"] if each["name"] == name]
    return dict(found) if name not in found else found


def few_scaled() -> list[Object]:
    return [copy.deepcopy(each.content) for each in rendered([MINILM], max_replicas=8)]


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_error_is_found(planted: str) -> None:
    objects = few_scaled()
    assert complaints(objects, versions=NEWEST) == []
    PLANTED[planted](the(objects, "Deployment", "tei-minilm"))
    assert complaints(objects, versions=NEWEST)


@pytest.mark.parametrize("planted", PLANTED_SCALING)
def test_a_planted_error_in_scaling_is_found(planted: str) -> None:
    objects = few_scaled()
    PLANTED_SCALING[planted](the(objects, "ScaledObject", "tei-minilm"))
    assert complaints(objects, versions=NEWEST)


def test_a_secret_that_nobody_named_is_found_missing() -> None:
    assert [found for found in complaints(state("secured"), ("front-tls",), NEWEST) if "front-keys" in found]


# -- a replica --------------------------------------------------------------------------------------------------------


def started(deployment: Object) -> list[str]:
    one = container(deployment)
    return [as_started(part) for part in (*one.get("command", ()), *one["args"])]


def supervised(wanted: InstanceSpec) -> list[str]:
    """What supervisord starts, but for the address, the ports and the interpreter."""
    config = configured(tei_binary_path="/opt/router")
    one = program.programs_of(instance(wanted), config, "python", "node")[0]
    argv = list(one.argv[one.argv.index("--model-id") :])
    for flag, value in {"--hostname": "0.0.0.0", "--port": "8080", "--prometheus-port": "9100"}.items():
        argv[argv.index(flag) + 1] = value
    head = ["tini", "--", *one.argv[:3]] if wanted.engine == "embedded" else []  # TEI's image begins with its binary
    return [*head, *argv]


@pytest.mark.parametrize("wanted", [MINILM, BGE, RANKER], ids=lambda wanted: wanted.name)
def test_a_replica_is_started_as_by_supervisord(wanted: InstanceSpec) -> None:
    (deployment,) = [each.content for each in rendered([wanted]) if each.kind == "Deployment"][:1]
    assert started(deployment) == supervised(wanted)


def test_which_image_gpu_and_probe_a_replica_has() -> None:
    objects = state("both engines")
    minilm, bge = the(objects, "Deployment", "tei-minilm"), the(objects, "Deployment", "tei-bge")
    assert [container(each)["image"] for each in (minilm, bge)] == ["reg/own:1", "tei:1.9"]
    assert container(bge)["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert "limits" not in container(minilm)["resources"]
    assert container(bge)["startupProbe"]["grpc"] == {"port": 8080, "service": "tei.v1.Embed"}
    probe = container(bge)["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 300
    assert bge["spec"]["replicas"] == 2
    grace = bge["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace == 30 + container(bge)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert "livenessProbe" not in container(the(state("never restarted"), "Deployment", "tei-bge"))


def test_its_model_is_fetched_before_it_starts() -> None:
    objects = state("both engines")
    fetches = {
        name: the(objects, "Deployment", name)["spec"]["template"]["spec"]["initContainers"][0]["args"]
        for name in ("tei-minilm", "tei-bge")
    }
    assert fetches["tei-minilm"] == [MINILM.model_id, "--packages"]
    assert fetches["tei-bge"] == [BGE.model_id, "--revision", "main"]
    kept = spec("kept", engine="tei", download="never")
    (deployment, *_) = [each.content for each in rendered([kept]) if each.kind == "Deployment"]
    assert "initContainers" not in deployment["spec"]["template"]["spec"]


def test_a_stopped_instance_has_no_replicas_and_is_not_scaled() -> None:
    found = rendered([MINILM], stopped=("minilm",), max_replicas=4)
    objects = read(found)
    assert the(objects, "Deployment", "tei-minilm")["spec"]["replicas"] == 0
    assert not [each for each in objects if each["kind"] == "ScaledObject"]
    assert complaints(objects, versions=NEWEST) == []
    assert "# It is stopped" in kubernetes_text.stream(found)


def test_only_the_front_reaches_a_replica_and_prometheus_its_metrics() -> None:
    objects = state("one")
    (policy,) = [
        each for each in objects if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] != "appliance-front"
    ]
    calls, metrics = policy["spec"]["ingress"]
    (front,) = [rule["podSelector"]["matchLabels"] for rule in calls["from"]]
    assert (
        front.items() <= the(objects, "Deployment", "appliance-front")["spec"]["template"]["metadata"]["labels"].items()
    )
    assert [port["port"] for port in calls["ports"]] == [8080]
    assert [port["port"] for port in metrics["ports"]] == [9100]
    assert metrics["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


def test_what_differs_is_written_beside_it() -> None:
    text = kubernetes_text.stream(rendered([RANKER, BGE], access_mode="ReadWriteOnce"))
    for words in (
        "# Instance Ranker.v2_X.\n",
        "no express lane",
        "the GPUs 0, 1 of this machine",
        "One node at a time",
    ):
        assert words in text


# -- the front --------------------------------------------------------------------------------------------------------


def front_files(name: str) -> dict[str, Any]:
    data = the(state(name), "ConfigMap", "appliance-front")["data"]
    return {file: tomllib.loads(text) for file, text in data.items()}


def test_the_directory_names_every_instance_and_where_its_replicas_are() -> None:
    bge, ranker, minilm = (
        {each["name"]: each for each in front_files("both engines")["directory.toml"]["instances"]}[name]
        for name in ("bge", "Ranker.v2_X", "minilm")
    )
    assert minilm == {
        "name": "minilm",
        "model_id": MINILM.model_id,
        "engine": "embedded",
        "max_concurrent_requests": 256,
        "task": "embedding",
        "addresses": ["tei-minilm.models.svc:8080"],
    }
    assert (bge["revision"], "gpu_ids" in bge, "replicas" in bge) == ("main", False, False)
    assert ranker["aliases"] == ["rank"]
    assert "express" not in ranker


@pytest.mark.parametrize("fronts", [1, 2, 1000])
def test_the_pods_of_the_front_share_what_a_replica_takes(fronts: int) -> None:
    (entry,) = kubernetes_front.directory(worked([BGE]), replace(CLUSTER, front_replicas=fronts))["instances"]
    assert entry.get("max_concurrent_requests", 512) == max(1, 512 // fronts)


@pytest.mark.parametrize("name", STATES)
def test_the_multiplexer_reads_the_directory(name: str) -> None:
    specs, *_ = STATES[name]
    read_back = {each.name: each for each in listing.parse(front_files(name)["directory.toml"])}
    assert sorted(read_back) == sorted(each.name for each in specs)
    for each in specs:
        of_front = read_back[each.name].spec
        for field in (
            "model_id",
            "revision",
            "pooling",
            "dtype",
            "aliases",
            "default",
            "extra_args",
            "max_batch_tokens",
        ):
            assert getattr(of_front, field) == getattr(each, field)


def test_what_only_says_how_to_start_is_left_out() -> None:
    every = spec("a", engine="tei", request_logs=True, express=True, port=20000, gpu_id=1, download="never")
    assert listing.parse(kubernetes_front.directory(worked([every]), CLUSTER))[0].name == "a"


def test_every_address_of_the_directory_is_a_headless_service_with_that_port() -> None:
    objects = state("long names")
    headless = {
        f"{each['metadata']['name']}.{each['metadata']['namespace']}.svc:{port['port']}"
        for each in objects
        if each["kind"] == "Service" and each["spec"].get("clusterIP") == "None"
        for port in each["spec"]["ports"]
    }
    named = [each["addresses"] for each in front_files("long names")["directory.toml"]["instances"]]
    assert len(named) == 3
    assert {address for addresses in named for address in addresses} <= headless


def test_the_configuration_is_one_that_the_appliance_reads() -> None:
    table = front_files("secured")["appliance.toml"]
    read_back = settings.parse(table, {}, {}, "/data")
    assert (read_back.grpc_port, read_back.http_port, read_back.multiplexer_workers) == (9101, 9102, 1)
    assert (read_back.tls.require_client_cert, read_back.tls.allowed_subjects) == (True, ("search",))
    front = the(state("secured"), "Deployment", "appliance-front")
    for one in containers(front):
        mounted = [mount["mountPath"] for mount in one["volumeMounts"]]
        for path in (read_back.tls.cert_file, read_back.tls.key_file, read_back.tls.client_ca_file):
            assert path.rpartition("/")[0] in mounted
        assert "/data/keys.toml" in mounted
        variables = {each["name"]: each["value"] for each in one["env"]}
        assert variables["TEI_MANAGER_CONFIG"].rpartition("/")[0] in mounted
        assert variables["TEI_MANAGER_DIRECTORY"] == "dns:/etc/tei-appliance/directory.toml"


@pytest.mark.parametrize(
    "key", ["queue", "cache", "memory_budget_mb", "cors_allow_origins", "grpc_request_timeout_secs"]
)
def test_what_the_front_reads_is_as_here(key: str) -> None:
    changed = configured(
        queue={"max_size": 7},
        cache={"store": "redis", "url": "redis://cache:6379/0"},
        memory_budget_mb=99,
        cors_allow_origins=["*"],
        image_url_hosts=["images.example.com"],
        grpc_request_timeout_secs=5,
    )
    table = tomllib.loads(tomli_w.dumps(kubernetes_front.configuration(changed, CLUSTER)))
    assert getattr(settings.parse(table, {}, {}, "/data"), key) == getattr(changed, key)


@pytest.mark.parametrize(("store", "noted"), [("redis", True), ("sqlite", False)])
def test_a_store_whose_client_the_image_has_not_is_noted(store: str, noted: bool) -> None:
    cache = {"store": store, **({"url": "redis://cache:6379/0"} if noted else {})}
    wanted = ("Deployment", kubernetes_front.FRONT)
    (front,) = [each for each in rendered([BGE], configured(cache=cache)) if (each.kind, each.name) == wanted]
    assert any("needs an image that has the extra redis" in note for note in front.notes) is noted


@pytest.mark.parametrize("version", ["1.2", "1.3"])
def test_the_lowest_version_of_tls_holds_for_grpc_too(version: str) -> None:
    tls = {"cert_file": "/c", "key_file": "/k", "min_version": version}
    front = kubernetes_front.container(
        "multiplexer", 9001, configured(tls=tls), replace(CLUSTER, tls_secret="front-tls")
    )
    names = {each["name"] for each in front["env"]}
    assert ("GRPC_SSL_CIPHER_SUITES" in names) == (version == "1.3")


def test_a_password_is_not_written() -> None:
    changed = configured(cache={"store": "redis", "url": "redis://:hidden@cache:6379/0"})
    with pytest.raises(Problem, match="has a password, which would be in clear") as refused:
        kubernetes_front.configuration(changed, CLUSTER)
    assert "hidden" not in refused.value.message


def test_keys_of_the_configuration_are_not_written() -> None:
    key = {"name": "k", "sha256": "ab" * 32, "role": "admin"}
    assert "ab" * 32 not in kubernetes_text.stream(rendered([BGE], configured(keys=[key]), keys_secret="front-keys"))


def test_probes_of_the_front_need_neither_key_nor_certificate() -> None:
    kinds = {
        (name, one["name"]): next(key for key in one["readinessProbe"] if key in ("grpc", "httpGet", "tcpSocket"))
        for name in ("one", "secured")
        for one in containers(the(state(name), "Deployment", "appliance-front"))
    }
    assert kinds == {
        ("one", "multiplexer"): "grpc",
        ("one", "gateway"): "httpGet",
        ("secured", "multiplexer"): "tcpSocket",
        ("secured", "gateway"): "tcpSocket",
    }


def test_the_gateway_ends_first_and_there_is_time_for_both() -> None:
    pod = the(state("one"), "Deployment", "appliance-front")["spec"]["template"]["spec"]
    first, last = (each["lifecycle"]["preStop"]["sleep"]["seconds"] for each in reversed(pod["containers"]))
    assert first < last
    assert pod["terminationGracePeriodSeconds"] >= last + 30


def test_another_configuration_makes_other_pods_and_another_directory_does_not() -> None:
    def template(*specs: InstanceSpec, **keys: Any) -> Object:
        found: Object = the(read(rendered(list(specs), configured(**keys))), "Deployment", "appliance-front")["spec"][
            "template"
        ]
        return found

    assert template(MINILM) == template(MINILM, BGE)
    assert template(MINILM) != template(MINILM, memory_budget_mb=99)


def test_who_may_call_the_front() -> None:
    policy = the(state("secured"), "NetworkPolicy", "appliance-front")
    callers = policy["spec"]["ingress"][0]["from"]
    named = [each["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for each in callers[1:]]
    assert (callers[0], named) == ({"podSelector": {}}, ["edge", "search"])


# -- the text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STATES)
def test_the_text_says_what_the_objects_are_and_always_the_same(name: str) -> None:
    specs, chosen, config = STATES[name]
    found = rendered(specs, config, **chosen)
    assert read(found) == [each.content for each in found]
    assert kubernetes_text.stream(found) == kubernetes_text.stream(rendered(list(reversed(specs)), config, **chosen))
    assert kubernetes_text.stream(found).isascii()


WORDS = [
    "y",
    "N",
    "yes",
    "No",
    "on",
    "OFF",
    "true",
    "null",
    "~",
    "1e3",
    "12e5",
    "0o17",
    "010",
    "1_000",
    "1:30",
    ".inf",
    "=",
    "<<",
    "",
]


@pytest.mark.parametrize(
    "word", [*WORDS, *HOSTILE, "2026-01-01", "a\nkind: Secret\n", "--- a", "# a", "a: b", "&a", "*a", "!a"]
)
def test_every_parser_takes_a_text_for_a_text(word: str) -> None:
    """PyYAML reads YAML 1.1; the others differ in words that are not quoted, so such words are quoted."""
    text = kubernetes_text.document({"args": [word]})
    assert yaml.safe_load(text) == {"args": [word]}
    plain = text.partition("- ")[2].strip()
    assert plain[0] in "\"|'" or (
        plain == word and kubernetes_text.SURE.fullmatch(word) and word.lower() not in kubernetes_text.WORDS
    )


@examples(LAW, max_examples=20)
@given(
    model=st.from_regex(r"org/[A-Za-z0-9][A-Za-z0-9._-]{0,20}m", fullmatch=True),
    arguments=st.lists(TEXT.filter(lambda text: not text.startswith("-")), max_size=5),
    revision=TEXT.map(lambda text: "r" + text[:200]),
)
def test_no_value_of_an_instance_becomes_anything_else(model: str, arguments: list[str], revision: str) -> None:
    wanted = spec("hostile", engine="tei", model_id=model, extra_args=arguments, revision=revision)
    found = rendered([wanted], max_replicas=2)
    assert re.findall(r"^kind: (.*)$", kubernetes_text.stream(found), re.M) == [each.kind for each in found]
    texts = {each.kind: kubernetes_text.text_of(each) for each in reversed(found)}  # of two Deployments, the replica's
    deployment, config = (yaml.load(texts[kind], yaml.CSafeLoader) for kind in ("Deployment", "ConfigMap"))
    assert started(deployment) == supervised(wanted)
    (entry,) = tomllib.loads(config["data"]["directory.toml"])["instances"]
    assert (entry["model_id"], entry.get("extra_args", []), entry["revision"]) == (model, arguments, revision)


def test_no_variable_of_the_pod_gets_into_an_argument() -> None:
    wanted = spec("a", engine="tei", extra_args=["--default-prompt", "$(HF_TOKEN) $$(HF_TOKEN) $x $"])
    (deployment, *_) = [each.content for each in rendered([wanted], hub_secret="hub") if each.kind == "Deployment"]
    assert as_started(container(deployment)["args"][-1], {"HF_TOKEN": "secret"}) == wanted.extra_args[-1]


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_reads_what_we_have_written(tmp_path: Path) -> None:
    """It has Kubernetes' own parser of YAML, and goes through all of it."""
    unreadable = ("=", "<<")  # for PyYAML, without the quotes that kubectl leaves away
    words = [word for word in (*WORDS, *HOSTILE) if word.isprintable() and word not in unreadable]
    found = rendered([spec("a", engine="tei", extra_args=words), MINILM, BGE], max_replicas=4, gateway="public")
    for name, text in kubernetes_text.files(found).items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(["kubectl", "kustomize", tmp_path], capture_output=True, text=True, check=True, timeout=60)
    built = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(done.stdout)}
    assert built == {(each.kind, each.name): each.content for each in found}


def test_a_folder_has_a_file_for_each_object_and_lists_them() -> None:
    found = rendered([MINILM, BGE], max_replicas=4, gateway="public")
    texts = kubernetes_text.files(found)
    listed = yaml.safe_load(texts.pop("kustomization.yaml"))
    assert sorted(listed["resources"]) == sorted(texts)
    assert [yaml.safe_load(texts[name]) for name in listed["resources"]] == [each.content for each in found]
