"""Machines on one machine: network namespaces with addresses of their own, whose cables can be pulled. Needs root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub
from testing.running import RunningAppliance

NETWORK = "10.213.47"
OURS = f"{NETWORK}.254"


def possible() -> bool:
    """Whether this user may make network namespaces here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", "tei-probe"], capture_output=True)
    subprocess.run(["ip", "netns", "del", "tei-probe"], capture_output=True)
    return made.returncode == 0


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


class Network:
    """A switch, to which machines are connected."""

    def __init__(self) -> None:
        self.switch = f"tei{os.getpid() % 100_000}"
        self.stack = ExitStack()

    def __enter__(self) -> Network:
        ip("link", "add", self.switch, "type", "bridge")
        self.stack.callback(ip, "link", "del", self.switch)
        ip("addr", "add", f"{OURS}/24", "dev", self.switch)
        ip("link", "set", self.switch, "up")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stack.close()

    def space(self, number: int) -> Space:
        """A namespace with the address that ends with ``number``."""
        space = Space(self.switch, number)
        self.stack.callback(ip, "netns", "del", space.name)
        return space


class Space:
    """A network namespace. Its loopback is its own, too."""

    def __init__(self, switch: str, number: int) -> None:
        self.name = f"{switch}-{number}"
        self.address = f"{NETWORK}.{number}"
        self.cable = f"{switch}c{number}"
        ip("netns", "add", self.name)
        ip("link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("link", "set", self.cable, "master", switch, "up")
        for words in (
            ("addr", "add", f"{self.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("-n", self.name, *words)

    def pull_cable(self) -> None:
        ip("link", "set", self.cable, "down")

    def plug_cable(self) -> None:
        ip("link", "set", self.cable, "up")

    def kill_all(self) -> None:
        """As if its power had failed."""
        for pid in ip("netns", "pids", self.name).split():
            with suppress(ProcessLookupError):  # the first process of a namespace takes the others along
                os.kill(int(pid), signal.SIGKILL)


class Machine(RunningAppliance):
    """An appliance in a namespace, called from ours."""

    def __init__(self, space: Space, folder: Path, **options: Any) -> None:
        folder.mkdir()
        options["settings"] = f'bind = "0.0.0.0"\n{options.get("settings", "")}'
        super().__init__(folder, **options)
        self.space = space
        self.host = space.address
        self.url = f"http://{self.host}:{self.api_port}"

    def command(self, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self.space.name, *super().command(*arguments)]

    def stub(self) -> Any:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        return TeiMultiplexerStub(grpc.insecure_channel(f"{self.space.address}:{self.grpc_port}", options))
