"""An extension of supervisord: processes of a group come and go one by one, and the others stay.

supervisord (4.3) itself replaces a group as a whole where one of its sections differs. It loads this module
(`[rpcinterface:members]` of etc/supervisord.conf), and `drivers.supervisord` calls it as `members.*`. The include file
stays the only source: what is added is what `reloadConfig` has read there last. The project supervisor_twiddler does
the like, but takes the options of a program from its caller, and they would have to be told twice.
"""

from __future__ import annotations

import io
import sys
from typing import Any, TextIO

from supervisor.states import STOPPED_STATES
from supervisor.xmlrpc import Faults, RPCError


class Members:
    """Called in supervisord's only thread, between two of its rounds."""

    def __init__(self, supervisord: Any) -> None:
        self.supervisord = supervisord

    def difference(self, group: str) -> list[list[str]]:
        """The processes of a group that are added, changed and removed by the configuration that was read last."""
        now = {config.name: config for config in self.running(group).config.process_configs}
        new = {config.name: config for config in self.wanted(group).process_configs}
        return [
            [name for name in new if name not in now],
            [name for name in new if name in now and new[name] != now[name]],
            [name for name in now if name not in new],
        ]

    def add(self, group: str, name: str) -> bool:
        """Begin to supervise one more process, which starts it where it has autostart."""
        running = self.running(group)
        config = next((each for each in self.wanted(group).process_configs if each.name == name), None)
        if config is None:
            raise RPCError(Faults.BAD_NAME, f"{group}:{name}")
        if name in running.processes:
            raise RPCError(Faults.ALREADY_ADDED, f"{group}:{name}")
        config.create_autochildlogs()
        running.processes[name] = config.make_process(running)
        self.keep(running, [*running.config.process_configs, config])
        return True

    def remove(self, group: str, name: str) -> bool:
        """Cease to supervise a process that has stopped."""
        running = self.running(group)
        process = running.processes.get(name)
        if process is None:
            raise RPCError(Faults.BAD_NAME, f"{group}:{name}")
        if process.get_state() not in STOPPED_STATES:
            raise RPCError(Faults.STILL_RUNNING, f"{group}:{name}")
        del running.processes[name]
        self.keep(running, [each for each in running.config.process_configs if each.name != name])
        return True

    def keep(self, running: Any, configs: list[Any]) -> None:
        """In the order of the configuration, in which supervisord compares them; what it does not have comes last."""
        groups = self.supervisord.options.process_group_configs
        wanted = [each.name for one in groups if one.name == running.config.name for each in one.process_configs]
        running.config.process_configs = sorted(
            configs, key=lambda each: wanted.index(each.name) if each.name in wanted else len(wanted)
        )

    def running(self, group: str) -> Any:
        """Raises: RPCError for a group that is not supervised."""
        if group not in self.supervisord.process_groups:
            raise RPCError(Faults.BAD_NAME, group)
        return self.supervisord.process_groups[group]

    def wanted(self, group: str) -> Any:
        """The group as the configuration has it. Raises: RPCError for one that it does not have."""
        for config in self.supervisord.options.process_group_configs:
            if config.name == group:
                return config
        raise RPCError(Faults.BAD_NAME, group)


class LenientOutput(io.FileIO):
    """An output of supervisord. It prints there that it cannot write to its log, which ended it where the disk of both
    is full; and with it the appliance, because `up` ends what supervisord has left behind."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError:
            return len(content)


def lenient(output: TextIO) -> TextIO:
    raw = LenientOutput(output.fileno(), "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), errors="backslashreplace", line_buffering=True)


def make_members(supervisord: Any, **options: Any) -> Members:
    """What the configuration names as the factory of this extension."""
    sys.stdout, sys.stderr = lenient(sys.stdout), lenient(sys.stderr)
    return Members(supervisord)
