"""What `appliance up` says while the appliance starts: what listens where, what is ready when, and what to try."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from appliance.cli.connection import reachable_host
from appliance.cli.terminal import Say
from appliance.core.addresses import address
from appliance.core.events import Event
from appliance.core.problems import Problem
from appliance.core.settings import ENVIRONMENT, Settings
from appliance.drivers import configfile, ports
from appliance.drivers.configfile import CONFIG_VARIABLE
from appliance.node import overview, servable
from appliance.node.authentication import Authenticator, is_open_to_the_network
from appliance.node.context import Node

POLL_SECS = 0.1
ADDRESS_SETTINGS = ("bind", "api_port", "grpc_port", "http_port", "data_dir")  # by which the command line finds us


class AnnouncedPort(NamedTuple):
    program: str
    port: int
    speaks: str


class Announcement:
    """What was said so far of one start. Instances are said to be ready when a call reaches them."""

    def __init__(self, node: Node, say: Say) -> None:
        from appliance.cli.multiplexer_client import MultiplexerClient

        settings = node.settings
        self.node, self.say = node, say
        self.began = time.monotonic()
        self.ports_due = [
            AnnouncedPort("control", settings.api_port, "REST"),
            AnnouncedPort("multiplexer", settings.grpc_port, "gRPC"),
            AnnouncedPort("gateway", settings.http_port, "HTTP inference, /docs"),
        ]
        running = (name for name, instance in node.state.read().instances.items() if instance.wanted == "running")
        self.starting = sorted(running)
        self.ready: list[str] = []
        self.multiplexer = MultiplexerClient(f"unix:{settings.layout.multiplexer_socket(0)}")

    def follow(self, going: Callable[[], bool]) -> None:
        """Say what is new until all is said, or ``going`` says that the start has ended."""
        while going() and (self.ports_due or self.starting):
            time.sleep(POLL_SECS)
            if self.ports_due:
                # supervisord (4.3) starts its programs a second after itself; a question wakes it.
                self.node.supervisor.answers()
            self.ports_due = [port for port in self.ports_due if not self.listens(port)]
            self.starting = [name for name in self.starting if not self.has_started(name)]

    def listens(self, announced: AnnouncedPort) -> bool:
        bind = self.node.settings.bind
        if not ports.answers(bind, announced.port):
            return False
        self.say(f"  {announced.program:<12} {address(bind, announced.port)}  {announced.speaks}")
        return True

    def has_started(self, name: str) -> bool:
        """Whether the instance is ready or will not be, which is said."""
        try:
            instance = overview.show(self.node, name)
        except Problem:
            return False  # supervisord is still starting, or the instance was deleted meanwhile
        if instance.status == "running":
            if not self.multiplexer.answers(name):
                return False  # its port is open; the multiplexer connects within the next moment
            elapsed = time.monotonic() - self.began
            self.say(f"  {name:<12} ready after {elapsed:.1f} s, serves {instance.model_id}")
            self.ready.append(name)
            return True
        if instance.status in ("failed", "stopped"):
            self.say(f"  {name:<12} {instance.status}: {instance.last_error}")
            return True
        return instance.status == "sleeping"


def announce(node: Node, environ: Mapping[str, str], going: Callable[[], bool], say: Say) -> None:
    """Say how the start goes, while it does, and in the end which commands to try."""
    say(f"tei-appliance is starting in {node.folder}")
    warn_if_open(node, say)
    announcement = Announcement(node, say)
    announcement.follow(going)
    if announcement.ready and going():
        embedders = [name for name in announcement.ready if embeds(node, name)]
        invite(node.settings, environ, (embedders or announcement.ready)[0], bool(embedders), say)


def warn_if_open(node: Node, say: Say) -> None:
    """Where every caller on the network may do everything, `up` says so, and the journal keeps it."""
    if not is_open_to_the_network(node.settings):
        return
    message = (
        f"WARNING: bind = {node.settings.bind} and no authentication: whoever reaches this machine may start programs "
        "on it, read every text and delete every model. Make a key (appliance keys create NAME admin), or set [tls]"
    )
    say(message)
    node.journal.record(Event.OPEN_TO_THE_NETWORK, None, message)


def embeds(node: Node, name: str) -> bool:
    """Whether an instance gives vectors, as far as its model's folder tells."""
    instance = node.state.read().instances.get(name)
    card = servable.card_of(instance.spec) if instance else None
    return card is not None and card.task == "embedding"


def invite(settings: Settings, environ: Mapping[str, str], name: str, with_vectors: bool, say: Say) -> None:
    """Commands to copy into another terminal, whose environment may be another. with_vectors: the instance embeds."""
    host = reachable_host(settings.bind)
    secure, key = settings.tls.on, Authenticator.of(settings).keys.current()[0]
    curl = curl_command(settings, host, with_key=bool(key))

    def url(port: int, path: str) -> str:
        return shlex.quote(f"{'https' if secure else 'http'}://{address(host, port)}{path}")

    say("")
    say("Try, in another terminal:")
    say(f"  {curl} {url(settings.api_port, f'/instances/{name}')}")
    if with_vectors:
        say(f"  {curl} {url(settings.http_port, '/v1/embeddings')} -H 'Content-Type: application/json' \\")
        say(f"""      -d '{json.dumps({"model": name, "input": "hello world"})}'""")
        say(f'  {own_command(settings, environ)} embed "hello world" --instance {name}')
    else:
        say(f"  {curl} {url(settings.http_port, f'/instances/{name}/info')}")
    if with_vectors and not secure and not key:
        request = json.dumps({"target": {"instance_name": name}, "request": {"inputs": "hello world"}})
        endpoint = shlex.quote(address(host, settings.grpc_port))
        say(f"  grpcurl -plaintext -d '{request}' {endpoint} tei_multiplexer.v1.TeiMultiplexer/Embed")
    say("Ctrl-C stops everything.")
    say("")


def curl_command(settings: Settings, host: str, with_key: bool) -> str:
    command = "curl" + (" --globoff" if ":" in host else "")
    if settings.tls.on:
        command += f" --cacert {shlex.quote(settings.tls.cert_file)}"
    if settings.tls.require_client_cert:
        command += ' --cert "$TEI_APPLIANCE_CERT" --key "$TEI_APPLIANCE_CERT_KEY"'
    if with_key:
        command += ' -H "Authorization: Bearer $TEI_APPLIANCE_KEY"'
    return command


def own_command(settings: Settings, environ: Mapping[str, str]) -> str:
    """Our command line, with the settings of this appliance that a new terminal would not find by itself."""
    config = environ.get(CONFIG_VARIABLE, "")
    bare = {key: environ[key] for key in ("HOME", "PATH") if key in environ} | {CONFIG_VARIABLE: config}
    try:
        defaults = asdict(configfile.load(bare))
    except Problem:  # without flags and variables its settings contradict themselves
        defaults = {}
    assignments = [
        f"{variable}={shlex.quote(str(getattr(settings, name)))}"
        for variable, name in ENVIRONMENT.items()
        if name in ADDRESS_SETTINGS and getattr(settings, name) != defaults.get(name)
    ]
    flag = ["--config", shlex.quote(config)] if config else []
    return " ".join([*assignments, shlex.quote(str(Path(sys.executable).parent / "appliance")), *flag])
