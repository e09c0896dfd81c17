"""The command line against one running appliance, and `doctor` on a healthy and on a broken one."""

import json
import os
import pty
import shlex
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pytest

from testing.engines import FAMILIES
from testing.running import MINILM, RunningAppliance


def done(node: RunningAppliance, *arguments: str, given: str = "") -> str:
    command = node.command(*arguments)
    result = subprocess.run(command, env=node.environ, input=given, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_file_of_texts_gives_a_line_for_each_in_order(appliance: RunningAppliance, tmp_path: Path) -> None:
    texts = [f"text number {number}" for number in range(20)]
    file = tmp_path / "texts"
    file.write_text("\n".join(texts) + "\n")
    vectors = [json.loads(line) for line in done(appliance, "embed", "--file", str(file)).splitlines()]
    piped = done(appliance, "embed", "--file", "-", "--instance", "minilm", given="\n".join(texts))
    assert np.array([json.loads(line) for line in piped.splitlines()]) == pytest.approx(np.array(vectors), abs=1e-5)
    single = json.loads(done(appliance, "embed", texts[7]))
    assert single == pytest.approx(vectors[7], abs=1e-5)
    for wrong in (["embed"], ["embed", "x", "--file", "y"], ["embed", "--file", "/nowhere"]):
        assert appliance.cli(*wrong).returncode == 1


def test_lines_are_ranked_best_first(own_appliance: RunningAppliance, tmp_path: Path) -> None:
    own_appliance.create("ranker", model_id=str(FAMILIES / "bert-rerank"))
    own_appliance.wait_ready("ranker")
    file = tmp_path / "texts"
    file.write_text("river\nstone\nthe river and the stone\n")
    ranked = json.loads(done(own_appliance, "rerank", "river", str(file), "--json"))
    scores = [each["score"] for each in ranked]
    assert scores == sorted(scores, reverse=True)
    assert sorted(each["index"] for each in ranked) == [0, 1, 2]
    assert "SCORE" in done(own_appliance, "rerank", "river", str(file))


def test_more_lines_are_ranked_than_a_replica_takes_at_once_with_a_key_too(
    own_appliance: RunningAppliance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_appliance.create("ranker", model_id=str(FAMILIES / "bert-rerank"))
    own_appliance.wait_ready("ranker")
    file = tmp_path / "texts"
    file.write_text("".join(f"stone {number}\n" for number in range(70)))
    ranked = json.loads(done(own_appliance, "rerank", "river", str(file), "--json"))
    assert sorted(each["index"] for each in ranked) == list(range(70))
    key = own_appliance.post("/keys", {"name": "boss", "role": "admin"}).json()["key"]
    assert own_appliance.cli("rerank", "river", str(file)).returncode == 1
    monkeypatch.setitem(own_appliance.environ, "TEI_APPLIANCE_KEY", key)
    assert json.loads(done(own_appliance, "rerank", "river", str(file), "--json")) == ranked


def test_instances_are_made_and_exported_as_configuration(own_appliance: RunningAppliance) -> None:
    node = own_appliance
    dry = json.loads(done(node, "instances", "create", "a", MINILM, "--set", "replicas=2", "--dry-run", "--json"))
    assert (dry["replicas"], node.get("/instances").json()) == (2, [])
    made = json.loads(
        done(node, "instances", "create", "a", MINILM, "--set", "max_batch_tokens=99", "--wait", "--json")
    )
    assert made["status"] == "running"
    (kept,) = tomllib.loads(done(node, "export"))["instances"]
    assert (kept["name"], kept["model_id"], kept["max_batch_tokens"]) == ("a", MINILM, 99)
    assert json.loads(done(node, "instances", "restart", "a", "--wait", "--json"))["status"] == "running"
    assert "stopped" in done(node, "instances", "stop", "a")
    # With little time to start: by itself supervisord gives up after 20 s.
    failed = node.cli("instances", "create", "bad", "nobody/nothing", "--set", "startup_timeout_secs=1", "--wait")
    assert (failed.returncode, "failed" in failed.stdout) == (1, True)


def test_statuses_have_colours_on_a_terminal_only(appliance: RunningAppliance) -> None:
    assert "\x1b" not in done(appliance, "status")
    ours, theirs = pty.openpty()
    subprocess.run(appliance.command("status"), env=appliance.environ, stdout=theirs, timeout=60, check=True)
    assert "\x1b[32mrunning" in os.read(ours, 65536).decode()


def test_completion_scripts_are_printed(appliance: RunningAppliance) -> None:
    for shell in ("bash", "zsh"):
        script = done(appliance, "--print-completion", shell)
        assert "instances" in script
    checked = subprocess.run(["bash", "-n"], input=done(appliance, "--print-completion", "bash"), text=True, timeout=60)
    assert checked.returncode == 0


def test_bash_completes_the_names_that_there_are(appliance: RunningAppliance, tmp_path: Path) -> None:
    """As readline does it: the words so far, then the function that is registered for the command."""
    (tmp_path / "appliance").write_text(f'#!/bin/sh\nexec {shlex.join(appliance.command())} "$@"\n')
    (tmp_path / "appliance").chmod(0o755)
    (tmp_path / "completion").write_text(done(appliance, "--print-completion", "bash"))

    def completed(*words: str) -> set[str]:
        program = f"""
            . {tmp_path}/completion; COMP_WORDS=(appliance {shlex.join(words)}); COMP_CWORD={len(words)}
            registered=$(complete -p appliance); registered=${{registered#*-F }}
            ${{registered%% *}} appliance {words[-1]}; printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        environ = {**appliance.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        told = subprocess.run(["bash", "-c", program], env=environ, capture_output=True, text=True, timeout=60)
        return set(told.stdout.split())

    assert "minilm" in completed("instances", "stop", "mini")
    assert "minilm" in completed("logs", "mini")
    assert MINILM in completed("models", "show", "sent")
    assert "replicas=" in completed("instances", "create", "new", MINILM, "--set", "rep")
    assert "minilm" not in completed("instances", "create", "mini")


def test_an_empty_line_is_named_by_embed_and_rerank_alike(appliance: RunningAppliance, tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("one\n\nthree\n\n")
    for command in (["embed", "--file", str(file)], ["rerank", "one", str(file)]):
        refused = appliance.cli(*command, "--instance", "minilm")
        assert refused.returncode == 1
        assert f"Line 2 of {file} is empty" in refused.stderr


def test_watching_shows_what_each_instance_does(appliance: RunningAppliance) -> None:
    ours, theirs = pty.openpty()
    environ = {**appliance.environ, "COLUMNS": "200"}
    with subprocess.Popen(appliance.command("status", "--watch"), env=environ, stdout=theirs) as watching:
        told = b""
        while told.count(b"minilm") < 2:
            told += os.read(ours, 65536)
        watching.terminate()
    for word in ("TEXTS/S", "P95", "QUEUE", "MEMORY", "LAST EVENT", "1/1", " MB", "ago"):
        assert word in told.decode()


def test_one_instance_is_shown_without_python(appliance: RunningAppliance) -> None:
    told = done(appliance, "instances", "show", "minilm")
    assert not set(told.replace(",", " ").split()) & {"None", "True", "False", "[]", "{}"}
    assert "replica 0" in told


def test_usage_errors_end_with_2(appliance: RunningAppliance) -> None:
    for wrong in ([], ["nonsense"], ["instances"], ["status", "--nonsense"], ["models", "load"]):
        assert appliance.cli(*wrong).returncode == 2


def findings(node: RunningAppliance) -> dict[str, dict[str, str]]:
    found = json.loads(node.cli("doctor", "--json").stdout)
    return {each["what"]: each for each in found}


def test_doctor_finds_a_healthy_appliance_healthy(appliance: RunningAppliance) -> None:
    result = appliance.cli("doctor")
    assert result.returncode == 0, result.stdout
    found = findings(appliance)
    for what in ("engine", "data folder", "model cache", "GPU", "clock", "control", "multiplexer-0", "instance minilm"):
        assert what in found
    assert not [each for each in found.values() if each["verdict"] == "wrong"]


def test_doctor_names_what_is_broken_and_how_to_mend_it(own_appliance: RunningAppliance) -> None:
    node = own_appliance
    node.create("bad", model_id="nobody/nothing")
    node.supervisorctl("stop", "gateway")
    found = findings(node)
    assert node.cli("doctor").returncode == 1
    assert (found["gateway"]["verdict"], "start gateway" in found["gateway"]["fix"]) == ("wrong", True)
    assert found[f"port {node.http_port}"]["verdict"] == "wrong"
    node.stop()
    found = findings(node)
    assert (found["supervisord"]["verdict"], found["supervisord"]["fix"]) == ("wrong", "appliance up")
