"""Through which socket the gateway reaches a multiplexer: by the number that supervisord has given it, and no other."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from filelock import FileLock
from supervisor.options import ServerOptions

from appliance.core.settings import Settings
from testing.running import free_ports

CONF = Path(__file__).parents[2] / "etc" / "supervisord.conf"


@pytest.mark.processes
def test_the_gateway_finds_a_multiplexer_whose_place_for_metrics_somebody_else_has(tmp_path: Path) -> None:
    """A process that was left over, or a scrape that just looked at the place."""
    (tmp_path / "metrics").mkdir()
    environ = {
        **os.environ,
        "TEI_MANAGER_DATA_DIR": str(tmp_path),
        "TEI_MANAGER_GRPC_PORT": str(free_ports(1)[0]),
    }
    *_, last = map(Path, Settings(data_dir=str(tmp_path), multiplexer_workers=3).multiplexer_sockets(cores=1))
    with FileLock(tmp_path / "metrics" / "multiplexer-0.lock"), (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-m", "appliance.multiplexer", "2"]
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        try:
            channel = grpc.insecure_channel(f"unix:{last}", [("grpc.max_reconnect_backoff_ms", 100)])
            grpc.channel_ready_future(channel).result(timeout=20)
            channel.close()
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
    assert last.name == "multiplexer-2.sock"


def test_supervisord_gives_each_multiplexer_its_number(tmp_path: Path) -> None:
    options = ServerOptions()
    options.environ_expansions |= {
        "ENV_TEI_MANAGER_LOG_DIR": str(tmp_path),
        "ENV_TEI_APPLIANCE_PYTHON": "python",
        "ENV_TEI_APPLIANCE_NODE": "b0b0b0",
        "ENV_TEI_APPLIANCE_STOP_SECS": "10",
        "ENV_TEI_APPLIANCE_MULTIPLEXERS": "3",
        "ENV_TEI_APPLIANCE_LOG_BYTES": "1000000",
        "ENV_TEI_APPLIANCE_LOG_BACKUPS": "3",
    }
    options.realize(["-n", "-c", str(CONF)])
    (group,) = [group for group in options.process_group_configs if group.name == "multiplexer"]
    commands = [config.command for config in group.process_configs]
    assert commands == [f'"python" -m appliance.multiplexer {number}' for number in range(3)]
