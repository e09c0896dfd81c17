"""How the appliance ends: with `appliance down`, with a signal to `appliance up`, or with supervisord's own end.

When supervisord ends, for whatever reason, `up` ends every process that it left behind.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from appliance.cli.standby import AWAITED
from appliance.cli.terminal import Say
from appliance.cli.terminal import say as say_line
from appliance.core.layout import CLUSTER
from appliance.core.problems import Kind, Problem
from appliance.core.program import CLUSTER_END_SECS
from appliance.core.settings import ENVIRONMENT, Settings
from appliance.drivers import configfile, logs
from appliance.drivers.configfile import CONFIG_VARIABLE
from appliance.node.context import Node
from appliance.operations import supervision

ENDING = "import sys; from appliance.cli.ending import main; sys.exit(main())"  # what `standby` becomes
POLL_SECS, FOLLOWER_SECS = 0.1, 2.0


@dataclass
class Supervisord:
    """The supervisord that is a child of this process. status: its exit status once it has ended."""

    pid: int
    status: int | None = None

    def ended(self) -> bool:
        if self.status is None:
            child, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if child else None
        return self.status is not None


def stand_by(node: Node, supervisord: Supervisord, follower: int | None, had_terminal: bool) -> None:
    """Become the small program that waits. The signals that it awaits are blocked already, in every thread.

    follower: the process that copies the logs to standard output.
    """
    python = sys.executable
    program = str(Path(__file__).with_name("standby.py"))
    standby = [python, "-I", "-S", program, str(supervisord.pid), "terminal" if had_terminal else "none"]
    # What it needs in the end comes from the environment: by then the configuration file may be another, or broken.
    ending = [python, "-c", ENDING, str(follower or 0), str(supervisord.pid)]
    os.execve(python, [*standby, *ending], {**os.environ, **exported(node.settings)})


def exported(settings: Settings) -> dict[str, str]:
    """The settings that have a variable, as the environment of our programs."""
    values = {variable: str(getattr(settings, name)) for variable, name in ENVIRONMENT.items()}
    return {variable: value for variable, value in values.items() if value}


def end(node: Node, supervisord: Supervisord, follower: int | None, say: Say) -> int:
    """Stop supervisord unless it has ended, and what it left behind. Returns the exit status of `up`."""
    if not supervisord.ended():
        stop(node, supervisord)
    if follower:
        end_follower(follower)
    if left := supervision.end_leftovers(node):
        say(f"Ended {len(left)} process(es) that supervisord left behind")
    if supervisord.status:
        for line in logs.tail(Path(node.layout.log("supervisord")), 10):
            say(line)
        say(f"supervisord ended with status {supervisord.status}")
        return 1
    say("Stopped; no process is left")
    return 0


def end_follower(pid: int) -> None:
    """It prints the last lines before ours; where nobody takes them, no longer than `FOLLOWER_SECS`."""
    deadline = time.monotonic() + FOLLOWER_SECS
    number = signal.SIGTERM
    try:
        while not os.waitpid(pid, os.WNOHANG)[0]:
            os.kill(pid, number)
            time.sleep(POLL_SECS)
            number = signal.SIGKILL if time.monotonic() > deadline else signal.SIGTERM
    except ChildProcessError:
        pass  # it had ended by itself, as nobody read any more: its number may be another's by now


def stop(node: Node, supervisord: Supervisord) -> None:
    """Stop it with all its programs, and wait."""
    try:
        # By itself supervisord stops one group after the other.
        node.supervisor.stop_all()
    except Problem:
        pass  # it may just be starting; TERM stops it all the same
    os.kill(supervisord.pid, signal.SIGTERM)
    while not supervisord.ended():
        time.sleep(POLL_SECS)
        # supervisord (4.3) sees once a second that a process ended; a question wakes it.
        node.supervisor.answers()


def bring_down(node: Node, say: Say) -> int:
    """Stop the appliance of this data folder, of whatever release, and wait until nothing of it runs."""
    node.supervisor.pid()
    # Replicas of a cluster move to other machines first.
    longest = CLUSTER_END_SECS if may_have_cluster(node) else 0
    node.supervisor.stop_all()
    node.supervisor.shutdown()
    grace = node.settings.graceful_shutdown_timeout_secs + supervision.REPLACE_GRACE_SECS
    deadline = time.monotonic() + grace + longest
    while Path(node.supervisor.socket_path).exists():
        if time.monotonic() > deadline:
            raise still_running(node)
        time.sleep(POLL_SECS)
        node.supervisor.answers()  # so that it sees at once which processes ended
    supervision.end_leftovers(node)
    say("Stopped; no process is left")
    return 0


def may_have_cluster(node: Node) -> bool:
    """A supervisord of another release does not say."""
    try:
        return any(each.group == CLUSTER for each in node.supervisor.processes())
    except Problem:
        return True


def still_running(node: Node) -> Problem:
    """For a process that not even KILL has ended, as one that waits for a GPU or a disk."""
    try:
        left = [each.name for each in node.supervisor.processes() if each.pid]
    except Problem:
        left = []
    words = f"The appliance is not down after {node.settings.graceful_shutdown_timeout_secs} s and more"
    running = f"{', '.join(left)} still run" if left else "supervisord does not end"
    return Problem(Kind.UNAVAILABLE, "BACKEND_UNAVAILABLE", f"{words}: {running}. Look again with `appliance status`")


def surviving(say: Say) -> Say:
    """The same while somebody reads; with nobody left (`up | head -1`, a closed terminal) the appliance goes on."""

    def said(line: str) -> None:
        try:
            say(line)
        except OSError:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    return said


def main() -> int:
    """What follows `standby`. Arguments: the process ids of the follower of the logs (or 0) and of supervisord, and the
    exit status of supervisord if it has ended."""
    for number in AWAITED:
        signal.signal(number, lambda number, frame: None)  # it ends already
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
    follower, pid, *status = map(int, sys.argv[1:])
    environ = {key: value for key, value in os.environ.items() if key != CONFIG_VARIABLE}
    return end(Node.at(configfile.load(environ)), Supervisord(pid, *status), follower, surviving(say_line))
