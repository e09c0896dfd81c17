"""`appliance export kubernetes`: of what runs, of a configuration alone, into a folder, and what it refuses."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from testing.engines import FAMILIES
from testing.manifests import complaints
from testing.running import MINILM, RunningAppliance

pytestmark = pytest.mark.processes
SEEDS = f"""
[[instances]]
name = "minilm"
model_id = "{MINILM}"
engine = "embedded"
replicas = 2

[[instances]]
name = "Large.v1"
model_id = "org/large"
engine = "tei"
gpu_ids = "auto"
"""


def export(folder: Path, *flags: str, config: str = SEEDS, **environ: str) -> "subprocess.CompletedProcess[str]":
    """Where nothing runs."""
    (folder / "appliance.toml").write_text(config)
    command = [sys.executable, "-m", "appliance", "--config", str(folder / "appliance.toml"), "export", "kubernetes"]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TEI_", "HF_"))}
    variables = {**kept, "TEI_MANAGER_DATA_DIR": str(folder / "data"), **environ}
    return subprocess.run([*command, *flags], env=variables, capture_output=True, text=True, timeout=60)


def read(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(text) if each]


def test_a_configuration_is_rendered_where_nothing_runs(tmp_path: Path) -> None:
    done = export(tmp_path, "--max-replicas", "4", "--gateway", "edge/public")
    assert (done.returncode, done.stderr) == (0, "")
    objects = read(done.stdout)
    assert complaints(objects) == []
    kinds = sorted(each["kind"] for each in objects)
    assert (kinds.count("Deployment"), kinds.count("ScaledObject")) == (3, 2)
    assert export(tmp_path, "--max-replicas", "4", "--gateway", "edge/public").stdout == done.stdout
    assert not (tmp_path / "data").exists(), "who looks makes nothing"
    listed = json.loads(export(tmp_path, "--max-replicas", "4", "--gateway", "edge/public", "--json").stdout)
    assert (listed["kind"], listed["items"]) == ("List", objects)


def test_the_commands_of_the_guide(tmp_path: Path) -> None:
    """As the page has them, in the shell. Who else has to be there (kubectl) only writes down what it was asked."""
    guide = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
    section = guide.partition("\n## On Kubernetes\n")[2].partition("\n## ")[0]
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, line in {
        "kubectl": 'echo "$@" >> asked',
        "appliance": f'exec {sys.executable} -m appliance --config appliance.toml "$@"',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "appliance.toml").write_text(SEEDS)
    variables = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "TEI_MANAGER_DATA_DIR": str(tmp_path / "data"),
    }
    blocks = re.findall(r"^```sh\n(.*?)^```$", section, re.M | re.S)
    assert len(blocks) == 2
    for block in blocks:
        subprocess.run(["sh", "-e", "-c", block], cwd=tmp_path, env=variables, check=True, timeout=60)
    asked = (tmp_path / "asked").read_text()
    assert "apply -k manifests" in asked
    listed = yaml.safe_load((tmp_path / "manifests" / "kustomization.yaml").read_text())["resources"]
    objects = [yaml.safe_load((tmp_path / "manifests" / name).read_text()) for name in listed]
    made = re.findall(r"create secret \w+ (\S+)", asked)
    assert complaints(objects, tuple(made)) == []
    assert {each["metadata"]["namespace"] for each in objects} == {"models"}


def test_a_folder_for_kustomize(tmp_path: Path) -> None:
    done = export(tmp_path, "-o", str(tmp_path / "out"), "--engine", "tei", "--gpus", "all")
    assert (done.returncode, done.stderr) == (0, "")
    listed = yaml.safe_load((tmp_path / "out" / "kustomization.yaml").read_text())["resources"]
    objects = [yaml.safe_load((tmp_path / "out" / name).read_text()) for name in listed]
    assert complaints(objects) == []
    images = [
        each["spec"]["template"]["spec"]["containers"][0]["image"] for each in objects if each["kind"] == "Deployment"
    ]
    assert [image.endswith(":1.9.3-grpc") for image in images] == [True, True, False]
    fewer = export(tmp_path, "-o", str(tmp_path / "out"), config=SEEDS.partition('[[instances]]\nname = "Large')[0])
    assert fewer.returncode == 0
    assert "not in kustomization.yaml: tei-large-v1-" in fewer.stderr


def test_tei_s_images_are_those_of_the_dockerfile(tmp_path: Path) -> None:
    dockerfile = (Path(__file__).parents[2] / "Dockerfile").read_text()
    version = dockerfile.partition("ARG TEI_VERSION=")[2].split()[0]
    deployments = [each for each in read(export(tmp_path, "--engine", "tei").stdout) if each["kind"] == "Deployment"]
    images = {each["spec"]["template"]["spec"]["containers"][0]["image"] for each in deployments[:2]}
    for image in images:
        assert image.replace(version, "${TEI_VERSION}") in dockerfile
    assert len(images) == 2


@pytest.mark.parametrize(
    ("config", "environ", "words"),
    [
        ('[tls]\ncert_file = "/a"\nkey_file = "/b"\n', {}, "--tls-secret"),
        (f'[[keys]]\nname = "k"\nsha256 = "{"ab" * 32}"\nrole = "admin"\n', {}, "--keys-secret"),
        ("", {"TEI_APPLIANCE_KEY": "tei-x"}, "--keys-secret"),
        ('[cache]\nstore = "redis"\nurl = "redis://:hidden@h"\n', {}, "has a password"),
        ('[cache]\nstore = "redis"\nurl = "redis://h/0?password=hidden"\n', {}, "has a password"),
        ('[[instances]]\nname = "own"\nmodel_id = "/srv/own"\n', {}, 'Instance "own" serves the folder "/srv/own"'),
    ],
)
def test_what_would_be_open_or_could_not_run_is_refused(
    config: str, environ: dict[str, str], words: str, tmp_path: Path
) -> None:
    done = export(tmp_path, config=config, **environ)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr
    assert "hidden" not in done.stderr


def test_keys_of_the_data_folder_are_seen(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "keys.toml").write_text("keys = []\n")
    assert "--keys-secret" in export(tmp_path).stderr
    done = export(tmp_path, "--keys-secret", "front-keys")
    assert complaints(read(done.stdout), ("front-keys",)) == []


def test_an_appliance_that_runs_is_asked(own_appliance: RunningAppliance) -> None:
    node = own_appliance
    node.create("minilm", model_id=MINILM, max_batch_tokens=99, aliases=["small"])
    node.wait_ready("minilm")
    node.create("idle", model_id=MINILM)
    assert node.post("/instances/idle/stop").status_code == 200
    done = node.cli("export", "kubernetes", "--namespace", "models")
    assert (done.returncode, done.stderr) == (0, "")
    objects = read(done.stdout)
    assert complaints(objects) == []
    deployments = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Deployment"}
    assert [deployments[name]["spec"]["replicas"] for name in ("tei-minilm", "tei-idle")] == [1, 0]
    container = deployments["tei-minilm"]["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][container["args"].index("--max-batch-tokens") + 1] == "99"
    assert container["readinessProbe"]["grpc"]["service"] == "tei.v1.Embed"
    (config,) = [each for each in objects if each["kind"] == "ConfigMap"]
    entries = {each["name"]: each for each in tomllib.loads(config["data"]["directory.toml"])["instances"]}
    assert entries["minilm"]["aliases"] == ["small"]
    assert entries["minilm"]["addresses"] == ["tei-minilm.models.svc:8080"]
    node.create("ranker", model_id=str(FAMILIES / "bert-rerank"))
    assert 'Instance "ranker" serves the folder' in node.cli("export", "kubernetes").stderr
