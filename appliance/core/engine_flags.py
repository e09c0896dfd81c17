"""The command line of the embedded engine: TEI's own flags, so that an instance differs only in the binary (TEI 1.9).

Control reads it, too: what the engine would refuse is refused when an instance is created, not by a process that dies
again and again. Flags that have no meaning here are accepted, and the engine says in its log that it ignores them.
"""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Sequence
from typing import Any, NoReturn

from appliance.core.problems import Problem, invalid
from appliance.core.servable import RUNTIMES

IGNORED = {
    "--dense-path": "the Dense modules of modules.json are computed",
    "--disable-spans": "the engine has no spans",
    "--otlp-endpoint": "the engine sends no traces",
    "--otlp-service-name": "the engine sends no traces",
    "--payload-limit": "grpc_max_message_size_mb of the appliance counts",
    "--cors-allow-origin": "the gateway answers HTTP",
    "--hf-token": "the appliance downloads models, with HF_TOKEN of its environment",
    "--hf-api-token": "the appliance downloads models, with HF_TOKEN of its environment",
    "--served-model-name": "clients name the instance",
    "--uds-path": "the engine is one process",
    "--api-key": "the appliance's own keys count",
}
SWITCHES = ("--disable-spans",)


class FlagParser(argparse.ArgumentParser):
    """Raises a Problem where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise invalid(message)


def boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is not true or false")
    return text == "true"


def positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def address(text: str) -> str:
    """An IP literal. TEI listens on 0.0.0.0 for anything else; here it is refused."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an IP address") from None


def parser(add_help: bool) -> FlagParser:
    flags = FlagParser(prog="appliance.engine", description=__doc__, allow_abbrev=False, add_help=add_help)
    flags.add_argument("--model-id", required=True, help="hub id, local folder, or installed model package")
    flags.add_argument("--revision", help="hub revision; the default is what the cache holds as main")
    flags.add_argument("--hostname", type=address, default="0.0.0.0", help="IP address to listen on")
    flags.add_argument("--port", "-p", type=port, default=3000, help="gRPC port")
    flags.add_argument("--prometheus-port", type=port, default=9000, help="HTTP port of /metrics and /health")
    flags.add_argument("--max-concurrent-requests", type=positive, default=512, help="texts in work at once")
    flags.add_argument("--max-batch-tokens", type=positive, default=16384, help="tokens of one batch")
    flags.add_argument("--max-batch-requests", type=positive, help="texts of one batch")
    flags.add_argument("--max-client-batch-size", type=positive, default=32, help="texts of one Rerank call")
    flags.add_argument(
        "--tokenization-workers", type=positive, help="reported; each call is tokenized in its own thread"
    )
    flags.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16", "int8"), help="what to compute in; default float32"
    )
    flags.add_argument("--pooling", choices=("cls", "mean", "splade", "last-token"), help="default: from the model")
    flags.add_argument("--auto-truncate", nargs="?", type=boolean, const=True, default=True)
    flags.add_argument("--default-prompt-name", help="key of the model's prompts")
    flags.add_argument("--default-prompt", help="text put in front of every input")
    flags.add_argument("--huggingface-hub-cache", help="hub cache folder; default as huggingface_hub has it")
    flags.add_argument("--json-output", action="store_true", help="log JSON lines")
    ignored = flags.add_argument_group("flags that are accepted and ignored")
    for name, why in IGNORED.items():
        kind: dict[str, Any] = {"action": "store_true"} if name in SWITCHES else {"action": "append"}
        ignored.add_argument(name, help=why, **kind)
    own = flags.add_argument_group("flags that TEI does not have")
    own.add_argument("--runtime", choices=RUNTIMES, default=RUNTIMES[0], help="openvino and torch are extras")
    own.add_argument("--threads", type=positive, help="default: the cores, shared by the engines of this appliance")
    own.add_argument("--arrival-order", action="store_true", help="batch in order of arrival, as TEI does; to compare")
    return flags


def parse(arguments: Sequence[str] | None, add_help: bool = True) -> argparse.Namespace:
    """The flags of a process, or of this one. Raises: Problem for a wrong one."""
    parsed = parser(add_help).parse_args(arguments)
    if parsed.default_prompt is not None and parsed.default_prompt_name is not None:
        raise invalid("--default-prompt and --default-prompt-name exclude each other")
    return parsed


def of_instance(model_id: str, extra_args: Sequence[str]) -> argparse.Namespace:
    """What the engine would read in extra_args. Raises: Problem that names the field and the flag."""
    try:
        return parse(["--model-id", model_id, *extra_args], add_help=False)
    except Problem as problem:
        raise invalid(f'Field "extra_args": the embedded engine refuses it: {problem.message}') from None


def ignored(parsed: argparse.Namespace) -> dict[str, str]:
    """The flags that were given and have no effect, and why."""
    return {name: why for name, why in IGNORED.items() if getattr(parsed, name[2:].replace("-", "_"))}
