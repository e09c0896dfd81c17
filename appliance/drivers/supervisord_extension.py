"""An extension of supervisord: processes of a group come and go one by one, and many groups cost little.

supervisord (4.3) itself replaces a group as a whole where one of its sections differs, parses every section again where
one has changed, and tells of its processes in XML. It loads this module (`[rpcinterface:appliance]` of
etc/supervisord.conf), and `drivers.supervisord` calls it as `appliance.*`. The include file stays the only source: what
is added is what was read there last. The project supervisor_twiddler adds processes one by one, too, but takes the
options of a program from its caller, and they would have to be told twice.
"""

from __future__ import annotations

import configparser
import copy
import io
import json
import re
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from supervisor.options import UnhosedConfigParser
from supervisor.states import STOPPED_STATES, SupervisorStates, getProcessStateDescription
from supervisor.xmlrpc import Faults, RPCError

from appliance.core.status import ProcessRow


class IncludeFile:
    """The groups of supervisord's include file at ``path``.

    Only what has changed is parsed: 100 programs take 50 ms, in which supervisord does nothing else. Until another
    program lets supervisord itself read the configuration (`supervisorctl update`), which makes a list of its own.
    """

    def __init__(self, path: str, options: Any) -> None:
        self.path, self.options = Path(path), options
        self.configs: dict[str, list[Any]] = {}  # by the text that says them: a group with its programs
        self.listed: list[Any] | None = None  # what `options` had after it was read last

    def read(self) -> None:
        """Raises: ValueError and configparser.Error for what supervisord cannot read; nothing has changed then."""
        if self.options.process_group_configs is not self.listed:
            self.options.process_config(do_usage=False)
            self.configs = self.parsed()
        new = self.parsed()
        before, after = self.names(self.configs), [each for configs in new.values() for each in configs]
        others = [each for each in self.options.process_group_configs if each.name not in before]
        self.options.process_group_configs = self.listed = [*others, *after]
        self.configs = new

    def parsed(self) -> dict[str, list[Any]]:
        content = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        texts = re.split(r"^(?=\[group:)", content, flags=re.MULTILINE)
        return {text: self.configs.get(text) or self.groups_of(text) for text in texts}

    def groups_of(self, text: str) -> list[Any]:
        """As supervisord's own `read_config` makes them."""
        parser = UnhosedConfigParser()
        parser.expansions = self.options.environ_expansions
        parser.read_string(text, str(self.path))
        parser.expand_here(self.options.here)
        groups: list[Any] = self.options.process_groups_from_parser(parser)
        for process in (each for group in groups for each in group.process_configs):
            process.environment = {**self.options.configroot.supervisord.environment, **process.environment}
        return groups

    def names(self, configs: dict[str, list[Any]]) -> set[str]:
        return {each.name for groups in configs.values() for each in groups}


class Extension:
    """Called in supervisord's only thread, between two of its rounds."""

    def __init__(self, supervisord: Any, include_file: str) -> None:
        self.supervisord = supervisord
        self.include_file = IncludeFile(include_file, supervisord.options)

    def processes(self, group: str) -> str:
        """The processes of one group, none of one that is not supervised; of all where it is empty. A `ProcessRow` for
        each, as one JSON text: for 100 processes `getAllProcessInfo` has 1,400 values, which take Python 2 ms to write
        as XML and 14 ms to read."""
        self.refuse_while_it_ends()
        groups, now = self.supervisord.process_groups, time.time()
        shown = [groups[name] for name in sorted(groups) if group in ("", name)]
        rows = [row_of(each, one, now) for each in shown for _, one in sorted(each.processes.items())]
        return json.dumps(rows)

    def reread(self) -> list[list[str]]:
        """Read the include file again; the groups that are added, changed and removed by it, as `reloadConfig`."""
        self.refuse_while_it_ends()
        try:
            self.include_file.read()
        except (ValueError, configparser.Error) as error:
            raise RPCError(Faults.CANT_REREAD, str(error)) from error
        return [[each.name for each in kind] for kind in self.supervisord.diff_to_active()]

    def refuse_while_it_ends(self) -> None:
        if self.supervisord.options.mood < SupervisorStates.RUNNING:
            raise RPCError(Faults.SHUTDOWN_STATE)

    def member_difference(self, group: str) -> list[list[str]]:
        """The processes of a group that are added, changed and removed by the configuration that was read last."""
        now = {config.name: config for config in self.running(group).config.process_configs}
        new = {config.name: config for config in self.wanted(group).process_configs}
        return [
            [name for name in new if name not in now],
            [name for name in new if name in now and new[name] != now[name]],
            [name for name in now if name not in new],
        ]

    def add_member(self, group: str, name: str) -> bool:
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

    def remove_member(self, group: str, name: str) -> bool:
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
        running.config = copy.copy(running.config)  # the one that the include file was read into stays what it says
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


def row_of(group: Any, process: Any, now: float) -> ProcessRow:
    return ProcessRow(
        group=group.config.name,
        name=process.config.name,
        state=getProcessStateDescription(process.get_state()),
        pid=process.pid,
        spawn_error=process.spawnerr or "",
        exit_status=process.exitstatus or 0,
        started=process.laststart,
        stopped=process.laststop,
        now=now,
    )


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


def make_extension(supervisord: Any, include_file: str) -> Extension:
    """What the configuration names as the factory of this extension, with the path of its include file."""
    sys.stdout, sys.stderr = lenient(sys.stdout), lenient(sys.stderr)
    return Extension(supervisord, include_file)
