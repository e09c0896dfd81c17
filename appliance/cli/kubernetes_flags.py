"""The flags of `appliance export kubernetes`. What it does is imported when it runs: no other command needs that."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.core.kubernetes import ACCESS_MODES
from appliance.core.settings import Settings

TEI = "ghcr.io/huggingface/text-embeddings-inference"
TEI_VERSION = "1.9.3"  # as in the Dockerfile


def command(arguments: argparse.Namespace, settings: Settings) -> int:
    """The instances on a Kubernetes cluster, and a front for them."""
    from appliance.cli.export_kubernetes import export_kubernetes

    return export_kubernetes(arguments, settings)


def positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 10_000):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 10000")
    return int(text)


def add_parser(programs: Any, add_command: Any) -> None:
    """Add the command below `export`."""
    about = "the instances as objects of a Kubernetes cluster, with a front for them"
    parser = add_command(programs, "kubernetes", command, about)
    parser.add_argument(
        "-o", "--output", default="", metavar="DIR", help="a file for each object, for kubectl apply -k"
    )
    names = parser.add_argument_group("where")
    names.add_argument("--namespace", default="tei-appliance", metavar="NAME", help="default: %(default)s")
    names.add_argument("--image", default="tei-appliance:cpu", help="of this appliance; default: %(default)s")
    names.add_argument("--tei-image", default=f"{TEI}:{TEI_VERSION}-grpc", metavar="IMAGE", help="with a GPU")
    names.add_argument("--tei-cpu-image", default=f"{TEI}:cpu-{TEI_VERSION}-grpc", metavar="IMAGE", help="without")
    names.add_argument("--storage", default="50Gi", metavar="SIZE", help="for all models; default: %(default)s")
    names.add_argument("--storage-class", default="", metavar="NAME", help="default: the cluster's")
    names.add_argument("--access-mode", default=ACCESS_MODES[0], choices=ACCESS_MODES, help="default: %(default)s")
    instances = parser.add_argument_group("instances")
    instances.add_argument("--engine", choices=("tei", "embedded"), help="default: as each is served here")
    instances.add_argument(
        "--gpus",
        default="named",
        choices=("named", "all"),
        help="who gets one: instances that name GPUs, or all of TEI's",
    )
    instances.add_argument(
        "--memory", default="4Gi", metavar="SIZE", help="asked for each replica; default: %(default)s"
    )
    instances.add_argument(
        "--max-replicas", type=positive, default=0, metavar="N", help="KEDA adds replicas up to N while texts wait"
    )
    instances.add_argument("--from-zero", action="store_true", help="an instance without calls has no replica")
    instances.add_argument(
        "--prometheus", default="http://prometheus.monitoring:9090", metavar="URL", help="what KEDA asks; %(default)s"
    )
    instances.add_argument("--hub-secret", default="", metavar="NAME", help="its key `token` is HF_TOKEN of downloads")
    front = parser.add_argument_group("front")
    front.add_argument("--front-replicas", type=positive, default=2, metavar="N", help="default: %(default)s")
    front.add_argument(
        "--gateway", default="", metavar="[NAMESPACE/]NAME", help="of the Gateway API, with grpc and http"
    )
    front.add_argument(
        "--callers", action="append", default=[], metavar="NAMESPACE", help="may call it; its own may, too"
    )
    front.add_argument(
        "--monitoring-namespace", dest="monitoring", default="monitoring", metavar="NAME", help="of Prometheus"
    )
    front.add_argument("--tls-secret", default="", metavar="NAME", help="with tls.crt, tls.key and ca.crt")
    front.add_argument("--keys-secret", default="", metavar="NAME", help="with keys.toml")
