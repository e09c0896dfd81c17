"""Prometheus text of many replicas as one: each sample with the labels of its replica, each family once."""

from __future__ import annotations

import re
from collections.abc import Iterable

SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
PARTS = ("_bucket", "_sum", "_count", "_total", "_created")


def relabelled(texts: Iterable[tuple[dict[str, str], str]], prefix: str) -> str:
    """texts: (labels to add, Prometheus text). Families that do not begin with ``prefix`` are left out."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for labels, text in texts:
        added = ",".join(f'{key}="{value}"' for key, value in labels.items())
        for line in text.splitlines():
            if line.startswith("# "):
                _, kind, name, *_ = line.split(" ", 3)
                if name.startswith(prefix) and line not in heads.setdefault(name, []) and kind in ("HELP", "TYPE"):
                    heads[name].append(line)
            elif (found := SAMPLE.match(line)) and found[1].startswith(prefix):
                own = f",{found[2]}" if found[2] else ""
                samples.setdefault(family(found[1], heads), []).append(f"{found[1]}{{{added}{own}}} {found[3]}")
    return "".join(f"{line}\n" for name, lines in samples.items() for line in (*heads.get(name, ()), *lines))


def family(name: str, heads: dict[str, list[str]]) -> str:
    """The family of a sample: `x_bucket` belongs to `x`, where there is such a family."""
    for part in PARTS:
        if name.endswith(part) and name.removesuffix(part) in heads:
            return name.removesuffix(part)
    return name
