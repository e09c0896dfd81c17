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
LAST_WORD = re.compile(r" (\S+\n)")  # of a line: the value of a sample
PARTS = ("_bucket", "_sum", "_count", "_total", "_created")


class Family(NamedTuple):
    """The samples of one family of a page. begun: each but for its value; places: of the values among all words."""

    begun: list[str]
    places: list[int]

    def text(self, words: list[str]) -> str:
        parts = [""] * (2 * len(self.begun))
        parts[::2], parts[1::2] = self.begun, [words[place] for place in self.places]
        return "".join(parts)


class PageForm(NamedTuple):
    """A page of a replica but for its values: from scrape to scrape it is the same.

    lines: without their last words. fixed: those last words that are no values, by place. heads: of each family, its
    HELP and TYPE lines.
    """

    lines: list[str]
    fixed: dict[int, str]
    heads: dict[str, list[str]]
    families: dict[str, Family]

    def fits(self, lines: list[str], words: list[str]) -> bool:
        return lines == self.lines and all(words[place] == word for place, word in self.fixed.items())


class JoinedPages:
    """One page of many. Families whose name does not begin with ``prefix`` are left out.

    The pages of 100 replicas have 36,000 lines. A line is understood once; in all scrapes that follow its value is put
    behind what is known of it, which takes a third of the time.
    """

    def __init__(self, prefix: str) -> None:
        self.head = re.compile(rf"# (?:HELP|TYPE) ({prefix}\S*) .*\n")
        self.sample = re.compile(rf"({prefix}[\w:]*)(?:\{{(.*)\}})?")
        self.forms: dict[str, PageForm] = {}  # by labels: of the last scrape

    def text(self, pages: Iterable[tuple[dict[str, str], str]]) -> str:
        """pages: (labels to add, Prometheus text)."""
        heads: dict[str, list[str]] = {}
        samples: dict[str, list[str]] = {}
        forms: dict[str, PageForm] = {}
        for labels, page in pages:
            added = ",".join(f'{key}="{value}"' for key, value in labels.items())
            parts = LAST_WORD.split(page if page.endswith("\n") else f"{page}\n")
            lines, words = parts[:-1:2], parts[1::2]
            form = self.forms.get(added)
            if form is None or not form.fits(lines, words):
                form = self.form(added, lines, words)
            forms[added] = form
            for name, own in form.heads.items():
                known = heads.setdefault(name, [])
                known += [line for line in own if line not in known]
            for name, family in form.families.items():
                samples.setdefault(name, []).append(family.text(words))
        self.forms = forms  # without those that were not asked for again
        return "".join(part for name, blocks in samples.items() for part in (*heads.get(name, ()), *blocks))

    def form(self, added: str, lines: list[str], words: list[str]) -> PageForm:
        form = PageForm(lines, {}, {}, {})
        # A line of one word is no sample, and stands before the next one.
        whole = [line.rpartition("\n")[2] for line in lines]
        for place, (line, word) in enumerate(zip(whole, words, strict=True)):
            if found := self.head.fullmatch(f"{line} {word}"):
                form.fixed[place] = word
                form.heads.setdefault(found[1], []).append(found[0])
        for place, line in enumerate(whole):
            if place in form.fixed or not (found := self.sample.fullmatch(line)):
                continue
            name, own = found.groups()
            family = form.families.setdefault(family_of(name, form.heads), Family([], []))
            family.begun.append(f"{name}{{{added},{own}}} " if own else f"{name}{{{added}}} ")
            family.places.append(place)
        return form


def family_of(name: str, heads: dict[str, list[str]]) -> str:
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
