"""Bringing the whole appliance up: checks, the files supervisord needs, and supervisord itself.

`up` stays in the foreground as supervisord's parent: it says when things are ready, then waits as the small program
`standby`, and ends as `ending`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from appliance.cli.announcement import announce
from appliance.cli.ending import Supervisord, end, exported, stand_by, surviving
from appliance.cli.standby import AWAITED, STOPPING, has_terminal
from appliance.cli.terminal import Say
from appliance.core import generations, sleep
from appliance.core.problems import Kind, Problem, invalid, quoted
from appliance.core.program import LOG_VARIABLE, NO_REQUEST_LINES, SCRUBBED_VARIABLES
from appliance.core.settings import ENVIRONMENT
from appliance.drivers import ports, processes
from appliance.node import tei_binary
from appliance.node.authentication import Authenticator
from appliance.node.context import Node
from appliance.operations import instances, supervision, supply
from appliance.operations.moving_in import is_foreign, move_in

LONGEST_SOCKET_PATH = 100  # sockaddr_un has 108 bytes, and supervisord first binds a name with its pid appended
STOP_MARGIN_SECS = 5  # that supervisord waits for the multiplexer's end beyond what that gives to its calls


def supervisord_template() -> Path:
    """etc/supervisord.conf, in the source tree or where the wheel put it."""
    source = Path(__file__).parent.parent.parent / "etc" / "supervisord.conf"
    return source if source.exists() else Path(sys.prefix) / "etc" / "tei-appliance" / "supervisord.conf"


def refuse_unusable(node: Node) -> None:
    """What no change can mend. Raises: Problem for a path, an address or a binary that cannot be used."""
    socket = node.layout.supervisor_socket
    if len(socket.encode()) > LONGEST_SOCKET_PATH:
        raise invalid(f"data_dir is too long for a unix socket: {socket} has over {LONGEST_SOCKET_PATH} bytes")
    if binary := node.settings.tei_binary_path:
        tei_binary.refuse_missing(binary)
    if why := ports.refused_address(node.settings.bind):
        raise invalid(
            f"bind = {quoted(node.settings.bind)} is no address of this machine ({why}): use 127.0.0.1, or 0.0.0.0 for "
            "all addresses"
        )


def refuse_taken_ports(node: Node) -> None:
    """Raises: Problem when another program has one of our ports."""
    for port, key in node.settings.own_ports.items():
        if ports.busy([port], node.settings.bind):
            raise invalid(
                f"Port {port} ({key}) on {node.settings.bind} is in use by another program: stop it, or set {key} or "
                f"{next(name for name, knob in ENVIRONMENT.items() if knob == key)} to a free port",
                "PORT_CONFLICT",
            )


def prepare(node: Node, say: Say) -> None:
    """Make folders, end what an earlier supervisord left, create the seeds, and write the two files of supervisord.

    Raises: Problem. A state that cannot be used is found before anything is changed.
    """
    refuse_unusable(node)
    for file in (node.state, node.models):
        if file is node.models or not is_foreign(node):
            file.read()
    try:
        node.folder.mkdir(parents=True, exist_ok=True)
        Path(node.settings.log_dir).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(supervisord_template(), node.layout.supervisord_conf)
        # A certificate that cannot be used is reported here, and not in the logs of three programs.
        Authenticator.of(node.settings).keys.unseal_configuration()
    except OSError as error:
        raise invalid(f"Cannot prepare data_dir {node.folder}: {error}") from error
    supervision.end_leftovers(node)
    refuse_taken_ports(node)
    move_in(node, say)
    node.state.update(generations.without_predecessors)
    node.state.update(sleep.sleep_on_demand)
    instances.seed(node)
    find_models_and_ports(node, say)
    supervision.write_sections(node)


def find_models_and_ports(node: Node, say: Say) -> None:
    """Of each instance that shall run, before supervisord starts it; or say why it does not run, or not there."""
    if node.settings.is_cluster_head:  # they are on other machines
        return
    for name, instance in node.state.read().instances.items():
        if instance.wanted != "running":
            continue
        try:
            supply.supply(node, name)
        except Problem as problem:
            supply.hold_back(node, name, problem.message)
            say(f"  {name} does not start: {problem.message}")
        try:
            instances.leave_taken_ports(node, name)
        except Problem as problem:  # of one instance; the others can run
            if problem.code == "PORT_CONFLICT":  # not beside this one: it would have the port first
                raise
            say(f"  {problem.message}")


def supervisord_environment(node: Node, environ: Mapping[str, str]) -> dict[str, str]:
    """What all processes inherit: the caller's variables without those that TEI reads as flags, and our own."""
    kept = {key: value for key, value in environ.items() if key not in SCRUBBED_VARIABLES}
    settings = node.settings
    return {
        LOG_VARIABLE: NO_REQUEST_LINES,
        **kept,
        **settings.tls.environment,
        **exported(settings),
        "PYTHONSAFEPATH": "1",  # no module is imported from the folder in which somebody has started us
        "TEI_APPLIANCE_PYTHON": sys.executable,
        "TEI_APPLIANCE_LOG_BYTES": str(settings.log_bytes),
        "TEI_APPLIANCE_LOG_BACKUPS": str(settings.log_backups),
        "TEI_APPLIANCE_NODE": node.id,
        "TEI_APPLIANCE_STOP_SECS": str(settings.graceful_shutdown_timeout_secs + STOP_MARGIN_SECS),
        "TEI_APPLIANCE_MULTIPLEXERS": str(settings.workers(os.cpu_count() or 1)),
    }


def bring_up(node: Node, environ: Mapping[str, str], say: Say) -> int:
    """Run the appliance until a signal or `appliance down`. Returns the exit status."""
    say = surviving(say)
    signals: list[int] = []  # received so far, until they are blocked
    had_terminal = has_terminal()

    def received(number: int, frame: object) -> None:
        if number != signal.SIGHUP or (had_terminal and not has_terminal()):
            signals.append(number)

    # Handled before anything is started: a Ctrl-C in the middle must not leave supervisord behind.
    for number in (*STOPPING, signal.SIGHUP):
        signal.signal(number, received)
    with exclusive_up(node):
        prepare(node, say)
        if signals:
            return 0
        follower = start_follower(node) if node.settings.log_to != "files" else None
        supervisord = start_supervisord(node, environ)
        # Before a thread of gRPC begins, so that it blocks them, too: it took a Ctrl-C that came in the moment before
        # `standby`, and that was lost. From here on signals wait, through both programs.
        signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)

        def going() -> bool:
            waiting = signal.sigpending()
            hung_up = signal.SIGHUP in waiting and had_terminal and not has_terminal()
            return not signals and not hung_up and waiting.isdisjoint(STOPPING) and not supervisord.ended()

        announce(node, environ, going, say)
        if going():
            stand_by(node, supervisord, follower, had_terminal)
        return end(node, supervisord, follower, say)


def start_supervisord(node: Node, environ: Mapping[str, str]) -> Supervisord:
    command = [sys.executable, "-m", "supervisor.supervisord", "-c", node.layout.supervisord_conf]
    environment = supervisord_environment(node, environ)
    with open(node.layout.log("supervisord"), "ab") as log:
        # supervisord (4.3) prints where a client left it in the middle, and died of it when nobody read that any more.
        # In a process group of its own: Ctrl-C reaches `up` alone, which passes on one orderly TERM.
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, process_group=0)
    return Supervisord(process.pid)


def start_follower(node: Node) -> int:
    """The process that copies the logs to our standard output; returns its id."""
    program = str(Path(__file__).with_name("follow_logs.py"))
    return subprocess.Popen([sys.executable, "-I", "-S", program, node.layout.logs]).pid


@contextmanager
def exclusive_up(node: Node) -> Iterator[None]:
    """Held by the one `up` of this data folder. Raises: Problem when it is up, also when its supervisord is stuck."""
    try:
        node.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # logs may quote what callers sent
        lock = os.open(node.layout.up_lock, os.O_RDWR | os.O_CREAT, 0o600)
        os.set_inheritable(lock, True)  # by the programs that `up` becomes; this is why it is no FileLock
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise already_up(node, "another `appliance up` holds it") from None
    except (FileExistsError, NotADirectoryError):
        raise invalid(f"data_dir {node.folder} is no folder") from None
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
        os.close(lock)


def already_up(node: Node, how: str) -> Problem:
    return Problem(
        Kind.CONFLICT,
        "ALREADY_UP",
        f"The appliance in {node.folder} is up already ({how}): see `appliance status`, or end it with "
        "`appliance down`",
    )


def supervisord_pid(node: Node) -> int | None:
    """The process of this data folder's supervisord while it lives, whether it answers or not."""
    try:
        pid = int(Path(node.layout.supervisord_pid).read_text())
    except (OSError, ValueError):
        return None
    return pid if processes.runs(pid, node.layout.supervisord_conf) else None
