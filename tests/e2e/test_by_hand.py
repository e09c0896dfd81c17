"""What operators do with supervisorctl and rm, behind the appliance's back: it says so, and how it is mended."""

import re
import shutil
import time
from pathlib import Path

import pytest
import requests

from appliance.monitor.monitor import RECONCILE_SECS
from testing.certificates import Authority
from testing.running import RunningAppliance, eventually

pytestmark = pytest.mark.e2e


def test_a_program_that_somebody_stopped_is_no_health(own_appliance: RunningAppliance) -> None:
    box = own_appliance
    eventually(lambda: box.get("/health").json()["status"] == "healthy")
    box.supervisorctl("stop", "multiplexer:*", "gateway")
    told = box.get("/health").json()
    assert told["status"] == "degraded"
    assert "program_down: " in told["reason"]
    assert box.cli("status").returncode == 1
    commands = re.findall(r"supervisorctl -c \S+ (start \S+?)(?:;|$)", told["reason"])
    assert {"start multiplexer:multiplexer-0", "start gateway"} <= set(commands)  # there may be more multiplexers
    found = box.cli("doctor").stdout
    for command in commands:
        assert command in found
        assert "started" in box.supervisorctl(*command.split())
    eventually(lambda: box.get("/health").json()["status"] == "healthy")


def test_a_start_starts_the_replica_that_somebody_stopped_and_no_other(own_appliance: RunningAppliance) -> None:
    box = own_appliance
    box.create("two", replicas=2)
    before = box.wait_ready("two")["replica_list"]
    box.supervisorctl("stop", "two:two-1")
    assert box.post("/instances/two/start").status_code == 200
    after = box.wait_ready("two")["replica_list"]
    assert after[0]["pid"] == before[0]["pid"]
    assert after[1]["pid"] not in (None, before[1]["pid"])
    assert box.post("/instances/two/start").status_code == 409


def test_a_start_brings_back_what_somebody_removed_from_supervisord(own_appliance: RunningAppliance) -> None:
    """It was refused as starting, and nothing started it before the minute was over."""
    box = own_appliance
    box.create("gone")
    box.wait_ready("gone")
    box.supervisorctl("stop", "gone:*")
    box.supervisorctl("remove", "gone")
    began = time.monotonic()
    assert box.post("/instances/gone/start").status_code == 200
    assert "gone:gone-0" in box.supervisorctl("status")
    box.wait_ready("gone")
    assert time.monotonic() - began < RECONCILE_SECS / 2


def test_of_replicas_that_somebody_stopped_those_that_are_left_are_started(own_appliance: RunningAppliance) -> None:
    """The running one ended, and the one that was stopped was all that the instance had."""
    box = own_appliance
    box.create("fewer", replicas=2)
    box.wait_ready("fewer")
    box.supervisorctl("stop", "fewer:fewer-0")
    assert requests.patch(f"{box.url}/instances/fewer", json={"replicas": 1}, timeout=60).status_code == 200
    assert box.wait_ready("fewer")["replicas"] == 1


def test_calls_end_before_the_replicas_that_they_need(own_appliance: RunningAppliance) -> None:
    """They waited for replicas that were not to come, and the shutdown for them, 30 s."""
    box = own_appliance
    box.create("one")
    box.wait_ready("one")
    box.supervisorctl("shutdown")
    log = box.folder / "logs" / "supervisord.log"
    eventually(lambda: "stopped: control" in log.read_text(), 30)
    ended = re.findall(r"stopped: (\S+)", log.read_text())
    programs = ("monitor", "gateway", "multiplexer-0", "one-0", "control")
    assert [name for name in ended if name in programs] == list(programs)


def test_without_the_folder_of_the_logs_no_verb_fails(own_appliance: RunningAppliance) -> None:
    box = own_appliance
    box.create("one")
    box.wait_ready("one")
    shutil.rmtree(box.folder / "logs")
    eventually(lambda: "make it again" in box.get("/health").json().get("reason", ""))
    assert box.post("/instances/one/stop").status_code == 200
    eventually(lambda: box.instance("one")["status"] == "stopped")
    assert box.post("/instances/one/start").status_code == 200
    box.wait_ready("one")
    eventually(lambda: box.get("/health").json()["status"] == "healthy")


def test_without_the_file_of_keys_everybody_is_kept_out_and_told_so(own_appliance: RunningAppliance) -> None:
    box = own_appliance
    assert box.cli("keys", "list").stdout == "No key is asked for\n"
    assert box.cli("keys", "create", "k", "admin").returncode == 0
    Path(box.folder, "keys.toml").unlink()
    eventually(lambda: box.get("/instances").status_code == 401)
    assert box.cli("keys", "list").stdout == "There is no key, and everybody is kept out\n"
    found = box.cli("doctor")
    assert (found.returncode, "keys.toml is missing, and no key of it counts" in found.stdout) == (1, True)
    made = box.cli("keys", "create", "again", "admin")
    assert made.returncode == 0
    key = {"Authorization": f"Bearer {made.stdout.strip()}"}
    told = eventually(lambda: requests.get(f"{box.url}/health", headers=key, timeout=20).json())
    assert "keys_unreadable" not in told.get("reason", "")


def test_a_key_counts_where_the_appliance_listens_and_not_as_its_configuration_says_now(
    own_appliance: RunningAppliance, tmp_path: Path
) -> None:
    """It said that the key was worth nothing, as the ports did not speak the TLS that they get at the next start."""
    box = own_appliance
    authority = Authority(tmp_path, "Own")
    server = authority.issue("node", ["DNS:localhost"])
    changed = f'[tls]\ncert_file = "{server.chain}"\nkey_file = "{server.key_path}"\n'
    box.config.write_text(box.config.read_text() + changed)
    ports = ", ".join(map(str, sorted([box.api_port, box.grpc_port, box.http_port])))
    made = box.cli("keys", "create", "k", "admin")
    assert (made.returncode, made.stderr) == (0, f'Key "k": counts on {ports}\n')
    revoked = box.cli("keys", "revoke", "k")
    said = f'Key "k" is revoked: no key is left, everybody is kept out; keys are asked for on {ports}\n'
    assert (revoked.returncode, revoked.stdout, revoked.stderr) == (0, said, "")
