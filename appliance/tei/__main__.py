"""`python -m appliance.tei BINARY FLAGS...`: run TEI, but not on files that are not those that were verified.

The REST API refuses such a start with words; this holds also when supervisord starts a process by itself. And TEI dies
of a --prometheus-port that is taken, after it has loaded the model (1.9): it gets another one.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from appliance.core.problems import Problem
from appliance.drivers import configfile, hub, ports
from appliance.node.integrity import CACHE_FLAG, CACHE_VARIABLE, refuse_changed


def with_usable_metrics_port(flags: list[str]) -> list[str]:
    """The flags, with another port for metrics where that of an instance cannot be bound; stderr has both."""
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    known.add_argument("--prometheus-port", type=int)
    known.add_argument("--hostname")
    given, rest = known.parse_known_args(flags)
    wanted, host = given.prometheus_port, given.hostname
    if wanted is None or host is None or not ports.busy([wanted], host):
        return flags
    (free,) = ports.unused(host, 1)
    print(f"Port {wanted} on {host} is taken: the metrics of this TEI are on port {free}", file=sys.stderr, flush=True)
    return [*rest, "--hostname", host, "--prometheus-port", str(free)]


def main() -> NoReturn:
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flags.add_argument("--model-id")
    flags.add_argument("--revision")
    flags.add_argument(CACHE_FLAG, dest="cache")
    given, _ = flags.parse_known_args(sys.argv[2:])
    try:
        refuse_changed(configfile.data_dir(os.environ), given.model_id, given.revision, given.cache)
    except Problem as problem:
        sys.exit(problem.message)
    binary = Path(sys.argv[1])
    os.environ[CACHE_VARIABLE] = str(hub.cache_folder())  # TEI does not know HF_HUB_CACHE; the flag counts more
    os.execv(binary, [str(binary), *with_usable_metrics_port(sys.argv[2:])])


if __name__ == "__main__":
    main()
