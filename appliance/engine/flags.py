"""The command line of the engine: TEI's own flags, so that an instance differs only in the binary (TEI 1.9)."""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Sequence

from appliance.engine.runtime import RUNTIMES


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


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(prog="appliance.engine", description=__doc__, allow_abbrev=False)
    flags.add_argument("--model-id", required=True, help="hub id, local folder, or installed model package")
    flags.add_argument("--revision", help="hub revision; the default is what the cache holds as main")
    flags.add_argument("--hostname", type=address, default="0.0.0.0", help="IP address to listen on")
    flags.add_argument("--port", "-p", type=port, default=3000, help="gRPC port")
    flags.add_argument("--prometheus-port", type=port, default=9000, help="HTTP port of /metrics and /health")
    flags.add_argument("--max-concurrent-requests", type=positive, default=512, help="texts in work at once")
    flags.add_argument("--max-batch-tokens", type=positive, default=16384, help="tokens of one batch")
    flags.add_argument("--max-batch-requests", type=positive, help="texts of one batch")
    flags.add_argument("--max-client-batch-size", type=positive, default=32, help="texts of one Rerank call")
    flags.add_argument("--tokenization-workers", type=positive, help="accepted; tokenizing runs in the call's thread")
    flags.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="what to compute in; default float32"
    )
    flags.add_argument("--pooling", choices=("cls", "mean", "splade", "last-token"), help="default: from the model")
    flags.add_argument("--auto-truncate", nargs="?", type=boolean, const=True, default=True)
    flags.add_argument("--default-prompt-name", help="key of the model's prompts")
    flags.add_argument("--default-prompt", help="text put in front of every input")
    flags.add_argument("--huggingface-hub-cache", help="hub cache folder; default as huggingface_hub has it")
    flags.add_argument("--json-output", action="store_true", help="log JSON lines")
    own = flags.add_argument_group("flags that TEI does not have")
    own.add_argument("--runtime", choices=RUNTIMES, default=RUNTIMES[0], help="openvino and torch are extras")
    own.add_argument("--threads", type=positive, help="default: the cores, shared by the engines of this appliance")
    own.add_argument("--arrival-order", action="store_true", help="batch in order of arrival, as TEI does; to compare")
    return flags


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of this process. Exits with status 2 on a wrong one, as TEI does."""
    flags = parser()
    parsed = flags.parse_args(arguments)
    if parsed.default_prompt is not None and parsed.default_prompt_name is not None:
        flags.error("--default-prompt and --default-prompt-name exclude each other")
    return parsed
