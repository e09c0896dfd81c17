"""Machines of a cluster of Ray: namespaces of the network, the processes and the mounts, because Ray takes every Ray
that it finds on its machine for its own. Needs root and `.venv-ray`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import psutil

from appliance.node.directory import read_listing
from testing.machines import Machine, Space

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-ray" / "bin" / "python"
# Ray has its sockets in the one and its shared memory in the other.
OWN_FOLDERS = 'mkdir -p /tmp/ray && mount -t tmpfs ray /tmp/ray && mount -t tmpfs shm /dev/shm && "$@"'
NODE_ARGS = ["--num-cpus", "8", "--object-store-memory", "100000000"]


class RayMachine(Machine):
    """An appliance with a part in a cluster. role: head, node, or empty for one that only calls."""

    def __init__(self, space: Space, folder: Path, head: str, role: str, labels: str = "", **options: Any) -> None:
        arguments = NODE_ARGS + (["--labels", labels] if labels else [])
        own = {
            "head": f'ray_role = "head"\nray_address = "{space.address}"\nray_start_args = {arguments}\n',
            "node": f'ray_role = "node"\nray_head = "{head}"\nray_address = "{space.address}"\n'
            f"ray_start_args = {arguments}\n",
            "": f'directory = "ray:{head}:8266"\n',
        }[role]
        options.setdefault("seeds", "")
        options["settings"] = own + options.get("settings", "")
        super().__init__(space, folder, **options)

    def command(self, *arguments: str) -> list[str]:
        own = [str(PYTHON), "-m", "appliance", "--config", str(self.config), *arguments]
        inside = ["ip", "netns", "exec", self.space.name]
        if arguments != ("up",):
            return [*inside, *own]
        spaces = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
        return [*inside, *spaces, "sh", "-c", OWN_FOLDERS, "sh", *own]

    def stop(self, number: int = 2) -> int:
        """The signal is for `up` itself, below `unshare` and `sh`."""
        assert self.process is not None
        if self.process.poll() is None:
            for shell in psutil.Process(self.process.pid).children():
                for up in shell.children():
                    os.kill(up.pid, number)
        return self.process.wait(timeout=60)

    def listed(self, name: str) -> list[str]:
        """The addresses of an instance's replicas, as this machine knows them."""
        listing = read_listing(self.folder / "listing.toml")
        return [str(address) for each in listing if each.name == name for address in each.addresses]

    def pids(self, words: str) -> list[int]:
        """Of the processes of this machine whose command line has these words."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.space.name], check=True, capture_output=True, text=True
        ).stdout
        return [int(pid) for pid in listed.split() if words in command_line(int(pid))]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
