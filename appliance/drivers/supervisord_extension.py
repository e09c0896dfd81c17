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
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from supervisor.options import UnhosedConfigParser
from supervisor.states import STOPPED_STATES, SupervisorStates, getProcessStateDescription
from supervisor.xmlrpc import Faults, RPCError

from appliance.core.status import ProcessRow


class IncludeFile:
    """The groups of supervisord's include file at ``path``.

    Only what has changed is parsed: 100 programs take 50 ms, in which supervisord does nothing else. supervisord itself
    reads everything, as `reloadConfig` does, at first, after somebody else let it do so (`supervisorctl update`, which
    makes a list of its own), and while the file has anything but groups with their programs.
    """

    def __init__(self, path: str, options: Any) -> None:
        self.path, self.options = Path(path), options
        self.listed: list[Any] | None = None  # what `options` had after a reading that the next one may start from
        self.others: list[Any] = []  # of these, what the main file has
        self.by_text: dict[str, Any] = {}  # the groups of the include file, by the text that says each

    def read(self) -> None:
        """Raises: ValueError for what supervisord cannot read, OSError; nothing has changed then."""
        content, is_known = self.content(), self.options.process_group_configs is self.listed
        groups = self.groups(content, {each.name for each in self.others}) if is_known else None
        if groups is None:
            self.options.process_config(do_usage=False)
            self.by_text, self.listed = {}, None
            # Written meanwhile: which of the groups are whose is not known.
            if content != self.content() or (groups := self.groups(content)) is None:
                return
            names = {each.name for each in groups.values()}
            self.others = [each for each in self.options.process_group_configs if each.name not in names]
        self.by_text = groups
        self.options.process_group_configs = self.listed = [*self.others, *groups.values()]

    def content(self) -> str:
        return self.path.read_text(encoding="utf-8") if self.path.exists() else ""

    def groups(self, content: str, taken: Collection[str] = ()) -> dict[str, Any] | None:
        """The group of each text; None where anything else is in the file, or a name that is taken."""
        head, *texts = re.split(r"^(?=\[group:)", content, flags=re.MULTILINE)
        try:
            groups = {text: self.by_text.get(text) or self.group_of(text) for text in texts}
            has_more = bool(self.parsed(head).sections())
        except (ValueError, configparser.Error):
            return None  # supervisord has the words
        names = [each.name for each in groups.values()]
        return None if has_more or len({*names, *taken}) < len(texts) + len(taken) else groups

    def group_of(self, text: str) -> Any:
        """The only group of a text, as supervisord's own `read_config` makes it. Raises: ValueError, configparser.Error
        where there is anything else."""
        parser = self.parsed(text)
        (group,) = self.options.process_groups_from_parser(parser)
        if len(parser.sections()) != 1 + len(group.process_configs):
            raise ValueError("it has other sections")
        for process in group.process_configs:
            process.environment = {**self.options.configroot.supervisord.environment, **process.environment}
        return group

    def parsed(self, text: str) -> UnhosedConfigParser:
        parser = UnhosedConfigParser()
        parser.expansions = self.options.environ_expansions
        parser.read_string(text, str(self.path))
        parser.section_to_file = dict.fromkeys(parser.sections(), str(self.path))  # as errors name it
        parser.expand_here(self.options.here)
        return parser


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
        except (OSError, ValueError) as error:
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
        exit_status=process.exitstatus,
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


def make_extension(supervisord: Any, include_file: str, health_file: str) -> Extension:
    """What the configuration names as the factory of this extension, with the path of its include file, and of the file
    in which the monitor remembers processes.

    None of those lives: supervisord has just begun, or begun anew (`supervisorctl reload`). The next monitor would take
    each for one that died.
    """
    sys.stdout, sys.stderr = lenient(sys.stdout), lenient(sys.stderr)
    with suppress(OSError):
        Path(health_file).unlink(missing_ok=True)
    return Extension(supervisord, include_file)
