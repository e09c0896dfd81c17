"""What a command is: a function of its arguments and the settings.

The command line is one program for all commands, and few need what takes long to import: `requests` (50 ms), grpc
(50 ms), and what supervises (100 ms). So a command imports these when it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

from appliance.core.settings import Settings

if TYPE_CHECKING:
    from appliance.cli.control_client import ControlClient

Command = Callable[[argparse.Namespace, Settings], int]


def with_control(run: Callable[[argparse.Namespace, ControlClient], int]) -> Command:
    """A command that needs control, as one that takes the settings."""

    @wraps(run)
    def command(arguments: argparse.Namespace, settings: Settings) -> int:
        from appliance.cli.control_client import ControlClient

        return run(arguments, ControlClient.from_settings(settings))

    return command
