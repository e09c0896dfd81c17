"""nginx or Envoy with a configuration that `appliance export` wrote, as a process of the test's own."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from appliance.drivers import envoy
from testing.running import eventually, free_ports

# What Debian's nginx.conf has around its conf.d, without a user of its own and in the foreground.
NGINX = """daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
worker_processes 1;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/front.conf;
}}
"""


class RunningFront:
    """kind: "nginx" or "envoy"; arguments: of `appliance export` behind that."""

    def __init__(self, kind: str, folder: Path, *arguments: str) -> None:
        self.kind, self.folder = kind, folder
        self.grpc_port, self.http_port = free_ports(2)
        folder.mkdir()
        ports = (f"--listen-grpc-port={self.grpc_port}", f"--listen-http-port={self.http_port}")
        written = exported(kind, "--listen=127.0.0.1", *ports, *arguments)
        assert written.returncode == 0, written.stderr
        self.config = folder / ("front.conf" if kind == "nginx" else "front.json")
        self.config.write_text(written.stdout)
        with (folder / "out").open("wb") as out:
            self.process = subprocess.Popen(self.command(), stdout=out, stderr=out)

    def command(self) -> list[str]:
        if self.kind == "envoy":
            binary = envoy.binary()
            assert binary, "Envoy is needed: the extra `express`"
            return [str(part) for part in envoy.command(binary, self.config, 1)]
        nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
        assert nginx, "nginx is needed: run scripts/debian.sh nginx nginx, as make test does"
        around = self.folder / "nginx.conf"
        around.write_text(NGINX.format(folder=self.folder))
        return [nginx, "-p", str(self.folder), "-c", str(around)]

    def __enter__(self) -> "RunningFront":
        for port in (self.grpc_port, self.http_port):
            eventually(lambda port=port: socket.create_connection(("127.0.0.1", port)).close() is None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


def exported(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """`appliance export` with these arguments."""
    command = [sys.executable, "-m", "appliance", "export", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
