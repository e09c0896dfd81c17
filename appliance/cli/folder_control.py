"""The control that a command about one data folder talks to: that of this very folder, and no other."""

from __future__ import annotations

import time
from pathlib import Path

from appliance.cli.connection import reachable_host
from appliance.cli.control_client import ControlClient
from appliance.core.addresses import address
from appliance.core.problems import Kind, Problem
from appliance.core.settings import Settings
from appliance.drivers import ports
from appliance.files.sockets import answers

STARTING_SECS = 10.0  # that control may need beside a supervisord that answers
POLL_SECS = 0.1


def control_of_folder(settings: Settings) -> ControlClient | None:
    """Control of this very data folder; None where it is down. Raises: Problem when another appliance has its port.

    Its socket lies in the folder, which proves it. A user who may not look into the folder comes over TCP, with a key.
    """
    from appliance.node.context import Node

    node, path, until = Node.at(settings), Path(settings.layout.control_socket), time.monotonic() + STARTING_SECS
    while True:
        try:
            if answers(path):
                return ControlClient.through_socket(path)
        except PermissionError:
            return ControlClient.from_settings(settings)
        if not node.supervisor.answers():
            break
        if time.monotonic() > until:
            words = f"The appliance in {node.folder} is up, but its control does not answer"
            raise Problem(Kind.UNAVAILABLE, "UNREACHABLE", f"{words}: look into {settings.layout.log('control')}")
        time.sleep(POLL_SECS)
    host = reachable_host(settings.bind)
    if ports.answers(host, settings.api_port):
        raise Problem(
            Kind.CONFLICT,
            "OTHER_APPLIANCE",
            f"Who answers on {address(host, settings.api_port)} is not the appliance of {node.folder}. Nothing "
            "changed: name its data folder or its configuration (TEI_MANAGER_DATA_DIR, --config), or run this in its "
            "container",
        )
    return None
