"""The TEI binary of this machine: whether it is there, and which flags it knows."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from functools import lru_cache

from appliance.core.problems import invalid, nearest, quoted

HELP_SECS = 10.0
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
HIDDEN = {"--hf-api-token"}  # flags that its help does not show (1.9)


def refuse_missing(binary: str) -> None:
    """Raises: Problem unless a program is at this path."""
    if not (os.path.isfile(binary) and os.access(binary, os.X_OK)):
        raise invalid(
            f"tei_binary_path {quoted(binary)} is no program on this machine: install text-embeddings-router there, or "
            "leave tei_binary_path out, and the embedded engine serves"
        )


def refuse_unknown_flags(binary: str, extra_args: Sequence[str]) -> None:
    """Raises: Problem for a flag that this TEI does not know: it would end at every start."""
    given = [argument.partition("=")[0] for argument in extra_args if argument.startswith("--")]
    if not given:
        return
    known = known_flags(binary, os.stat(binary).st_mtime_ns)
    for flag in given:
        if known and flag not in known | HIDDEN:
            raise invalid(
                f'Field "extra_args": {binary} does not know the flag {quoted(flag)}{nearest(flag, known)}; see its '
                "--help"
            )


@lru_cache(8)
def known_flags(binary: str, mtime_ns: int) -> frozenset[str]:
    """All flags that its help names; empty when that is not TEI's. mtime_ns: of the binary, whose new version is asked
    anew."""
    try:
        told = subprocess.run([binary, "--help"], capture_output=True, timeout=HELP_SECS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    flags = frozenset(FLAG.findall(told.stdout.decode(errors="replace")))
    return flags if "--model-id" in flags else frozenset()
