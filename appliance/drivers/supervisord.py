"""supervisord over its unix socket.

Each call has a connection of its own: with one shared ServerProxy 200 of 800 calls from 8 threads failed, and a new
connection costs under 2 ms (supervisor 4.3.0). A fault that says that the wish is already fulfilled (already added, not
running, gone) counts as success. Each call has a timeout, so that a stopped supervisord is a Problem and not a hang.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import xmlrpc.client
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple
from xml.parsers.expat import ExpatError

from supervisor.xmlrpc import Faults

from appliance.core.problems import Kind, Problem
from appliance.core.status import Process, ProcessRow
from appliance.files.procfs import STARTED, status_fields
from appliance.files.sockets import connected

CALL_TIMEOUT_SECS = 10.0
# It does not listen, or ends while it answers, or is no supervisord.
UNANSWERED = (OSError, http.client.HTTPException, xmlrpc.client.Error, ExpatError, ValueError)
UNABLE = {
    Faults.SHUTDOWN_STATE: "supervisord is shutting down or starting anew: try again, or start the appliance",
    Faults.UNKNOWN_METHOD: "supervisord runs another release of the appliance: stop the appliance, and start it again",
}
POLL_SECS = 0.05
NO_GROUP = "-"  # no name of a group begins so
EXTENSION = "appliance"  # the name under which supervisord has `drivers.supervisord_extension`
TICKS_PER_SEC = os.sysconf("SC_CLK_TCK")
# How supervisor's `spawnerr` begins when not the start failed but the process ended (4.3): before its startsecs, after.
TOO_QUICKLY, BAD_CODE = "Exited too quickly", "Bad exit code"


class Difference(NamedTuple):
    """Names of groups: what the configuration files have and supervisord does not run as they say."""

    added: list[str]
    changed: list[str]
    removed: list[str]


class MemberDifference(NamedTuple):
    """The same of one group: names of its processes."""

    added: list[str]
    changed: list[str]
    removed: list[str]


class UnixTransport(xmlrpc.client.Transport):
    """Connects each call to the unix socket at ``path``; the host is ignored."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("localhost", timeout=CALL_TIMEOUT_SECS)
        connection.auto_open = 0  # a new connection would go to localhost itself
        connection.sock = connected(self.path, CALL_TIMEOUT_SECS)
        self._connection = host, connection  # the base class closes what it finds here
        return connection


class Supervisor:
    """The supervisord that listens on ``socket_path``. Groups are instances, processes are replicas."""

    def __init__(self, socket_path: str | Path) -> None:
        self.socket_path = str(socket_path)

    def call(self, method: str, *arguments: Any, holds: tuple[int, ...] = (), of: str = "supervisor") -> Any:
        """One XML-RPC call. holds: the faults that say that the wish is already fulfilled; the answer is then None.
        of: the name under which supervisord has the method.

        Raises: Problem unavailable when supervisord does not answer, internal for any other fault.
        """
        transport = UnixTransport(self.socket_path)
        try:
            with xmlrpc.client.ServerProxy("http://localhost/RPC2", transport=transport) as proxy:
                return getattr(getattr(proxy, of), method)(*arguments)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode in holds:
                return None
            if why := UNABLE.get(fault.faultCode):
                raise Problem(Kind.UNAVAILABLE, "BACKEND_UNAVAILABLE", why) from fault
            raise Problem(
                Kind.INTERNAL, "INTERNAL_ERROR", f"supervisord refused {method}{arguments}: {fault.faultString}"
            ) from fault
        except UNANSWERED as error:
            raise Problem(
                Kind.UNAVAILABLE,
                "BACKEND_UNAVAILABLE",
                f"supervisord does not answer on {self.socket_path} ({error}): is the appliance up?",
            ) from error

    def processes(self) -> list[Process]:
        return self.table_of("")

    def process(self, group: str, name: str) -> Process | None:
        return next(iter(self.members(group, [name])), None)

    def members(self, group: str, names: Collection[str]) -> list[Process]:
        """Those of these processes of a group that supervisord knows."""
        return [each for each in self.table_of(group) if each.name in names]

    def table_of(self, group: str) -> list[Process]:
        """The processes of one group; of all where it is empty."""
        return [process_of(ProcessRow(*row)) for row in json.loads(self.call("processes", group, of=EXTENSION))]

    def difference(self) -> Difference:
        """Let supervisord read its include file again, and tell how that differs from what it runs."""
        return Difference(*self.call("reread", of=EXTENSION))

    def add(self, group: str) -> None:
        """Start to supervise a group. This starts its programs with autostart."""
        self.call("addProcessGroup", group, holds=(Faults.ALREADY_ADDED, Faults.BAD_NAME))

    def remove(self, group: str, timeout: float) -> None:
        """Stop a group, wait until its processes have ended, and cease to supervise it.

        timeout: seconds; only a backstop, since supervisord kills a process after its stopwaitsecs.
        Raises: Problem when the group has not stopped within ``timeout``.
        """
        deadline = time.monotonic() + timeout
        while True:
            # Repeated each time: supervisord may restart a process that has just died before it obeys.
            self.call("stopProcessGroup", group, False, holds=(Faults.BAD_NAME,))
            if self.call("removeProcessGroup", group, holds=(Faults.BAD_NAME, Faults.STILL_RUNNING)):
                return
            if not any(process.group == group for process in self.processes()):
                return
            if time.monotonic() > deadline:
                raise stuck(group, timeout)
            time.sleep(POLL_SECS)

    def member_difference(self, group: str) -> MemberDifference:
        """How the processes of a group differ from the configuration that `difference` let supervisord read."""
        difference = self.call("member_difference", group, holds=(Faults.BAD_NAME,), of=EXTENSION)
        return MemberDifference(*(difference or ([], [], [])))

    def add_member(self, group: str, name: str) -> None:
        """Start to supervise one more process of a group; the others stay."""
        self.call("add_member", group, name, holds=(Faults.ALREADY_ADDED, Faults.BAD_NAME), of=EXTENSION)

    def remove_members(self, group: str, names: Collection[str], timeout: float) -> None:
        """Stop some processes of a group, wait until they have ended, and cease to supervise them. timeout, Raises: as
        for `remove`."""
        deadline, left = time.monotonic() + timeout, list(names)
        while left:
            for name in left:
                self.stop(group, name)
            left = [name for name in left if not self.forget_member(group, name)]
            if left and time.monotonic() > deadline:
                raise stuck(f"{group}:{left[0]}", timeout)
            if left:
                time.sleep(POLL_SECS)

    def forget_member(self, group: str, name: str) -> bool:
        """Cease to supervise a process if it has ended; whether supervisord knows it no more."""
        if self.call("remove_member", group, name, holds=(Faults.BAD_NAME, Faults.STILL_RUNNING), of=EXTENSION):
            return True
        return self.process(group, name) is None

    def start(self, group: str, process: str, timeout: float) -> None:
        """Start one process of a group. A process that is being stopped must end first: until then supervisor ignores a
        start (4.3). timeout: seconds to wait for that."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.call("startProcess", f"{group}:{process}", False, holds=(Faults.ALREADY_STARTED, Faults.BAD_NAME))
            present = self.process(group, process)
            if present is None or present.state not in ("STOPPING", "STOPPED"):
                return
            time.sleep(POLL_SECS)

    def stop(self, group: str, process: str) -> None:
        """Stop one process of a group, without waiting."""
        self.call("stopProcess", f"{group}:{process}", False, holds=(Faults.NOT_RUNNING, Faults.BAD_NAME))

    def signal(self, group: str, process: str, name: str) -> None:
        """Send a signal to one process, if it runs."""
        self.call("signalProcess", f"{group}:{process}", name, holds=(Faults.NOT_RUNNING, Faults.BAD_NAME))

    def send_event(self, kind: str, data: str) -> None:
        """Send an event to supervisor's event listeners. Events may be lost."""
        self.call("sendRemoteCommEvent", kind, data)

    def require(self) -> None:
        """Raises: Problem unavailable unless supervisord answers, is not shutting down, and has this extension."""
        self.table_of(NO_GROUP)

    def pid(self) -> int:
        """The process id of supervisord itself, of whatever release. Raises: Problem."""
        return int(self.call("getPID"))

    def answers(self) -> bool:
        """Whether it does, of whatever release, and is not shutting down."""
        try:
            return bool(self.call("getState")["statename"] == "RUNNING")
        except Problem:
            return False

    def stop_all(self) -> None:
        """Ask all processes to stop, at once and without waiting."""
        self.call("stopAllProcesses", False)

    def shutdown(self) -> None:
        """Ask supervisord to stop everything and end."""
        self.call("shutdown", holds=(Faults.SHUTDOWN_STATE,))


def stuck(what: str, timeout: float) -> Problem:
    words = f'Processes of "{what}" did not stop within {timeout:.0f} s; supervisord keeps trying'
    return Problem(Kind.UNAVAILABLE, "BACKEND_UNAVAILABLE", words)


def process_of(row: ProcessRow) -> Process:
    error = row.spawn_error
    # For a process that ended before its startsecs supervisor says 0, whatever its exit status was.
    has_status = row.stopped > 0 and (not error or error.startswith(BAD_CODE))
    return Process(
        group=row.group,
        name=row.name,
        state=row.state,
        pid=row.pid or None,
        exit_status=row.exit_status if has_status else None,
        spawn_error="" if error.startswith((TOO_QUICKLY, BAD_CODE)) else error,
        started=row.started,
        now=row.now,
        age=age_of(row.pid) if row.pid else None,
    )


def age_of(pid: int) -> float | None:
    """Seconds since a process was started; None when the kernel does not show it. Takes some 20 us.

    The kernel counts from boot, so a change of the clock does not matter.
    """
    try:
        ticks = int(status_fields(pid)[STARTED])
    except (OSError, ValueError, IndexError):
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / TICKS_PER_SEC
