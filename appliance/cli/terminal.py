"""What the command line prints: tables, with colours on a terminal; JSON for programs; progress while it waits."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

GREEN, YELLOW, RED, DIM = "32", "33", "31", "2"
COLOURS = {
    **dict.fromkeys(("running", "healthy", "ready", "verified", "downloaded", "ok"), GREEN),
    **dict.fromkeys(("starting", "stopping", "downloading", "loading", "degraded", "warning"), YELLOW),
    **dict.fromkeys(("unhealthy", "failed", "wrong"), RED),
    **dict.fromkeys(("stopped", "available"), DIM),
}
BAR_WIDTH = 30
Say = Callable[[str], None]
GAP, NARROWEST = "  ", 12  # between columns; characters of the last one at least


def say(line: str) -> None:
    print(line, flush=True)


def say_all(lines: Iterable[str]) -> None:
    for line in lines:
        say(line)


def say_json(value: Any) -> None:
    say(json.dumps(value, indent=2))


def coloured(word: str, width: int = 0) -> str:
    """A status in its colour on a terminal, padded to ``width`` before."""
    colour = COLOURS.get(word)
    padded = word.ljust(width)
    wanted = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return f"\x1b[{colour}m{padded}\x1b[0m" if colour and wanted else padded


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str], wide: int | None = None) -> str:
    """Rows as aligned text; absent values as a dash.

    wide: characters of a line at most, by default those of the terminal; elsewhere nothing is cut off. The last column
    gives way.
    """
    cells = [[name.upper() for name in columns]]
    cells += [[readable(row[name]) for name in columns] for row in rows]
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    if wide is None and sys.stdout.isatty():
        wide = shutil.get_terminal_size().columns
    if wide is not None:
        widths[-1] = min(widths[-1], max(NARROWEST, wide - sum(widths[:-1]) - len(GAP) * (len(widths) - 1)))
        for line in cells:
            line[-1] = shortened(line[-1], widths[-1])
    return "\n".join(GAP.join(map(coloured, line, widths)).rstrip() for line in cells)


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def readable(value: Any) -> str:
    """A value of REST as people read it; a dash for none."""
    if value is None or value in ([], {}):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(readable, value))
    if isinstance(value, dict):
        return " ".join(f"{key}={readable(each)}" for key, each in value.items())
    return str(value)


def duration(secs: float | None) -> str | None:
    """Seconds as people say them, in two units at most: `42 s`, `3 min`, `1 h 20 min`, `12 d 4 h`."""
    if secs is None:
        return None
    minutes, hours, days = (int(secs // each) for each in (60, 3600, 86400))
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{int(secs)} s"


def size(count: int | None) -> str | None:
    """Bytes as people read them."""
    if count is None:
        return None
    amount, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while amount >= 1000 and len(units) > 1:
        amount, units = amount / 1000, units[1:]
    return f"{amount:.0f} {units[0]}" if amount >= 100 or units[0] == "B" else f"{amount:.1f} {units[0]}"


def progress_bar(
    done: int, total: int | None, words: str = "", unit: Callable[[int | None], str | None] = size
) -> None:
    """Progress on a terminal's standard error, in one line; nothing elsewhere. unit: how a number is said."""
    if not sys.stderr.isatty():
        return
    filled = BAR_WIDTH * done // total if total else 0
    of_all = f"{unit(done)} of {unit(total)}" if total else unit(done)
    sys.stderr.write(f"\r\x1b[K[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {of_all} {words}")
    sys.stderr.flush()


def job_progress_bar(progress: dict[str, Any]) -> None:
    """That of a job, as REST tells it."""
    left = f", {progress['eta_secs']:.0f} s left" if progress.get("eta_secs") else ""
    rate = f" {size(progress['bytes_per_sec'])}/s" if progress.get("bytes_per_sec") else ""
    words = f"{progress.get('step', '')}{rate}{left}"
    progress_bar(progress.get("bytes_done") or 0, progress.get("bytes_total"), words)


def clear_progress_bar() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
