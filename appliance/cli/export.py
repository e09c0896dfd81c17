"""`appliance export`: the instances as configuration, a front for several appliances, or all of it for Kubernetes."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

import tomli_w

from appliance.cli import kubernetes_flags
from appliance.cli.command import with_control
from appliance.cli.terminal import say, say_json
from appliance.core.front import Box, Front, pair_of
from appliance.core.instance import CHECKS
from appliance.core.settings import Settings

if TYPE_CHECKING:
    from appliance.cli.control_client import ControlClient

FILES = {
    "--cert": "the certificate that it shows to callers (PEM)",
    "--key": "its key",
    "--client-ca": "callers need a certificate of this authority",
    "--boxes-ca": "the appliances have TLS, with certificates of this authority",
    "--client-cert": "the certificate that it shows to them",
    "--client-key": "its key",
}


def export_front(arguments: argparse.Namespace, settings: Settings) -> int:
    """A front for several appliances."""
    from appliance.export import envoy_front, nginx_front

    front = front_of(arguments, settings)
    if arguments.program == "nginx":
        say(nginx_front.render(front).rstrip())
    else:
        say_json(envoy_front.bootstrap(front))
    return 0


@with_control
def export_instances(arguments: argparse.Namespace, control: ControlClient) -> int:
    """Every instance as `[[instances]]` of a configuration file, or as JSON."""
    instances = control.instances()
    entries = [{key: each[key] for key in CHECKS if each[key] not in (None, [])} for each in instances]
    if arguments.json:
        say_json(entries)
    else:
        say(tomli_w.dumps({"instances": entries}).rstrip())
    return 0


def export_ray(arguments: argparse.Namespace, settings: Settings) -> int:
    """The instances on a cluster of Ray Serve."""
    from appliance.cli import export_ray

    return export_ray.export_ray(arguments, settings)


def front_of(arguments: argparse.Namespace, settings: Settings) -> Front:
    """Raises: Problem invalid."""
    paths = {flag: getattr(arguments, flag.strip("-").replace("-", "_")) for flag in FILES}
    absolute = {flag: os.path.abspath(path) if path else "" for flag, path in paths.items()}
    return Front(
        boxes=tuple(Box.parse(text, settings) for text in arguments.boxes),
        listen=arguments.listen,
        grpc_port=arguments.listen_grpc_port or settings.grpc_port,
        http_port=arguments.listen_http_port or settings.http_port,
        largest_message=settings.grpc_max_message_bytes,
        timeout_secs=settings.grpc_request_timeout_secs,
        own=pair_of(absolute["--cert"], absolute["--key"], "--cert and --key"),
        client_ca_file=absolute["--client-ca"],
        boxes_ca_file=absolute["--boxes-ca"],
        boxes_name=arguments.boxes_name,
        client=pair_of(absolute["--client-cert"], absolute["--client-key"], "--client-cert and --client-key"),
    )


def add_parsers(verbs: Any, add_command: Any) -> None:
    """Add the command of this module."""
    about = "print all instances as [[instances]] of a configuration file, for Kubernetes, or a front for appliances"
    exported = add_command(verbs, "export", export_instances, about)
    programs = exported.add_subparsers(metavar="PROGRAM")
    for program in ("nginx", "envoy"):
        front = add_command(
            programs, program, export_front, f"one address for several appliances, as {program} reads it"
        )
        front.set_defaults(program=program)
        place = "HOST[:GRPC_PORT[:HTTP_PORT]]"
        front.add_argument("boxes", nargs="+", metavar=place, help="an appliance behind it; without ports, ours")
        front.add_argument("--listen", default="0.0.0.0", help="its address; default: all addresses of its machine")
        front.add_argument("--listen-grpc-port", type=int, metavar="PORT", help="default: our own grpc_port")
        front.add_argument("--listen-http-port", type=int, metavar="PORT", help="default: our own http_port")
        for flag, about_flag in FILES.items():
            front.add_argument(flag, default="", metavar="FILE", help=about_flag)
        front.add_argument("--boxes-name", default="", metavar="NAME", help="it is in the certificate of each of them")
    kubernetes_flags.add_parser(programs, add_command)
    about = "the instances as the configuration of Ray Serve"
    add_command(programs, "ray", export_ray, about)
