"""Bringing the whole appliance up and down: checks, the files supervisord needs, and supervisord itself.

`up` stays in the foreground as supervisord's parent: it says when things are ready, hands signals on, and when
supervisord ends, for whatever reason, no process of the cast is left behind.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from appliance.cli.client import Multiplexer, reachable
from appliance.core.problems import Kind, Problem, invalid
from appliance.core.program import SCRUBBED_VARIABLES
from appliance.core.settings import ENVIRONMENT, Settings, address
from appliance.drivers import configfile, logs, ports, processes
from appliance.drivers.configfile import CONFIG_VARIABLE
from appliance.drivers.tls import ONLY_TLS_1_3
from appliance.node import overview
from appliance.node.authentication import Authenticator
from appliance.node.context import Node
from appliance.operations import instances, supervision

LONGEST_SOCKET_PATH = 100  # sockaddr_un has 108 bytes, and supervisord first binds a name with its pid appended
READY_POLL_SECS = 0.1
WHERE = ("bind", "api_port", "grpc_port", "http_port", "data_dir")  # settings by which the command line finds us
LOOPBACKS = ("127.0.0.1", "::1", "localhost")
STOP_MARGIN_SECS = 5  # of supervisord's patience with the multiplexer, on top of what that gives to calls
Say = Callable[[str], None]


def template() -> Path:
    """etc/supervisord.conf: in the source tree, or where the wheel put it."""
    source = Path(__file__).parent.parent.parent / "etc" / "supervisord.conf"
    return source if source.exists() else Path(sys.prefix) / "etc" / "tei-appliance" / "supervisord.conf"


def refuse_unless_free(node: Node) -> None:
    """Raises: Problem when a port is taken, or a path cannot work."""
    socket = node.layout.supervisor_socket
    if len(socket.encode()) > LONGEST_SOCKET_PATH:
        raise invalid(f"data_dir is too long for a unix socket: {socket} has over {LONGEST_SOCKET_PATH} bytes")
    for port, key in node.settings.own_ports.items():
        if ports.busy([port], node.settings.bind):
            raise invalid(
                f"Port {port} ({key}) on {node.settings.bind} is in use by another program: stop it, or set {key} or "
                f"{next(name for name, knob in ENVIRONMENT.items() if knob == key)} to a free port",
                "PORT_CONFLICT",
            )


def prepare(node: Node, say: Say) -> None:
    """Folders, leftovers of an earlier supervisord, seeds, and the two files that supervisord reads.

    Raises: Problem; that of a state that cannot be used before anything is touched.
    """
    for file in (node.state, node.models):
        file.read()
    try:
        node.folder.mkdir(parents=True, exist_ok=True)
        Path(node.settings.log_dir).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(template(), node.layout.supervisord_conf)
        node.health.forget()  # or the monitor takes all processes of before for dead
        # A certificate that cannot be used is said here, and not in the log of three programs.
        Authenticator.of(node.settings).keys.begin()
    except OSError as error:
        raise invalid(f"Cannot prepare data_dir {node.folder}: {error}") from error
    supervision.end_leftovers(node)
    refuse_unless_free(node)
    instances.seed(node)
    for name, instance in node.state.read().instances.items():
        if instance.wanted == "running":
            try:
                instances.leave_taken_ports(node, name)
            except Problem as problem:  # of one instance; the others can run
                say(f"  {problem.message}")
    supervision.write_sections(node)


def environment(node: Node, environ: Mapping[str, str]) -> dict[str, str]:
    """What supervisord hands down: the caller's variables without those that TEI reads as flags, and our own."""
    kept = {key: value for key, value in environ.items() if key not in SCRUBBED_VARIABLES}
    settings = node.settings
    ours = {variable: getattr(settings, name) for variable, name in ENVIRONMENT.items()}
    return {
        **kept,
        **(ONLY_TLS_1_3 if settings.tls.min_version == "1.3" else {}),
        **{variable: str(value) for variable, value in ours.items() if value != ""},
        "TEI_APPLIANCE_PYTHON": sys.executable,
        "TEI_APPLIANCE_NODE": node.id,
        "TEI_APPLIANCE_STOP_SECS": str(settings.graceful_shutdown_timeout_secs + STOP_MARGIN_SECS),
        "TEI_APPLIANCE_MULTIPLEXERS": str(settings.workers(os.cpu_count() or 1)),
    }


def bring_up(node: Node, environ: Mapping[str, str], say: Say) -> int:
    """Run the appliance until a signal or `appliance down`. Returns the exit status."""
    asked_to_stop: list[int] = []
    # Before anything is started: a Ctrl-C in the middle must not leave supervisord behind.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: asked_to_stop.append(number))
    with only_one(node):
        prepare(node, say)
        if asked_to_stop:
            return 0
        command = [sys.executable, "-m", "supervisor.supervisord", "-c", node.layout.supervisord_conf]
        # A group of its own: Ctrl-C reaches us alone, and we pass one orderly TERM on.
        supervisord = subprocess.Popen(command, env=environment(node, environ), process_group=0)
        announce(node, environ, supervisord, asked_to_stop, say)
        status = ended(node, supervisord, asked_to_stop)
        if left := supervision.end_leftovers(node):
            say(f"Ended {len(left)} process(es) that supervisord left behind")
    if status:
        for line in logs.tail(Path(node.layout.log("supervisord")), 10):
            say(line)
        say(f"supervisord ended with status {status}")
        return 1
    say("Stopped; no process is left")
    return 0


@contextmanager
def only_one(node: Node) -> Iterator[None]:
    """The right to bring up this data folder. Raises: Problem when it is up, also when its supervisord is stuck."""
    lock = FileLock(node.layout.up_lock, timeout=0)
    try:
        node.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # logs may quote what callers sent
        lock.acquire()
    except Timeout:
        raise already_up(node, "another `appliance up` holds it") from None
    except OSError as error:
        reason = error.strerror or error
        raise invalid(
            f"Cannot write to data_dir {node.folder}: {reason}. It must belong to user {os.geteuid()}, "
            "whom this runs as"
        ) from error
    try:
        if pid := supervisord_pid(node):
            raise already_up(node, f"supervisord runs as process {pid}")
        yield
    finally:
        lock.release()


def already_up(node: Node, how: str) -> Problem:
    return Problem(
        Kind.CONFLICT,
        "ALREADY_UP",
        f"The appliance in {node.folder} is up already ({how}): see `appliance status`, or end it with "
        "`appliance down`",
    )


def supervisord_pid(node: Node) -> int | None:
    """The living supervisord of this data folder, whether it answers or not."""
    try:
        pid = int(Path(node.layout.supervisord_pid).read_text())
    except (OSError, ValueError):
        return None
    return pid if processes.runs(pid, node.layout.supervisord_conf) else None


def ended(node: Node, supervisord: subprocess.Popen[bytes], stopping: list[int]) -> int:
    """Wait for supervisord's end, passing the first signal on; returns its exit status."""
    while True:
        try:
            return supervisord.wait(timeout=READY_POLL_SECS)
        except subprocess.TimeoutExpired:
            if stopping:
                break
    try:
        # By itself supervisord stops one group after the other.
        node.supervisor.stop_all()
    except Problem:
        pass  # it may just be starting; the signal stops it all the same
    supervisord.send_signal(signal.SIGTERM)
    while True:
        try:
            return supervisord.wait(timeout=READY_POLL_SECS)
        except subprocess.TimeoutExpired:
            # supervisord (4.3) sees once a second that a process ended; a question wakes it.
            node.supervisor.answers()


def announce(
    node: Node, environ: Mapping[str, str], supervisord: subprocess.Popen[bytes], stopping: list[int], say: Say
) -> None:
    """Say what is where, which instance is ready when, and what to try."""
    settings, began = node.settings, time.monotonic()
    say(f"tei-appliance is starting in {node.folder}")
    warn_if_open(node, say)
    programs = {
        "control": (settings.api_port, "REST"),
        "multiplexer": (settings.grpc_port, "gRPC"),
        "gateway": (settings.http_port, "HTTP inference, /docs"),
    }
    waiting = {name for name, instance in node.state.read().instances.items() if instance.wanted == "running"}
    ready: list[str] = []
    multiplexer = Multiplexer(f"unix:{settings.layout.multiplexer_socket(0)}")
    while supervisord.poll() is None and not stopping and (programs or waiting):
        time.sleep(READY_POLL_SECS)
        if programs:
            # supervisord (4.3) starts its programs a second after itself; a question wakes it.
            node.supervisor.answers()
        for program, (port, speaks) in list(programs.items()):
            if ports.answers(settings.bind, port):
                say(f"  {program:<12} {address(settings.bind, port)}  {speaks}")
                del programs[program]
        for name in sorted(waiting):
            found = seen(node, name)
            if found.get("status") == "running" and not multiplexer.answers(name):
                continue  # its port is open; the multiplexer connects within the next moment
            if found.get("status") == "running":
                say(f"  {name:<12} ready after {time.monotonic() - began:.1f} s, serves {found['model_id']}")
                ready.append(name)
            if found.get("status") in ("failed", "stopped"):
                say(f"  {name:<12} {found['status']}: {found['last_error']}")
            if found.get("status") in ("running", "failed", "stopped"):
                waiting.discard(name)
    if ready and not stopping:
        invite(settings, environ, ready[0], say)


def warn_if_open(node: Node, say: Say) -> None:
    """Everybody on the network may do everything: that is said loudly."""
    settings = node.settings
    if settings.bind in LOOPBACKS or Authenticator.of(settings).on:
        return
    message = (
        f"WARNING: bind = {settings.bind} and no authentication: whoever reaches this machine may start programs on "
        "it, read every text and delete every model. Make a key (appliance keys create NAME admin), or set [tls]"
    )
    say(message)
    node.journal.record("open_to_the_network", None, message)


def seen(node: Node, name: str) -> dict[str, Any]:
    try:
        return overview.show(node, name)
    except Problem:
        return {}  # supervisord is still starting, or the instance was deleted meanwhile


def invite(settings: Settings, environ: Mapping[str, str], name: str, say: Say) -> None:
    """Commands to copy into another terminal, whose variables may be others."""
    host = reachable(settings.bind)
    secure, key = settings.tls.on, Authenticator.of(settings).keys.current()[0]
    curl = "curl" + (" --globoff" if ":" in host else "")
    curl += f" --cacert {shlex.quote(settings.tls.cert_file)}" if secure else ""
    if settings.tls.require_client_cert:
        curl += ' --cert "$TEI_APPLIANCE_CERT" --key "$TEI_APPLIANCE_CERT_KEY"'
    curl += ' -H "Authorization: Bearer $TEI_APPLIANCE_KEY"' if key else ""

    def url(port: int, path: str) -> str:
        return shlex.quote(f"{'https' if secure else 'http'}://{address(host, port)}{path}")

    say("")
    say("Try, in another terminal:")
    say(f"  {curl} {url(settings.api_port, f'/instances/{name}')}")
    say(f"  {curl} {url(settings.http_port, '/v1/embeddings')} -H 'Content-Type: application/json' \\")
    say(f"""      -d '{json.dumps({"model": name, "input": "hello world"})}'""")
    say(f'  {own_command(settings, environ)} embed "hello world" --instance {name}')
    if not secure and not key:
        request = json.dumps({"target": {"instance_name": name}, "request": {"inputs": "hello world"}})
        endpoint = shlex.quote(address(host, settings.grpc_port))
        say(f"  grpcurl -plaintext -d '{request}' {endpoint} tei_multiplexer.v1.TeiMultiplexer/Embed")
    say("Ctrl-C stops everything.")
    say("")


def own_command(settings: Settings, environ: Mapping[str, str]) -> str:
    """Our command line, with what this appliance was told that a new terminal does not know."""
    config = environ.get(CONFIG_VARIABLE, "")
    bare = {key: environ[key] for key in ("HOME", "PATH") if key in environ} | {CONFIG_VARIABLE: config}
    try:
        known = asdict(configfile.load(bare))
    except Problem:  # without flags and variables its settings contradict themselves
        known = {}
    variables = {each: name for each, name in ENVIRONMENT.items() if name in WHERE}
    told = [
        f"{each}={shlex.quote(str(getattr(settings, name)))}"
        for each, name in variables.items()
        if getattr(settings, name) != known.get(name)
    ]
    flag = ["--config", shlex.quote(config)] if config else []
    return " ".join([*told, shlex.quote(str(Path(sys.executable).parent / "appliance")), *flag])


def bring_down(node: Node, say: Say) -> int:
    """Stop the appliance of this data folder and wait until nothing of it runs."""
    node.supervisor.require()
    node.supervisor.stop_all()
    node.supervisor.shutdown()
    patience = time.monotonic() + node.settings.graceful_shutdown_timeout_secs + supervision.REPLACE_GRACE_SECS
    while Path(node.supervisor.socket_path).exists() and time.monotonic() < patience:
        time.sleep(READY_POLL_SECS)
        node.supervisor.answers()  # so that it sees at once which processes ended
    supervision.end_leftovers(node)
    say("Stopped; no process is left")
    return 0
