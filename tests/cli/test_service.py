"""The install of docs/deployment.md: a service with a user of its own, and root's command line, which has to find it.

A folder stands for the root of the file system. Its name has blanks, the ports are odd, and all listen on ::1.
"""

import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests

from appliance.core.settings import Settings
from appliance.drivers import configfile
from testing.running import SEED, eventually, free_ports

pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).parent.parent.parent
ROOT = os.geteuid() == 0
NOBODY, ANYBODY = 65534, 12345
PROGRAM = (
    "import sys, pathlib; from appliance.cli.main import main; sys.exit(main(sys.argv[2:], pathlib.Path(sys.argv[1])))"
)
# In place of a folder that is closed to others one that has the interpreter alone.
OPENED = """
closed="$1" kept="$2"; shift 2; held=$(mktemp -d); mount --bind "$kept" "$held"
mount -t tmpfs -o mode=755 tmpfs "$closed"; mkdir -p "$kept"; mount --bind "$held" "$kept"
umount "$held"; rmdir "$held"
exec "$@"
"""
Result = subprocess.CompletedProcess[str]


def becoming(user: int, command: list[str]) -> list[str]:
    """The command as this user runs it, where these tests may become him; root's home opens for the interpreter."""
    if not ROOT:
        return command
    drop = ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", *command]
    closed = [folder for folder in Path(sys.base_prefix).parents if not folder.stat().st_mode & 0o001]
    return (
        ["unshare", "--mount", "sh", "-ec", OPENED, "sh", str(closed[-1]), sys.base_prefix, *drop] if closed else drop
    )


@dataclass
class Service:
    root: Path
    ports: list[int]
    process: "subprocess.Popen[bytes] | None" = None
    invited: dict[str, Result] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        return self.root / "var/lib/tei-appliance"

    @property
    def config(self) -> Path:
        return self.root / "etc/tei-appliance/appliance.toml"

    @property
    def user(self) -> int:
        """The service's: nobody, where these tests may become him."""
        return NOBODY if ROOT else os.geteuid()

    def environ(self, home: Path, **more: str) -> dict[str, str]:
        """What a shell of somebody else has."""
        kept = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)}
        return {**kept, "HOME": str(home), **more}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", PROGRAM, str(self.root), *arguments]

    def up(self) -> None:
        """As the unit starts it."""
        environ = self.environ(self.data, TEI_MANAGER_CONFIG=str(self.config))
        command = becoming(self.user, self.command("up"))
        with (self.root / "up.txt").open("wb") as output:
            self.process = subprocess.Popen(command, env=environ, cwd=self.root, stdout=output, stderr=output)
        eventually(lambda: "Ctrl-C" in self.said(), 60)

    def said(self) -> str:
        return (self.root / "up.txt").read_text()

    def stop(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(timeout=40)

    def cli(self, *arguments: str, user: int | None = None, **variables: str) -> Result:
        """Of root, or of the user of these tests, with a HOME of his own and no variable of the service."""
        environ = self.environ(self.root / "root", **variables)
        command = self.command(*arguments) if user is None else becoming(user, self.command(*arguments))
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, cwd="/")

    def invitations(self) -> list[str]:
        """The commands that `up` printed to be copied."""
        told = self.said().partition("Try, in another terminal:\n")[2].partition("Ctrl-C")[0]
        return [line.strip() for line in told.replace("\\\n", " ").splitlines() if line.strip()]

    def statuses(self, key: str = "") -> list[int]:
        given = {"Authorization": f"Bearer {key}"} if key else {}
        ports = (self.ports[0], self.ports[2])
        return [
            requests.get(f"http://[::1]:{port}/openapi.json", headers=given, timeout=10).status_code for port in ports
        ]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """Up, with an instance; what it invites to was tried before its first key was made."""
    root = Path(tempfile.mkdtemp()) / "the root"  # pytest's own folders are closed to other users
    made = Service(root, free_ports(3))
    for folder in (made.config.parent, made.data, root / "root"):
        folder.mkdir(parents=True)
    root.parent.chmod(0o755)
    instances = free_ports(8)[3:]
    made.config.write_text(
        f'bind = "::1"\napi_port = {made.ports[0]}\ngrpc_port = {made.ports[1]}\nhttp_port = {made.ports[2]}\n'
        f"instance_port_start = {instances[0]}\ninstance_port_end = {instances[0] + 50}\n"
        f"prometheus_port_start = {instances[0] + 50}\n{SEED}"
    )
    made.data.chmod(0o700)
    if ROOT:
        os.chown(made.data, made.user, made.user)
    try:
        made.up()
        for line in made.invitations():
            if shutil.which(shlex.split(line)[0]) or "=" in shlex.split(line)[0]:
                environ = made.environ(root / "root")
                made.invited[line] = subprocess.run(
                    ["bash", "-c", line], env=environ, cwd="/", capture_output=True, text=True, timeout=60
                )
        yield made
    finally:
        made.stop()
        shutil.rmtree(root.parent)


def test_what_up_prints_works_when_it_is_pasted(service: Service) -> None:
    lines = service.invitations()
    assert [shlex.split(line)[0] for line in lines if "embed " not in line] == ["curl", "curl", "grpcurl"]
    for line, result in service.invited.items():
        assert result.returncode == 0, (line, result.stderr)
        assert '"error"' not in result.stdout, (line, result.stdout)
    shown, embedded, vector = [json.loads(result.stdout) for result in list(service.invited.values())[:3]]
    assert (shown["name"], len(embedded["data"][0]["embedding"]), len(vector)) == ("minilm", 384, 384)
    assert shlex.split(lines[3])[4] == f"[::1]:{service.ports[1]}"


def test_a_key_that_root_makes_counts_on_all_ports(service: Service) -> None:
    assert service.cli("status", "--ready").stdout == "ready\n"
    made = service.cli("keys", "create", "first", "admin")
    assert (made.returncode, made.stderr.split(": ")[-1]) == (0, f"counts on {', '.join(map(str, service.ports))}\n")
    key = made.stdout.strip()
    assert (key.startswith("tei-"), service.statuses(), service.statuses(key)) == (True, [401, 401], [200, 200])
    file = (service.data / "keys.toml").stat()
    assert (file.st_uid, stat.S_IMODE(file.st_mode)) == (service.user, 0o600)
    assert list((service.root / "root").iterdir()) == []
    # The image's health check needs no key: the socket's mode says who may use it. All else does.
    assert service.cli("status", "--ready").stdout == "ready\n"
    assert service.cli("instances", "list").returncode == 1
    assert service.cli("instances", "list", TEI_APPLIANCE_KEY=key).returncode == 0
    assert stat.S_IMODE((service.data / "control.sock").stat().st_mode) == 0o700
    # Tried is the appliance that runs, not what this command line takes its ports to be.
    other: dict[str, Any] = {"TEI_MANAGER_GRPC_PORT": "1042", "TEI_MANAGER_HTTP_PORT": "1043"}
    shown = json.loads(service.cli("keys", "create", "second", "read", "--json", **other).stdout)
    assert (shown["name"], shown["counts_on"], service.statuses(shown["key"])) == ("second", service.ports, [200, 200])
    revoked = service.cli("keys", "revoke", "second")
    assert f"keys are asked for on {', '.join(map(str, service.ports))}" in revoked.stdout
    assert service.statuses(shown["key"]) == [401, 401]
    assert "uid 0 from control.sock: 201" in (service.data / "audit.jsonl").read_text() or not ROOT
    secrets = (key, shown["key"])
    written = [path.read_text(errors="replace") for path in service.data.rglob("*") if path.is_file()]
    assert not [text for text in written if any(secret in text for secret in secrets)]


@pytest.mark.skipif(not ROOT, reason="only root can become others")
def test_other_users_come_with_a_key_over_the_port(service: Service) -> None:
    own = json.loads(service.cli("keys", "create", "of-a-user", "admin", "--json").stdout)["key"]
    for arguments in (["status", "--ready"], ["keys", "list"], ["keys", "create", "stolen", "admin"]):
        assert service.cli(*arguments, user=ANYBODY).returncode == 1, arguments
        assert service.cli(*arguments, user=ANYBODY, TEI_APPLIANCE_KEY=own).returncode == 0, arguments


def test_a_folder_that_nobody_serves_is_not_written_where_another_appliance_answers(service: Service) -> None:
    elsewhere = service.root / "elsewhere"
    refused = service.cli("keys", "create", "lost", "admin", TEI_MANAGER_DATA_DIR=str(elsewhere))
    assert (refused.returncode, refused.stdout, elsewhere.exists()) == (1, "", False)
    assert f"is not the appliance of {elsewhere}" in refused.stderr


def test_a_key_made_while_the_service_is_down_is_the_services(service: Service) -> None:
    service.stop()
    if ROOT:
        refused = service.cli("up")
        assert (refused.returncode, "start the service" in refused.stderr) == (1, True)
    (service.data / "keys.toml").unlink(missing_ok=True)
    (service.data / "keys.lock").unlink(missing_ok=True)
    made = service.cli("keys", "create", "before", "admin")
    assert (made.returncode, "counts from the next start" in made.stderr) == (0, True)
    for name in ("keys.toml", "keys.lock", "events.jsonl"):
        assert (service.data / name).stat().st_uid == service.user, name
    service.up()
    assert (service.statuses(), service.statuses(made.stdout.strip())) == ([401, 401], [200, 200])


def test_which_configuration_counts(tmp_path: Path) -> None:
    """Flag over environment, where "" means none, over the service's; and its data folder is only that one's."""
    assert configfile.chosen(None, {}, tmp_path) == ""
    config, data = tmp_path / configfile.SERVICE_CONFIG, tmp_path / configfile.SERVICE_DATA_DIR
    config.parent.mkdir(parents=True)
    config.write_text("")
    assert configfile.chosen(None, {}, tmp_path) == str(config)
    assert configfile.chosen(None, {"TEI_MANAGER_CONFIG": ""}, tmp_path) == ""
    assert configfile.chosen(None, {"TEI_MANAGER_CONFIG": "/x"}, tmp_path) == "/x"
    assert configfile.chosen("/flag", {"TEI_MANAGER_CONFIG": "/x"}, tmp_path) == "/flag"

    def loaded(path: Path) -> Settings:
        return configfile.load({"HOME": "/h", "TEI_MANAGER_CONFIG": str(path)}, root=tmp_path)

    assert loaded(config).data_dir != str(data)  # a container has such a configuration, and /data
    data.mkdir(parents=True)
    assert loaded(config).data_dir == str(data)
    config.write_text('data_dir = "/srv/named"')
    assert loaded(config).data_dir == "/srv/named"
    (other := tmp_path / "other.toml").write_text("")
    assert loaded(other).data_dir != str(data)
