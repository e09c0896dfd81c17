"""Prometheus text: the texts of many replicas joined into one, and a replica's own counters read as its work."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from appliance.core.busy import Running, Work

# Where the embedded engine tells no more than what `work` reads; every other program answers with its whole page.
WORK_PATH = "/metrics?of=work"
OWN = re.compile(r"(te_\w+)(?:\{([^}\n]*)\})? (\S+)$")
BOUND = re.compile(r'le="([^"]+)"')
KINDS = ("embed", "predict")
# What `work` reads: one line in twelve of TEI's page. It is searched for in the whole page: to look at each line takes
# twice as long.
TOLD = re.compile(
    r"\n(te_(?:request_success|request_failure|batch_next_tokens_\w+|batch_running_\w+|batch_token_duration"
    rf"|(?:{'|'.join(KINDS)})_(?:count|success|inference_duration_(?:sum|count))))(?:\{{([^}}\n]*)\}})? (\S+)"
)
# TEI (1.9) counts these failures only for texts that it has begun; it counts "tokenization" for Tokenize calls, too.
ENDS = ("inference", "dropped")
PARTS = ("_bucket", "_sum", "_count", "_total", "_created")


class PagePart(NamedTuple):
    """What is shown of one page. heads: of each family, its HELP and TYPE lines; samples: its lines, each ended."""

    heads: dict[str, list[str]]
    samples: dict[str, str]


class JoinedPages:
    """One page of many. Families whose name does not begin with ``prefix`` are left out.

    The pages of 100 replicas have 57,000 lines, so a line is looked at by two regular expressions and little else, and
    a page that is as it was the last time, that of an idle replica, not at all.
    """

    def __init__(self, prefix: str) -> None:
        self.head = re.compile(rf"^# (?:HELP|TYPE) ({prefix}\S*) .*$", re.M)
        self.sample = re.compile(rf"^({prefix}[\w:]*)(?:\{{(.*)\}})? (\S+)$", re.M)
        self.seen: dict[str, tuple[str, PagePart]] = {}  # by labels: the page of the last time

    def text(self, pages: Iterable[tuple[dict[str, str], str]]) -> str:
        """pages: (labels to add, Prometheus text)."""
        heads: dict[str, list[str]] = {}
        samples: dict[str, list[str]] = {}
        seen: dict[str, tuple[str, PagePart]] = {}
        for labels, page in pages:
            added = ",".join(f'{key}="{value}"' for key, value in labels.items())
            before = self.seen.get(added)
            seen[added] = before if before and before[0] == page else (page, self.part(added, page))
            part = seen[added][1]
            for name, lines in part.heads.items():
                known = heads.setdefault(name, [])
                known += [line for line in lines if line not in known]
            for name, block in part.samples.items():
                samples.setdefault(name, []).append(block)
        self.seen = seen  # without those that were not asked for again
        return "".join(
            part
            for name, blocks in samples.items()
            for part in (*(f"{line}\n" for line in heads.get(name, ())), *blocks)
        )

    def part(self, added: str, page: str) -> PagePart:
        heads: dict[str, list[str]] = {}
        for found in self.head.finditer(page):
            heads.setdefault(found[1], []).append(found[0])
        samples: dict[str, list[str]] = {}
        of_name: dict[str, list[str]] = {}
        for name, own, value in self.sample.findall(page):
            lines = of_name.get(name)
            if lines is None:
                lines = of_name[name] = samples.setdefault(family(name, heads), [])
            lines.append(f"{name}{{{added},{own}}} {value}\n" if own else f"{name}{{{added}}} {value}\n")
        return PagePart(heads, {name: "".join(lines) for name, lines in samples.items()})


def family(name: str, heads: dict[str, list[str]]) -> str:
    """The family of a sample: `x_bucket` belongs to `x` if there is a family `x`."""
    for part in PARTS:
        if name.endswith(part) and name.removesuffix(part) in heads:
            return name.removesuffix(part)
    return name


def work(text: str) -> Work | None:
    """A replica's work by its own metrics; None for a text without a replica's metrics. Raises: ValueError."""
    text = f"\n{text}"
    if "\nte_" not in text:
        return None
    samples = [(name, labels, float(value)) for name, labels, value in TOLD.findall(text)]
    total: dict[str, float] = {}
    for name, _, value in samples:
        total[name] = total.get(name, 0.0) + value
    batches = {
        float(BOUND.findall(labels)[0]): value
        for name, labels, value in samples
        if name == "te_batch_next_tokens_bucket" and BOUND.search(labels)
    }
    failed = (value for name, labels, value in samples if name == "te_request_failure" and labels[5:-1] in ENDS)
    answered = sum(total.get(f"te_{kind}_success", 0.0) for kind in KINDS)
    running = [total.get(f"te_batch_running_{what}") for what in ("duration", "tokens")]
    return Work(
        answered=answered + total.get("te_request_success", 0.0),
        begun=sum(total.get(f"te_{kind}_count", 0.0) for kind in KINDS),
        ended=answered + sum(failed),
        batches=batches,
        token_secs=total.get("te_batch_token_duration") or token_secs(total, batches),
        running=None if None in running else Running(*running),  # type: ignore[arg-type]
    )


def token_secs(total: dict[str, float], batches: dict[float, float]) -> float | None:
    """Seconds of computing for each token, by the mean batch; None before the first one.

    The inference time of a text in TEI (1.9) is that of its batch, and TEI counts an empty batch whenever its queue
    becomes empty.
    """
    texts = sum(total.get(f"te_{kind}_inference_duration_count", 0.0) for kind in KINDS)
    full = total.get("te_batch_next_tokens_count", 0.0) - batches.get(1.0, 0.0)
    tokens = total.get("te_batch_next_tokens_sum", 0.0)
    if not texts or full <= 0 or not tokens:
        return None
    seconds = sum(total.get(f"te_{kind}_inference_duration_sum", 0.0) for kind in KINDS)
    return (seconds / texts) / (tokens / full)


def total(text: str, name: str) -> float:
    """The sum of all samples of that name; 0 where there is none."""
    matches = [OWN.match(line) for line in text.splitlines() if line.startswith(name)]
    return sum(float(each[3]) for each in matches if each and each[1] == name)
