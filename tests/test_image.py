"""The image, proved without a container engine: its parts are run by the very commands of the Dockerfile.

A room stands for a container: a root folder of its own in which of this machine only /usr and /etc are seen, with its
own processes, mounts and network, so that the ports, paths and variables are those of the image. The build stage runs
in it as root; then its root becomes read-only, and everything runs as the image's user without any capability.

Not proved: that TEI's images exist and that apt-get finds everything there, and TEI itself, whose place the embedded
engine takes. Where this machine has no tini, `appliance up` is the first process by itself. The lock's packages are
linked from the environment of the tests instead of downloaded; the test marked `long` downloads them.
"""

import configparser
import fnmatch
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from appliance.control import routes as control
from appliance.core import access, settings
from testing.running import MINILM, eventually

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
UNIT = (ROOT / "etc" / "tei-appliance.service").read_text()
GUIDE = (ROOT / "docs" / "deployment.md").read_text()
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "mount", "chroot")
DEVICES = ("null", "zero", "random", "urandom")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
UP_SECS = 60.0
STOP_SECS = 45  # docker stop's patience, as the guide sets it
GRACE_SECS = settings.Settings().graceful_shutdown_timeout_secs

# Sends 20 texts on one stream, says so when the first answer is there, and then how many there were.
STREAM = """
import time
import grpc
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub

def requests():
    for number in range(20):  # for a second, however busy the cores are
        time.sleep(0.05)
        request = tei.EmbedRequest(inputs=f"{number} words", truncate=True)
        yield mux.EmbedRequest(target=mux.Target(instance_name="minilm"), request=request)

replies = TeiMultiplexerStub(grpc.insecure_channel("127.0.0.1:9001")).EmbedStream(requests())
next(replies)
print("streaming", flush=True)
print(1 + sum(len(reply.embeddings) == 384 for reply in replies))
"""


def stage(name: str) -> list[tuple[str, str]]:
    """(instruction, the rest) of a stage of the Dockerfile; "" is the last one."""
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in re.sub(r"\s*\\\n\s*", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.M)).splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            current = found[rest.partition(" AS ")[2]] = []
        elif word:
            current.append((word, rest.strip()))
    return found[name]


def image_has(word: str) -> str:
    """The last stage's only instruction of that kind."""
    [rest] = [rest for found, rest in stage("") if found == word]
    return rest


def health_check() -> list[str]:
    command: list[str] = json.loads(image_has("HEALTHCHECK").partition("CMD ")[2])
    return command


def variables() -> dict[str, str]:
    """A container's environment: ours, and before it what TEI's images and Docker put there. There is no HOME."""
    ours = dict(word.partition("=")[::2] for word in shlex.split(image_has("ENV")))
    ours["PATH"] = ours["PATH"].replace("$PATH", PATH)
    return {"PORT": "80", "HOSTNAME": "4f1d2c3b4a59", **ours}


def ignored(name: str, rules: list[str]) -> bool:
    """Whether .dockerignore keeps a path out: of the rules that fit it or a folder above it, the last one says."""
    parts = name.split("/")
    above = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
    verdict = False
    for rule in rules:
        if any(fnmatch.fnmatchcase(path, rule.lstrip("!").replace("**/", "*")) for path in above):
            verdict = not rule.startswith("!")
    return verdict


def context(folder: Path) -> None:
    """The files that `docker build .` is given."""
    rules = [rule for rule in (ROOT / ".dockerignore").read_text().splitlines() if rule and not rule.startswith("#")]
    for path in (*ROOT.glob("*"), *(ROOT / "etc").rglob("*"), *(ROOT / "appliance").rglob("*")):
        name = path.relative_to(ROOT).as_posix()
        if path.is_file() and not ignored(name, rules):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / name)


class Room:
    """A root folder that stands for the image, and at most one container of it at a time."""

    def __init__(self, folder: Path) -> None:
        self.root, self.data, self.context = folder / "root", folder / "data", folder / "context"
        self.output = folder / "output.txt"
        self.container: subprocess.Popen[bytes] | None = None
        self.user, self.group = map(int, image_has("USER").split(":"))
        self.seen = [Path("/usr"), Path("/etc"), *([] if sys.base_prefix == "/usr" else [Path(sys.base_prefix)])]
        for name in ("bin", "sbin", "lib", "lib64"):
            path = Path("/", name)
            if path.is_symlink():
                self.root.mkdir(exist_ok=True)
                (self.root / name).symlink_to(path.readlink())
            elif path.exists():
                self.seen.append(path)
        for name in ("proc", "dev", "tmp", "data", "opt", "src", "wheels", *(str(path)[1:] for path in self.seen)):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        for name in DEVICES:
            (self.root / "dev" / name).touch()
        self.data.mkdir()
        os.chown(self.data, self.user, self.group)
        context(self.context)

    def inside(self, command: list[str], building: bool = False) -> list[str]:
        """The command line that sets a new container up and runs ``command`` as its first process.

        building: as root, with a root folder that can be written to, and with this machine's network.
        """
        devices = [Path("/dev", name) for name in DEVICES]
        lines = ["set -e", f"mount --bind {self.root} {self.root}"]
        lines += [f"mount --bind {path} {self.root}{path}" for path in self.seen + devices]
        lines += [f"mount -o remount,bind,ro {self.root}{path}" for path in self.seen]
        lines += [f"mount -t proc proc {self.root}/proc", f"mount --bind {self.data} {self.root}/data"]
        lines += [f"mount -t tmpfs -o mode=1777,noexec,nosuid,nodev tmpfs {self.root}/tmp"]
        lines += [] if building else [f"mount -o remount,bind,ro {self.root}", "ip link set lo up"]
        lines += [f'exec chroot {self.root} "$@"']
        spaces = ["--mount", "--pid", *([] if building else ["--net"]), "--fork"]
        return [
            "unshare",
            *spaces,
            "sh",
            "-c",
            "\n".join(lines),
            "sh",
            *(command if building else self.as_user(command)),
        ]

    def as_user(self, command: list[str]) -> list[str]:
        """As `--cap-drop ALL --security-opt no-new-privileges` has it."""
        drop = ["--reuid", str(self.user), "--regid", str(self.group), "--clear-groups", "--no-new-privs"]
        drop += ["--bounding-set=-all", "--inh-caps=-all"]
        return ["setpriv", *drop, "env", "-i", *(f"{key}={value}" for key, value in variables().items()), *command]

    def build(self, install_lock: Callable[[str], None]) -> None:
        """The build stage, instruction by instruction. What apt-get would install, this machine has."""
        at = "/"
        for word, rest in stage("build"):
            if word == "WORKDIR":
                at = rest
            elif word == "COPY":
                *names, target = rest.split()
                for name in names:
                    source = self.context / name
                    copy = shutil.copytree if source.is_dir() else shutil.copy
                    copy(source, self.root / at[1:] / target / (name if target == "./" else ""))
            elif "-r requirements-image.lock" in rest:
                install_lock(rest)
            else:
                assert word == "RUN", word
                self.run(re.sub(r"apt-get .*? && rm -rf /var/lib/apt/lists/\* && ", "", rest), at)
        for name in ("src", "wheels"):  # of the build stage, the last one has only the environment
            shutil.rmtree(self.root / name)

    def run(self, command: str, at: str = "/src") -> None:
        """RUN of the build stage."""
        shell = ["env", "-i", f"PATH={sys.base_prefix}/bin:{PATH}", "sh", "-c", f"cd {at} && {command}"]
        result = subprocess.run(self.inside(shell, building=True), capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, (command, result.stdout, result.stderr)

    def link_lock(self, command: str) -> None:
        """In place of the download: the packages that the lock names, and no other, from the tests' environment."""
        [target] = (self.root / "opt/appliance/lib").glob("python3*/site-packages")
        for old in target.iterdir():
            if not old.name.startswith("pip"):  # the newer setuptools of the lock replaces that of the environment
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        for name in re.findall(r"^([\w.-]+)==", (ROOT / "requirements-image.lock").read_text(), re.M):
            found = importlib.metadata.distribution(name)
            for file in found.files or ():
                source = Path(str(found.locate_file(file)))
                if ".." not in file.parts and source.exists():
                    (target / file).parent.mkdir(parents=True, exist_ok=True)
                    # Appliances of other tests know some files by their time, which a link changes.
                    if file.name == "METADATA" or name.startswith("gt-"):
                        shutil.copyfile(source, target / file)
                        continue
                    try:
                        os.link(source, target / file)
                    except OSError:  # on another file system
                        shutil.copyfile(source, target / file)

    def start(self) -> None:
        """`docker start`: entry point and command of the image."""
        entry = json.loads(image_has("ENTRYPOINT")) + json.loads(image_has("CMD"))
        if not shutil.which(entry[0], path=PATH):
            entry = entry[entry.index("--") + 1 :]
        with self.output.open("wb") as output:
            self.container = subprocess.Popen(self.inside(entry), stdout=output, stderr=output)
        eventually(psutil.Process(self.container.pid).children)

    def first(self) -> psutil.Process:
        """The container's first process, the one that `docker stop` signals."""
        assert self.container is not None
        [first] = psutil.Process(self.container.pid).children()
        return first

    def exec(self, *command: str) -> list[str]:
        """`docker exec`: a command line that runs in the container, as its user."""
        spaces = ["--mount", "--pid", "--net", "--root", "--wd=/"]
        return ["nsenter", "--target", str(self.first().pid), *spaces, *self.as_user(list(command))]

    def says(self, *command: str) -> str:
        """What a command says in the container; nothing when it fails."""
        result = subprocess.run(self.exec(*command), capture_output=True, text=True, timeout=60)
        return result.stdout if result.returncode == 0 else ""

    def serves(self) -> bool:
        """Whether the image's own health check is content and MiniLM answers."""
        if not self.says(*health_check()):
            return False
        vector = self.says("appliance", "embed", "hello", "--instance", "minilm")
        return bool(vector) and len(json.loads(vector)) == 384

    def end(self, number: int) -> int:
        """`docker stop` or `docker kill`. Returns the exit status of the container's first process."""
        assert self.container is not None
        self.first().send_signal(number)
        return self.container.wait(timeout=STOP_SECS)

    def close(self) -> None:
        if self.container is not None and self.container.poll() is None:
            self.end(signal.SIGKILL)  # and with its first process all of the container


def rooms_can_be_made() -> bool:
    if os.geteuid() != 0 or not all(map(shutil.which, TOOLS)):
        return False
    return subprocess.run(["unshare", "--mount", "--pid", "--net", "--fork", "true"]).returncode == 0


needs_root = pytest.mark.skipif(not rooms_can_be_made(), reason="needs root, and leave to make namespaces")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    room = Room(tmp_path_factory.mktemp("image"))
    room.build(room.link_lock)
    yield room
    room.close()


@needs_root
@pytest.mark.timeout(300)
def test_it_comes_back_after_a_kill_and_drains_when_it_is_stopped(image: Room) -> None:
    image.start()
    eventually(lambda: image.says(*health_check()), UP_SECS)
    assert image.says("appliance", "instances", "create", "minilm", MINILM)
    eventually(image.serves, UP_SECS)
    image.end(signal.SIGKILL)

    # What is left of it in the data folder hinders nobody, though its process numbers are in use again.
    image.start()
    eventually(image.serves, UP_SECS)
    with subprocess.Popen(image.exec("python", "-c", STREAM), stdout=subprocess.PIPE, text=True) as stream:
        assert stream.stdout is not None
        assert stream.stdout.readline() == "streaming\n"
        assert image.end(signal.SIGTERM) == 0
        assert stream.stdout.read() == "20\n"
    said = image.output.read_text()
    assert said.endswith("Stopped; no process is left\n")
    assert "left behind" not in said

    logs = "".join(path.read_text() for path in (image.data / "logs").iterdir())
    assert "SIGKILL" not in logs
    assert not re.search("Read-only file system|Permission denied|No usable temporary|telemetry", logs)


@needs_root
def test_the_health_check_fails_where_nothing_runs(image: Room) -> None:
    result = subprocess.run(image.inside(health_check()), capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "is the appliance up?" in result.stderr


@needs_root
def test_a_data_folder_of_somebody_else_is_named(tmp_path: Path, image: Room) -> None:
    theirs = tmp_path / "data"
    theirs.mkdir()
    ours, image.data = image.data, theirs
    try:
        result = subprocess.run(image.inside(["appliance", "up"]), capture_output=True, text=True, timeout=60)
    finally:
        image.data = ours
    assert result.returncode == 1
    assert result.stderr.startswith("appliance: Cannot write to data_dir /data: Permission denied. It must belong to")


@needs_root
def test_its_user_may_change_nothing_of_it(image: Room) -> None:
    """Where its root can be written to, the user can write nothing but /data and /tmp all the same."""
    for path in (image.root / "opt").rglob("*"):
        about = path.lstat()
        assert about.st_uid == 0, path
        assert path.is_symlink() or not about.st_mode & 0o022, path


@needs_root
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_lock_is_all_that_it_needs(tmp_path: Path) -> None:
    room = Room(tmp_path)
    try:
        room.build(room.run)
        room.start()
        eventually(lambda: room.says(*health_check()), UP_SECS)
        assert room.says("appliance", "instances", "create", "minilm", MINILM)
        eventually(room.serves, UP_SECS)
        assert room.end(signal.SIGTERM) == 0
    finally:
        room.close()


def hadolint(dockerfile: Path) -> str:
    """What hadolint has against a Dockerfile. Its own comments do not count; what is allowed stands here."""
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    allowed = ["--ignore", "DL3006", "--ignore", "DL3008"]  # the Dockerfile says why
    command = ["hadolint", "--disable-ignore-pragma", *allowed, str(dockerfile)]
    return subprocess.run(command, env=environ, capture_output=True, text=True).stdout


def test_the_dockerfile_is_linted(tmp_path: Path) -> None:
    assert hadolint(ROOT / "Dockerfile") == ""
    broken = tmp_path / "Dockerfile"
    broken.write_text(DOCKERFILE.replace("--no-install-recommends", ""))
    assert "DL3015" in hadolint(broken)


def test_every_variant_is_a_grpc_image_of_tei() -> None:
    """Tags as TEI publishes them, and the guide's table names the same."""
    [version] = re.findall(r"^ARG TEI_VERSION=(.+)$", DOCKERFILE, re.M)
    tags = {variant: tag for tag, variant in re.findall(r"^FROM \S+:(\S+) AS tei-(\w+)$", DOCKERFILE, re.M)}
    assert tags.keys() == {"default", "cpu", "89", "hopper"}
    assert "\nFROM tei-89 AS tei-ada\n" in DOCKERFILE
    for variant, tag in tags.items():
        prefix = "" if variant == "default" else f"{variant}-"
        assert tag == f"{prefix}${{TEI_VERSION}}-grpc"
        assert re.search(rf"^\| `{variant}`.*\| `{prefix}{version}-grpc` \|", GUIDE, re.M), variant


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read_string(UNIT)
    service = unit["Service"]
    assert int(service["TimeoutStopSec"]) == STOP_SECS
    for hiding in ("PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock"):
        assert hiding not in service, f"{hiding} hides the GPUs"
    if shutil.which("systemd-analyze"):
        file = tmp_path / "tei-appliance.service"
        file.write_text(UNIT.replace("/opt/tei-appliance/bin/appliance", f"{Path(sys.executable).parent}/appliance"))
        found = subprocess.run(["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True)
        assert (found.returncode, found.stderr) == (0, "")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.M | re.S)


def documents(key: str, value: str | None = None) -> dict[str, Any]:
    """The guide's only YAML document that has the key, and there the value."""
    found = [document for block in blocks("yaml") for document in yaml.safe_load_all(block)]
    [fitting] = [document for document in found if key in document and value in (None, document[key])]
    return dict(fitting)


def test_commands_and_configurations_of_the_guide_can_be_read() -> None:
    assert len(blocks("sh")) >= 4
    for block in blocks("sh"):
        subprocess.run(["sh", "-n"], input=block, text=True, check=True)
    for text in (*blocks("toml"), documents("kind", "ConfigMap")["data"]["appliance.toml"]):
        assert settings.parse(tomllib.loads(text), {}, {}, "/data").instances


def test_the_guides_compose_file_fits_the_image() -> None:
    service = documents("services")["services"]["appliance"]
    assert service["volumes"][0].endswith(f":{image_has('VOLUME')}")
    assert service["ports"] == [f"127.0.0.1:{port}:{port}" for port in image_has("EXPOSE").split()]
    assert service["stop_grace_period"] == f"{STOP_SECS}s"
    assert f"--stop-timeout {STOP_SECS} " in GUIDE
    assert STOP_SECS >= GRACE_SECS + 10


def test_the_guides_deployment_fits_the_image() -> None:
    pod = documents("kind", "Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    security = pod["securityContext"]
    assert f"{security['runAsUser']}:{security['runAsGroup']}" == image_has("USER")
    assert security["fsGroup"] == security["runAsGroup"]
    assert " ".join(str(port["containerPort"]) for port in container["ports"]) == image_has("EXPOSE")
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {image_has("VOLUME"), "/tmp"}
    assert pod["terminationGracePeriodSeconds"] == STOP_SECS
    config = settings.parse(tomllib.loads(documents("kind", "ConfigMap")["data"]["appliance.toml"]), {}, {}, "/data")
    nothing: Any = None
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/ready", "port": "rest"}
        # Also after the first key was made: who sends these has none.
        need = control.need_of(control.router(nothing, nothing), "GET", container[probe]["httpGet"]["path"])
        assert access.effective(need, config.open_health) is access.Need.OPEN
