"""What is wrong with the machine under the appliance, looked for now. `/health` shows it, the monitor journals it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from appliance.core import conditions
from appliance.core.conditions import Condition
from appliance.core.problems import Problem
from appliance.core.status import Process
from appliance.drivers import disk, keysfile, nvml
from appliance.node.authentication import config_path, keys_path
from appliance.node.context import Node

SILENT_SECS = 15.0  # without a word from the monitor


def found(node: Node) -> dict[Condition, str]:
    """name -> message of each trouble."""
    named: dict[Condition, str] = {}
    for folder in {node.folder, Path(node.settings.state_file).parent, Path(node.settings.log_dir)}:
        if error := disk.refusal(folder):
            name, message = conditions.named(error, f"Cannot write to {folder}")
            named[name] = message
    for file in (node.state, node.models):
        try:
            file.read()
        except Problem as problem:
            named["state_unreadable"] = problem.message
    for path in (keys_path(node.settings), config_path()):
        if path and (why := keysfile.read_error(path)):
            named["keys_unreadable"] = f"{why}; {conditions.HINTS['keys_unreadable']}"
    for device in nvml.devices():
        if device.error:
            named["gpu_lost"] = f"GPU {device.index} ({device.uuid}) does not answer: {device.error}"
    return named


def silence(node: Node, table: Sequence[Process]) -> dict[str, str]:
    """The monitor runs, or should, and has not told what it sees for a while."""
    monitor = next((process for process in table if process.name == "monitor"), None)
    if monitor and monitor.uptime is not None and monitor.uptime < SILENT_SECS:
        return {}
    told = node.health.written_at()
    silent = abs(time.time() - told) if told else None  # from tomorrow: the clock was set back since
    if silent is not None and silent < SILENT_SECS:
        return {}
    since = f"for {silent:.0f} s" if silent is not None else "yet"
    return {"monitor_silent": f"The monitor has not written what it sees {since}: see its log, monitor.log"}
