"""What is wrong with the machine under the appliance, looked for now. `/health` shows it, the monitor journals it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from appliance.core import conditions
from appliance.core.conditions import HINTS, Condition
from appliance.core.events import Event
from appliance.core.instance import PROGRAMS
from appliance.core.problems import Problem
from appliance.core.status import Process
from appliance.drivers import disk, keysfile, nvml
from appliance.node.authentication import config_path, keys_path
from appliance.node.context import Node

NODE_VARIABLE = "TEI_APPLIANCE_NODE"  # which all programs of an appliance have
SILENT_SECS = 15.0  # without a word from the monitor


def present(node: Node) -> dict[Event, str]:
    """The message of each condition that holds now; of several with one event, the last."""
    return {condition.event: condition.message for condition in looked_for(node)}


def looked_for(node: Node) -> Iterator[Condition]:
    for folder in {node.folder, Path(node.settings.state_file).parent, Path(node.settings.log_dir)}:
        if is_yet_to_come(node, folder):
            continue
        if error := disk.refusal(folder):
            yield conditions.from_error(error, f"Cannot write to {folder}")
    for file in (node.state, node.models):
        try:
            file.read()
        except Problem as problem:
            yield Condition(Event.STATE_UNREADABLE, problem.message)
    for path in (keys_path(node.settings), config_path()):
        if path and (why := keysfile.read_error(path)):
            yield Condition(Event.KEYS_UNREADABLE, f"{why}; {HINTS[Event.KEYS_UNREADABLE]}")
    if keysfile.is_lost(lost := keys_path(node.settings)):
        message = (
            f"{lost} is missing, and no key of it counts: put it back, or make new ones with `appliance keys create`"
        )
        yield Condition(Event.KEYS_UNREADABLE, message)
    for device in nvml.devices():
        if device.error:
            message = f"GPU {device.index} ({device.uuid}) does not answer: {device.error}"
            yield Condition(Event.GPU_LOST, message)


def is_yet_to_come(node: Node, folder: Path) -> bool:
    """Whether the first start makes the folder. To a program of the appliance one that is missing is gone."""
    was_started = NODE_VARIABLE in os.environ or Path(node.layout.supervisord_conf).exists()
    return not was_started and not os.path.lexists(folder)


def programs_down(node: Node, table: Sequence[Process]) -> dict[str, str]:
    """``program_down`` with what there is to do, where one of our own programs was stopped, or does not stay up."""
    down = [
        each for each in table if each.group in PROGRAMS and (each.was_stopped or each.state in ("FATAL", "BACKOFF"))
    ]
    words = [f"{each.name} is {each.state.lower()}: {remedy(node, each)}" for each in down]
    return {"program_down": "; ".join(words)} if words else {}


def remedy(node: Node, program: Process) -> str:
    """What to do about a program that does not run."""
    if program.state not in ("STOPPED", "FATAL"):  # supervisord goes on with it
        return f"look into {node.layout.log(program.name)}"
    why = "somebody stopped it" if program.state == "STOPPED" else f"mend what {node.layout.log(program.name)} says"
    full_name = program.name if program.group == program.name else f"{program.group}:{program.name}"
    return f"{why}: supervisorctl -c {node.layout.supervisord_conf} start {full_name}"


def monitor_silence(node: Node, table: Sequence[Process]) -> dict[str, str]:
    """``monitor_silent`` with its message, where the monitor runs, or should, and has written nothing for a while."""
    monitor = next((process for process in table if process.name == "monitor"), None)
    if monitor and monitor.uptime is not None and monitor.uptime < SILENT_SECS:
        return {}
    written_at = node.health.written_at()
    silent = abs(time.time() - written_at) if written_at else None  # from tomorrow: the clock was set back since
    if silent is not None and silent < SILENT_SECS:
        return {}
    since = f"for {silent:.0f} s" if silent is not None else "yet"
    return {"monitor_silent": f"The monitor has not written what it sees {since}: see its log, monitor.log"}
